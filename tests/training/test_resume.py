"""What of a run is kept when it is told to end, or when a checkpoint cannot be written."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_cli.checkpoints import manifest, paths
from grpo_cli.checkpoints.checkpointer import load_state
from grpo_cli.cli import run_command
from grpo_cli.config import saved_recipe
from grpo_cli.config.recipe import Recipe
from grpo_cli.errors import UserError
from grpo_cli.models.settings import Adapter
from grpo_cli.training import ending, resume
from grpo_cli.training.run import Run, StepBatch, StepProgress
from tests.training.test_train import built, trained


def ended(
    left_at: str | None, step: int, unreported: dict[str, float] | None, error: str | None = None
) -> str:
    folder = Path("run")
    run: Any = SimpleNamespace(
        folder=folder,
        state=SimpleNamespace(step=step),
        recovery=SimpleNamespace(unreported=unreported),
        checkpointer=SimpleNamespace(wait=lambda: error),
    )
    return ending.how_it_ended(run, None if left_at is None else folder / "checkpoints" / left_at)


@pytest.mark.parametrize(
    ("left_at", "step", "unreported", "expected"),
    [
        (None, 0, None, "stopped before the first step; there is nothing new to save"),
        ("step-4", 4, None, "stopped after step 4; saved in run/checkpoints/step-4"),
        ("step-4.interrupted", 4, None, "stopped in step 5; saved in run/checkpoints/step-4.inter"),
        (
            "step-4.interrupted",
            4,
            {"reward": 0.5},
            "stopped after step 4, in its evaluation; saved in run/checkpoints/step-4.inter",
        ),
    ],
)
def test_how_a_run_ended(
    left_at: str | None, step: int, unreported: dict[str, float] | None, expected: str
) -> None:
    assert ended(left_at, step, unreported).startswith(expected)
    if step:
        failed = ended(left_at, step, unreported, "no space left")
        assert failed == f"{expected.partition('; ')[0]}; no space left"


@pytest.fixture
def live(tmp_path: Path) -> Any:
    run = built(tmp_path, checkpoint__keep_last=1)
    yield run
    run.close()


def full(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(folder: Path, needed: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("grpo_cli.checkpoints.manifest.check_space", no_space)


def saved(run: Run, step: int, best: int | None = None) -> None:
    run.state.step, run.state.best_step = step, best
    resume.save(run)
    run.checkpointer.wait()


def test_failed_save_is_repeated_at_the_end(live: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        full(live, patch)
        live.state.step = 2
        resume.save(live)  # not waited for: nobody knows yet
        resume.save_interrupted(live)
    path = live.recovery.interrupted
    assert not path.exists()
    resume.save_interrupted(live)
    path = live.recovery.interrupted
    assert path == paths.interrupted_path(live.folder, 2)
    assert paths.resumable(live.folder) == [path]
    saved(live, 4)
    before = paths.checkpoint_path(live.folder, 4).stat().st_mtime_ns
    resume.save_interrupted(live)
    assert live.recovery.interrupted == paths.checkpoint_path(live.folder, 4)
    assert before == paths.checkpoint_path(live.folder, 4).stat().st_mtime_ns, "it is there"


def test_evaluation_interrupted_twice(live: Run) -> None:
    live.recovery.unreported = {}
    stored = []
    for _ in range(2):
        resume.save_interrupted(live)
        path = live.recovery.interrupted
        stored.append(load_state(path)["rng"][0]["torch"])
        live.recovery.random_streams = None  # another sitting
        resume.restore(live, path)
        torch.rand(1)  # a reward's
    assert torch.equal(*stored)


def test_interrupted_step_of_another_recipe(live: Run) -> None:
    live.queue.position = 12
    live.recovery.progress = StepProgress(StepBatch([], {}, {6: [], 7: []}))
    resume.save_interrupted(live)
    live.recipe.loss.epsilon = 0.3
    resume.restore(live, live.recovery.interrupted)
    assert (live.recovery.progress, live.queue.position) == (None, 6), "it begins again"


def test_micro_batches_of_ddp_are_measured_again_in_lockstep(live: Run) -> None:
    budget = live.policy.micro_batches.budget
    budget.tokens = 40
    saved(live, 1)
    for live.workers.runs_in_lockstep, tokens in [(False, 40), (True, 20)]:
        budget.tokens = 20
        resume.restore(live, paths.checkpoint_path(live.folder, 1))
        assert budget.tokens == tokens


def test_best_checkpoint_is_kept(live: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(live, 1, best=1)
    saved(live, 2, best=1)
    with monkeypatch.context() as patch:
        full(live, patch)
        saved(live, 3, best=3)
    saved(live, 4, best=3)
    assert paths.steps_saved(live.folder) == [1, 4]
    resume.restore(live, paths.checkpoint_path(live.folder, 4))  # by another sitting
    assert live.checkpointer.best == 1
    live.checkpointer.best = None
    resume.restore(live, paths.checkpoint_path(live.folder, 4))
    saved(live, 5, best=3)
    assert paths.steps_saved(live.folder) == [1, 5]
    saved(live, 6, best=6)
    saved(live, 7, best=6)
    assert paths.steps_saved(live.folder) == [6, 7]


def test_the_best_checkpoint_keeps_only_its_model(live: Run) -> None:
    saved(live, 1, best=1)
    best, newest = (paths.checkpoint_path(live.folder, step) for step in (1, 2))
    assert paths.has_training_state(best)
    weights = (best / "model.safetensors").read_bytes()
    saved(live, 2, best=1)
    assert (best / "model.safetensors").read_bytes() == weights
    assert not paths.has_training_state(best)
    assert not paths.has_shards(best)
    manifest.check(best)
    assert paths.resumable(live.folder) == [newest], "even if the newest is damaged"


@pytest.mark.runs
def test_without_checkpoints_a_run_leaves_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["recipe=arithmetic_tiny", "prompts_per_step=4", "model.build.warmup_steps=0"]
    words += ["checkpoint.every=0", "eval.every=1", "device=cpu", "dataset.eval_limit=4", "steps=2"]
    assert run_command(["train", *words, "output_dir=run"]) == 0
    files = {p.name for p in Path("run/checkpoints/step-2").rglob("*") if p.is_file()}
    assert {"model.safetensors", "recipe.yaml"} < files
    assert not any(name.endswith((".distcp", ".pt")) for name in files), files
    assert paths.steps_saved(Path("run")) == [2]
    assert run_command(["eval", "run"]) == 0
    assert run_command(["train", *words, "output_dir=run", "resume=auto", "steps=3"]) == 2
    assert "begin a run from it with model.path=run" in capsys.readouterr().err
    again = ["model.build=null", "model.path=run", "dataset.chat=false", "output_dir=again"]
    assert run_command(["train", *words, *again]) == 0


@pytest.mark.runs
def test_metrics_reach_the_disk_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def watched(handle: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", watched)
    trained(tmp_path, steps=2, checkpoint__every=1)
    before_last = synced[: len(synced) - 1 - synced[::-1].index("manifest.json.new")]
    assert "metrics.jsonl" in before_last, "the first step's line, before the second's weights"


KEPT: list[tuple[str, dict[str, Any], str | None]] = [
    ("adapter", {"sync": "adapter"}, None),
    ("adapter", {"method": "rslora"}, "adapter.method = rslora: .* was trained with lora"),
    ("adapter", {"args": {"init_lora_weights": "pissa"}}, "adapter.args = .*another output_dir"),
    ("model", {"quantization": "nf4"}, "model.quantization = nf4: .* was trained with none"),
    ("optimizer", {"algorithm": "torch.optim:SGD"}, r"with adapter\.path=[^ ]+\.$"),
]


@pytest.mark.parametrize(("section", "changed", "message"), KEPT, ids=str)
def test_what_a_resumed_run_keeps(
    tmp_path: Path, section: str, changed: dict[str, Any], message: str | None
) -> None:
    recipe = Recipe(adapter=Adapter(method="lora"))
    (tmp_path / "training").mkdir()
    (tmp_path / "adapter_config.json").touch()
    (tmp_path / "training" / "recipe.yaml").write_text(saved_recipe.as_yaml(recipe))
    recipe = replace(recipe, **{section: replace(getattr(recipe, section), **changed)})
    if message is None:
        resume.check_kept(recipe, tmp_path)
        return
    with pytest.raises(UserError, match=message):
        resume.check_kept(recipe, tmp_path)
    if section == "optimizer":  # where all weights are trained
        (tmp_path / "adapter_config.json").unlink()
        with pytest.raises(UserError, match=r"with model\.path=[^ ]+ model\.build=null\.$"):
            resume.check_kept(recipe, tmp_path)


@pytest.mark.runs
def test_resume_reads_the_runs_own_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["prompts_per_step=4", "model.build.warmup_steps=2", "eval.every=0", "device=cpu"]
    words += ["dataset.eval=null", "checkpoint.every=2", "output_dir=run"]
    assert run_command(["train", "recipe=arithmetic_tiny", *words, "steps=2"]) == 0
    assert run_command(["train", "resume=run", "steps=3"]) == 0
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == 3
    for start, first in (("run/checkpoints/step-2", 3), ("run", 4)):
        fork = [f"resume={start}", f"output_dir=fork-{first}", "steps=4"]
        assert run_command(["train", *fork]) == 0
        steps = Path(f"fork-{first}/metrics.jsonl").read_text().splitlines()
        assert json.loads(steps[0])["step"] == first
    # A finished run keeps its record, and a run with nothing left to do is not begun.
    recipe, newest = Path("run/recipe.yaml").read_text(), "resume=run/checkpoints/step-3"
    for words in ([newest, "output_dir=run", "seed=5"], ["resume=run", "output_dir=fork"]):
        capsys.readouterr()
        assert run_command(["train", *words, "steps=3"]) == 2
        assert "steps = 3: run/checkpoints/step-3 has them all" in capsys.readouterr().err
    assert not Path("fork").exists()
    assert Path("run/recipe.yaml").read_text() == recipe
    # Of another user, who asks for code.
    stored = Path("run/recipe.yaml")
    stored.write_text(stored.read_text().replace("callbacks: {}", "callbacks: {a: {path: 'b:C'}}"))
    assert run_command(["train", "resume=run", "steps=4"]) == 2
    assert "callbacks.a.path = b:C. If you trust" in capsys.readouterr().err
