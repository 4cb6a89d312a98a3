"""`grpo replay`: a kept step is recomputed with its loss and gradient, whatever the recipe."""

import errno
import hashlib
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from grpo_cli import cli
from grpo_cli.checkpoints import manifest, paths
from grpo_cli.commands import replay
from tests import programs
from tests.conftest import Grpo
from tests.models.test_routers import balanced_run

Recomputed = Callable[[Path, int], dict[str, Any]]

MODEL = [
    "model.build.hidden_size=32", "model.build.intermediate_size=64", "model.build.num_layers=2",
    "model.build.warmup_steps=5",
]  # fmt: skip
QUIET = [
    "device=cpu", "steps=3", "prompts_per_step=6", "generation.num_generations=4",
    "dataset.eval=null", "eval.every=0", "log.completions_every=0",
    "checkpoint.every=0",
]  # fmt: skip
LENGTH = ["reward=[length]", "reward.length.args.target=3", "optimizer.learning_rate=3e-3"]
SUMS = ["recipe=arithmetic_tiny", *QUIET, *MODEL, *LENGTH]
LORA = ["recipe=arithmetic_tiny_lora", *SUMS[1:]]
EPISODES = [*QUIET, *MODEL]
# With all of them the gradient is one of several updates on rollouts of which some are clipped.
SEVERAL = ["update.minibatches=2", "update.num_iterations=2"]

RECIPES: dict[str, list[str]] = {  # each mechanism once
    "kl-moving-reference": [*SUMS, "loss.beta=0.05", "loss.reference_every=1",
                            "loss.reference_alpha=0.5"],
    "kl-target": [*SUMS, "loss.beta=0.05", "loss.kl_target=0.001", "update.minibatches=2"],
    "kl-in-reward": [*SUMS, "loss.beta=0.05", "loss.kl_in=reward", "update.minibatches=2"],
    "minibatches-iterations": [*SUMS, "loss.beta=0.05", *SEVERAL],
    "dynamic-sampling-gspo": [*SUMS, "generation.dynamic_sampling=true", "loss=gspo", *SEVERAL],
    "dora": [*LORA, "adapter=dora", "loss.beta=0.05", "update.num_iterations=2"],
    "pissa": [*LORA, "adapter.args.init_lora_weights=pissa", "loss.beta=0.05"],
    "entropy-bonus-clip-cov": [*SUMS, "loss=clip_cov", "loss.entropy_coef=0.01",
                               "loss.entropy_target=6.0", "update.minibatches=2"],
    "top-entropy": [*SUMS, "loss.top_entropy=0.3", "update.num_iterations=2"],
    "dropout-lora": [*LORA, "adapter.args.lora_dropout=0.2", "update.minibatches=2",
                     "update.tokens_per_micro_batch=60"],
    "bfloat16": [*SUMS, "mixed_precision=bf16", "update.minibatches=2"],
    "guess-number": ["recipe=guess_number", *EPISODES, "reward=[environment,length]",
                     "reward.length.args.target=9"],
    "images": ["recipe=shapes_tiny", *QUIET, "model.build.warmup_steps=5", "loss.beta=0.05"],
}  # fmt: skip


