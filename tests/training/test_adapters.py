"""A run that trains an adapter: what it leaves, how it resumes, evaluates and is exported."""

import hashlib
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from grpo_cli import cli

pytest.importorskip("peft")
SMALL = [
    # exact_match would be 0 for all: nothing would be trained.
    "recipe=arithmetic_tiny_lora", "reward=[length]", "reward.length.args.target=3",
    "device=cpu", "steps=3", "prompts_per_step=8",
    "model.build.hidden_size=32", "model.build.intermediate_size=64", "model.build.num_layers=2",
    "model.build.warmup_steps=2",
    "dataset.eval_limit=8", "checkpoint.every=1", "log.report=false",
    "eval.at_start=false",
]  # fmt: skip
# Blocks of 64 weights in each row.
QUANTIZED = ["model.build.hidden_size=64", "model.build.intermediate_size=128"]


def grpo(*words: str) -> None:
    assert cli.run_command([*words]) == 0


def train(out: Path, *words: str) -> Path:
    grpo("train", *SMALL, f"output_dir={out}", *words)
    return out / "checkpoints" / "step-3"


def digest(folder: Path, name: str = "adapter_model.safetensors") -> str:
    return hashlib.sha256((folder / name).read_bytes()).hexdigest()


@pytest.mark.runs
@pytest.mark.parametrize(
    "words",
    [
        ["loss.beta=0.05"],
        ["loss.beta=0.05", "loss.reference_every=1", "loss.reference_alpha=0.5"],
        ["adapter=dora", "adapter.args.lora_dropout=0.2", "adapter.args.modules_to_save=[norm]"],
        [*QUANTIZED, "adapter=qlora", "loss.beta=0.05", "model.gradient_checkpointing=true"],
    ],
    ids=["off", "moving", "dora", "qlora"],
)
def test_a_resumed_run_is_the_straight_run(tmp_path: Path, words: list[str]) -> None:
    straight = train(tmp_path / "straight", *words)
    grpo("train", *SMALL, f"output_dir={tmp_path / 'run'}", *words, "steps=2")
    resumed = train(tmp_path / "run", *words, "resume=auto")
    assert (straight / "adapter_model.safetensors").stat().st_size < 100_000
    assert digest(resumed) == digest(straight)
    assert not (straight / "model.safetensors").exists()
    weights = load_file(straight / "adapter_model.safetensors")
    assert all(w.abs().max() > 0 for name, w in weights.items() if "lora_B" in name), "trained"


@pytest.mark.runs
def test_a_refused_resume_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    train(tmp_path, "loss.beta=0.05", "steps=2")
    before = [(tmp_path / name).read_text() for name in ("recipe.yaml", "command.txt")]
    changed = [*SMALL, f"output_dir={tmp_path}", "loss.beta=0.05", "adapter.rank=3", "resume=auto"]
    assert cli.run_command(["train", *changed]) == 2
    assert [(tmp_path / name).read_text() for name in ("recipe.yaml", "command.txt")] == before
    train(tmp_path, "loss.beta=0.05", "resume=auto")
    assert len((tmp_path / "command.txt").read_text().splitlines()) == 2


@pytest.mark.runs
@pytest.mark.parametrize(
    "more", [["checkpoint.model=never"], [*QUANTIZED, "adapter=qlora"]], ids=["lora", "qlora"]
)
def test_checkpoint_is_evaluated_and_exported(tmp_path: Path, more: list[str]) -> None:
    path = train(tmp_path / "run", "optimizer.learning_rate=0.05", *more)
    base = Path(json.loads((path / "adapter_config.json").read_text())["base_model_name_or_path"])
    before = digest(base, "model.safetensors")
    grpo("export", str(path), str(tmp_path / "alone"))
    grpo("export", str(path), str(tmp_path / "merged"), "--merge")
    assert digest(tmp_path / "alone") == digest(path)
    ids = torch.tensor([[5, 6, 7]])
    folders = (base, tmp_path / "merged")
    plain, merged = (AutoModelForCausalLM.from_pretrained(f)(ids).logits for f in folders)
    assert (plain - merged).abs().max() > 1e-2, "training has changed the model"
    assert digest(base, "model.safetensors") == before
    rows = []
    for number, model in enumerate((path, tmp_path / "merged")):
        out = tmp_path / f"eval-{number}"
        words = ["recipe=arithmetic_tiny", "dataset.eval_limit=8", f"output_dir={out}"]
        # With `recipe=`, the one that the checkpoint stores is not read.
        if "adapter=qlora" in more and model == path:
            words.append("model.quantization=nf4")
        grpo("eval", str(model), *words)
        (file,) = out.rglob("completions.parquet")
        rows.append(file)
    own, other = (pq.read_table(file).column("completion").to_pylist() for file in rows)
    assert own == other


@pytest.mark.runs
def test_training_from_an_adapter(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = train(tmp_path / "first", "optimizer.learning_rate=0.05")
    config = first / "adapter_config.json"
    stored = json.loads(config.read_text())
    config.write_text(json.dumps(stored | {"base_model_name_or_path": "some/model"}))
    grpo("export", str(first), str(tmp_path / "edited"))  # which finds no damage
    second = train(tmp_path / "second", f"adapter.path={first}", "loss.beta=0.05")
    lines = (tmp_path / "second" / "metrics.jsonl").read_text().splitlines()
    assert "was trained on some/model, and is now trained on model.path" in capfd.readouterr().out
    kl = [json.loads(line).get("kl") for line in lines]
    assert kl[0] == pytest.approx(0, abs=1e-6), "the reference is the adapter it began with"
    assert digest(second) != digest(first)
    wrong = ["train", "recipe=arithmetic_tiny", f"model.path={first}", "model.build=null"]
    assert cli.run_command(wrong) == 2
    assert "is an adapter; continue training it with adapter=lora" in capfd.readouterr().err
