"""`grpo plan` from the command line: listed GPUs, this machine, mistakes in one sentence."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from grpo_cli import cli
from grpo_cli.models import attention


@pytest.fixture
def plan(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns what runs a command line in this process: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["grpo"])

    def run(*words: str) -> tuple[int, str, str]:
        code = cli.run_command(["plan", *words])
        return code, *capfd.readouterr()

    return run


def folder_of(path: Path, **sizes: Any) -> Path:
    """Writes the config of a Qwen2, and nothing else."""
    config = transformers.Qwen2Config(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False, **sizes,
    )  # fmt: skip
    config.save_pretrained(path)
    return path


def test_a_listed_gpu(plan: Any) -> None:
    code, out, err = plan("gpu=h100-80gb", "mean_tokens=3")
    assert (code, err) == (0, "")
    assert out.startswith("arithmetic_tiny: 1.02 M parameters on h100-80gb")
    assert "prompts of 6 tokens x 4 completions of 3 tokens" in out, "tokens of the shipped rows"
    assert "240 steps" in out


def test_a_folder_with_a_config_only(plan: Any, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "seven")
    words = (f"model.path={folder}", "recipe=math_qwen", "gpu=l4", "prompt_tokens=100", "--json")
    code, out, err = plan(*words)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert not found["fits"]
    assert found["parameters"] == 7615616512
    assert found["prompt_tokens"] == 100
    first = found["changes"][0]
    assert first["fits"]
    assert "adapter=" in first["set"]
    assert first["peak"] < found["peak"]


def test_several_nodes_divide_the_gpus(plan: Any) -> None:
    code, _, err = plan("gpu=a10", "gpus=3", "nodes=2")
    assert code == 2
    assert err.startswith("grpo: gpus = 3: must be a multiple of nodes = 2")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpu=h100"], "gpu = h100: is not listed"),
        (["gpu=l4", "signal=2"], "signal = 2"),
        (["gpu=l4", "loss.bta=1"], "loss.bta"),
        (["gpu=l4", "stepz=1"], "stepz: there is no such word"),
        (["gpu=l4", "model.build=null", "model.path=no/model"], "its config.json"),
        (["gpu=l4", "recipe=shapes_tiny"], "model.build.vision_layers: the parameters"),
    ],
)
def test_mistakes_are_one_sentence(plan: Any, words: list[str], said: str) -> None:
    code, out, err = plan(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


@pytest.mark.runs
def test_this_machine_is_timed(plan: Any) -> None:
    words = ("prompts_per_step=4", "mean_tokens=3", "--json", "device=cpu")
    code, out, err = plan(*words)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["measured_speeds"]
    assert found["device"] == "cpu"
    assert all(found["time"][stage] > 0 for stage in ("generate", "forward_backward", "optimizer"))
    assert found["run_seconds"] == pytest.approx(240 * found["step_seconds"], rel=0.01)


@pytest.mark.runs
def test_times_are_assumed_where_the_model_cannot_be_timed(
    plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise attention.UnsupportedModelError("not this one")

    monkeypatch.setattr("grpo_cli.training.plan.trial.decode_seconds", refuse)
    monkeypatch.setattr("grpo_cli.training.plan.trial.Trial._micro_batch", refuse)
    found = json.loads(plan("prompts_per_step=4", "--json", "device=cpu")[1])
    assert not found["measured_speeds"]
    assert "times are assumed, not measured: not this one" in found["notes"]


def test_a_large_model_is_timed_with_some_of_its_layers(tmp_path: Path) -> None:
    from grpo_cli.training.plan.trial import MOST_BYTES, smaller

    config = transformers.AutoConfig.from_pretrained(folder_of(tmp_path / "seven"))
    assert smaller(config).num_hidden_layers == 1, "its embeddings alone are 4.4 GB"
    few = transformers.Qwen2Config(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=40, num_attention_heads=16,
        num_key_value_heads=2, vocab_size=1000, tie_word_embeddings=True,
    )  # fmt: skip
    cut = smaller(few)
    assert 1 < cut.num_hidden_layers < 40
    assert few.num_hidden_layers == 40
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(cut)
    assert sum(p.numel() * 4 for p in model.parameters()) <= MOST_BYTES


def test_episodes_are_named_as_left_out(plan: Any) -> None:
    _, out, _ = plan("recipe=calculator", "gpu=l4")
    assert "note: an episode counts as one completion" in out