@pytest.fixture
def recomputed(grpo: Grpo) -> Recomputed:
    def run(folder: Path, step: int) -> dict[str, Any]:
        code, out, err = grpo("replay", str(folder), f"--step={step}", "--json")
        assert (code, err) == (0, "")
        data: dict[str, Any] = json.loads(out)
        assert {c["name"] for c in data["checks"]} >= {"loss", "grad_norm"}
        assert all(c["agrees"] for c in data["checks"]), data["checks"]
        return data

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name: str, grpo: Grpo, recomputed: Recomputed) -> None:
    code, _, err = grpo("train", *RECIPES[name], "log.keep_steps=[2]", "output_dir=run")
    assert code == 0, err
    recomputed(Path("run"), 2)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with several updates a step that has kept its second step."""
    folder = tmp_path_factory.mktemp("kept")
    words = [*RECIPES["minibatches-iterations"], "checkpoint.every=1", "checkpoint.keep_last=5"]
    argv, sys.argv = sys.argv, ["grpo"]  # Hydra replaces it
    try:
        for name, keep in (("run", ["log.keep_steps=[2]"]), ("without", [])):
            assert cli.run_command(["train", *words, *keep, f"output_dir={folder / name}"]) == 0
    finally:
        sys.argv = argv
    return folder / "run"


def digest(folder: Path) -> str:
    weights = folder / "checkpoints" / "step-3" / "model.safetensors"
    return hashlib.sha256(weights.read_bytes()).hexdigest()


@pytest.mark.runs
def test_a_kept_step(kept: Path, grpo: Grpo, recomputed: Recomputed) -> None:
    assert paths.steps_kept(kept) == [2]
    assert digest(kept) == digest(kept.parent / "without"), "the run is the same"
    data = recomputed(kept, 2)
    assert (data["run"], data["step"], data["processes"]) == (str(kept), 2, 1)
    code, out, err = grpo("replay", str(kept), "--step=2")
    assert (code, err) == (0, "")
    assert "loss: " in out and "equals the recorded" in out  # noqa: PT018


@pytest.mark.runs
def test_a_loss_that_is_not_the_recorded_one(kept: Path, grpo: Grpo, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(kept, changed, ignore=shutil.ignore_patterns("checkpoints"))
    lines = [json.loads(line) for line in (kept / "metrics.jsonl").read_text().splitlines()]
    lines[1]["loss"] += 2e-6
    (changed / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, _, err = grpo("replay", str(changed), "--step=2")
    assert code == 1
    assert "not recomputed to 1e-06: loss: " in err
    assert "apart by 2.0e-06" in err
    assert grpo("replay", str(changed), "--step=2", "--tolerance=1e-5")[0] == 0
    (changed / "metrics.jsonl").write_text(json.dumps(lines[0]) + "\n")
    code, _, err = grpo("replay", str(changed), "--step=2")
    assert (code, "has no line of this step yet" in err) == (2, True)
    state = changed / "replay" / "step-2" / "training" / "state.pt"
    state.write_bytes(state.read_bytes()[:-1])
    (changed / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, _, err = grpo("replay", str(changed), "--step=2")
    assert (code, "is damaged (training/state.pt" in err) == (2, True)


@pytest.mark.runs
def test_a_resumed_run_keeps_its_steps(
    kept: Path, grpo: Grpo, recomputed: Recomputed, tmp_path: Path
) -> None:
    resumed = tmp_path / "resumed"
    shutil.copytree(kept, resumed, ignore=shutil.ignore_patterns("summary.json"))
    for step in (2, 3):
        shutil.rmtree(resumed / "checkpoints" / f"step-{step}")
    words = [*RECIPES["minibatches-iterations"], "checkpoint.every=1", "checkpoint.keep_last=5"]
    again = ["train", *words, f"output_dir={resumed}", "resume=auto", "log.keep_steps=[3]"]
    code, _, err = grpo(*again)
    assert code == 0, err
    assert paths.steps_kept(resumed) == [3], "step 2 was taken again, and not kept"
    assert digest(resumed) == digest(kept)
    recomputed(resumed, 3)


@pytest.mark.runs
def test_a_full_disk_is_a_note(grpo: Grpo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_space = manifest.check_space

    def full(folder: Path, needed: int) -> None:
        if folder.name == "replay":
            raise OSError(errno.ENOSPC, "No space left on device")
        check_space(folder, needed)

    monkeypatch.setattr(manifest, "check_space", full)
    code, out, err = grpo("train", *SUMS, "log.keep_steps=[1,3]", "output_dir=run")
    assert (code, err) == (0, "")
    assert "replay/step-1 could not be written: No space left on device" in out
    assert paths.steps_kept(Path("run")) == []
    assert paths.steps_saved(Path("run")) == [3]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes(strategy: str, recomputed: Recomputed, tmp_path: Path) -> None:
    words = [*RECIPES["minibatches-iterations"], f"distributed={strategy}", "log.keep_steps=[2]"]
    command = programs.torchrun(2, "-m", "grpo_cli", "train", *words, f"output_dir={tmp_path}/run")
    done = programs.run(command)
    assert done.returncode == 0, done.stderr
    assert recomputed(tmp_path / "run", 2)["processes"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [None, 0.2])
def test_experts(
    dropout: float | None,
    tokenizer: PreTrainedTokenizerFast,
    recomputed: Recomputed,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    changes = {"log__keep_steps": [2], "update__tokens_per_micro_batch": 60}
    changes["generation__max_logp_difference"] = None  # dropout makes it large
    run = balanced_run(tokenizer, tmp_path, model__dropout=dropout, **changes)
    capfd.readouterr()  # what training printed
    data = recomputed(run.folder, 2)
    assert "aux_loss" in [c["name"] for c in data["checks"]]


def test_values_that_are_not_finite() -> None:
    recorded = {"loss": 0.5, "grad_norm": None, "kl": None}
    found = replay.compared(recorded, {"loss": 0.5, "grad_norm": math.nan, "kl": 1.0}, 1e-6)
    assert [(c["name"], c["recomputed"], c["agrees"]) for c in found] == [
        ("loss", 0.5, True), ("grad_norm", None, True), ("kl", 1.0, False),
    ]  # fmt: skip
