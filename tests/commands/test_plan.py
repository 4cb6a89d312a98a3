"""`grpo plan` from the command line: listed GPUs, this machine, mistakes in one sentence."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from grpo_cli import cli


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
    code, out, err = plan("gpu=h100-80gb")
    assert (code, err) == (0, "")
    assert out.startswith("arithmetic_tiny: 1.02 M parameters on h100-80gb")
    assert "prompts of 6 tokens x 4 completions of up to" in out, "tokens of the shipped rows"


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpu=h100"], "gpu = h100: is not listed"),
        (["gpu=l4", "prompt_tokens=0"], "prompt_tokens = 0"),
        (["gpu=l4", "loss.bta=1"], "loss.bta"),
        (["gpu=l4", "stepz=1"], "stepz: there is no such word"),
        (["gpu=l4", "model.build=null", "model.path=no/model"], "its config.json"),
    ],
)
def test_mistakes_are_one_sentence(plan: Any, words: list[str], said: str) -> None:
    code, out, err = plan(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err
