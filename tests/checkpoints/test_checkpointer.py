"""Checkpoints: whole or skipped, the same whoever wrote them, and no wait for training."""

import copy
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers import PreTrainedTokenizerFast as Tokenizer

from grpo_cli import random_streams
from grpo_cli.checkpoints import checkpointer, manifest, retention
from grpo_cli.checkpoints.checkpointer import Checkpointer, Parts
from grpo_cli.checkpoints.paths import (
    checkpoint_path,
    interrupted_path,
    kept_path,
    recover,
    resumable,
    steps_saved,
)
from grpo_cli.checkpoints.shards import Piece, PieceSavePlanner, Shards
from grpo_cli.distributed import heartbeat
from grpo_cli.distributed.workers import Workers
from tests import checkpointing, programs
from tests.checkpointing import same, whole

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Late(Checkpointer):
    """Writes only when it is let go: what training does until then must not be in the file."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.go = threading.Event()

    def write(self, job: Any) -> None:
        self.go.wait(60)
        super().write(job)


@pytest.fixture
def workers() -> Workers:
    return Workers("cpu")


@pytest.fixture
def saver(workers: Workers, lines: list[str]) -> Checkpointer:
    return Checkpointer(workers, lines.append)


def trained(model: PreTrainedModel, steps: int = 2) -> Parts:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(torch.tensor([[5, 6, 7]])).logits.square().mean().backward()
        optimizer.step()
    return Parts(model, optimizer)


def fresh(model: PreTrainedModel) -> Parts:
    """The same model with other weights, and an optimizer that has done nothing."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.fill_(3)
    return Parts(other, torch.optim.AdamW(other.parameters(), lr=0.5))


def save(
    saver: Checkpointer,
    path: Path,
    parts: Parts,
    tokenizer: Tokenizer,
    state: dict[str, Any] | None = None,
    plain: bool = False,
    done: Callable[[], None] = lambda: None,
) -> str | None:
    state = {"name": path.name} if state is None else state
    saver.save(path, parts, state, "steps: 3\n", tokenizer, with_model=plain, done=done)
    return saver.wait()


Saved = Callable[..., Path]


@pytest.fixture
def saved(tmp_path: Path, tokenizer: Tokenizer, saver: Checkpointer) -> Saved:
    """Saves the checkpoint of a step, which must succeed; returns its path."""

    def save_step(step: int, parts: Parts, state: dict[str, Any] | None = None, **how: Any) -> Path:
        path = checkpoint_path(tmp_path, step)
        assert save(saver, path, parts, tokenizer, state, **how) is None
        return path

    return save_step


def empty(folder: Path, *steps: int) -> None:
    for step in steps:
        checkpoint_path(folder, step).mkdir(parents=True)


def test_a_checkpoint_gives_back_all_it_was_given(model: PreTrainedModel, saved: Saved) -> None:
    parts = trained(model)
    state = {"run": {"step": 3, "best": None, "metrics": {"a": 0.5}}, "rng": torch.arange(3)}
    path = saved(3, parts, state)
    found = checkpointer.load_state(path)
    assert found["run"] == state["run"]
    assert torch.equal(found["rng"], torch.arange(3))
    assert (path / "training" / "recipe.yaml").read_text("utf-8") == "steps: 3\n"
    assert [p.name for p in path.iterdir()] == ["training"], "and no model folder"
    other = fresh(model)
    checkpointer.load(path, other)
    assert same(whole(other), whole(parts))
    steps = [s["step"] for s in other.optimizer.state.values()]
    assert steps == [2.0] * len(list(model.parameters())), "moments alone are not enough"
    assert other.optimizer.param_groups[0]["lr"] == 0.5, "the recipe's, which may have changed"
    for p in (parts, other):  # and both go on alike
        p.optimizer.param_groups[0]["lr"] = 0.1
        p.optimizer.zero_grad()
        p.model(torch.tensor([[8, 9]])).logits.sum().backward()
        p.optimizer.step()
    assert same(whole(other), whole(parts))


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, model: PreTrainedModel, tokenizer: Tokenizer, workers: Workers
) -> None:
    parts, path = trained(model), checkpoint_path(tmp_path, 1)
    state, expected = {"list": [1]}, whole(parts)
    saver = Late(workers, print)
    saver.save(path, parts, state, "", tokenizer, with_model=True)
    with torch.no_grad():
        for tensor in parts.tensors().values():
            tensor.add_(1)
    state["list"].append(2)
    assert not path.exists()
    assert saver.wait(0.01) == "is still being written"
    saver.go.set()
    assert saver.wait() is None
    assert checkpointer.load_state(path) == {"list": [1]}
    other = fresh(model)
    checkpointer.load(path, other)
    assert same(whole(other), expected)
    plain = AutoModelForCausalLM.from_pretrained(path).state_dict()
    name = "model.embed_tokens.weight"
    assert torch.equal(plain[name], expected[f"model.{name}"])
    assert not saver.staging.pinned, "a CPU's copies are freed, as large as the training itself"
    saver.save(path, parts, {}, "", tokenizer, with_model=False)
    assert saver.wait() is None
    checkpointer.load(path, other)
    assert same(whole(other), whole(parts))


class Writing(threading.Thread):
    """Writes 5 files, each while it is waited for, then nothing any more for 5 looks."""

    looks = 0

    def is_alive(self) -> bool:
        return self.looks < 10

    def join(self, timeout: float | None = None) -> None:
        assert timeout <= 1
        self.looks += 1
        if self.looks <= 5:
            manifest.write_file(Path(self.name), b"x")


def test_a_wait_for_a_save_is_no_stall_while_it_gets_on(
    tmp_path: Path, saver: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[tuple[int, str]] = []
    thread = Writing(name=str(tmp_path / "file"))
    monkeypatch.setattr(
        heartbeat, "touch", lambda: touched.append((thread.looks, heartbeat.state().stage))
    )
    heartbeat.at("generate")
    saver.thread = thread
    assert saver.wait() is None
    assert touched == [(n, "checkpoint") for n in range(1, 6)]
    assert heartbeat.state().stage == "generate"


def test_what_a_save_under_way_takes_yet(
    tmp_path: Path, model: PreTrainedModel, tokenizer: Tokenizer, workers: Workers
) -> None:
    saver = Late(workers, print)
    assert saver.seconds_left(100.0) == 0
    saver.save(checkpoint_path(tmp_path, 1), trained(model), {}, "", tokenizer, with_model=False)
    assert checkpointer.is_being_written()
    saver.began -= 30
    assert saver.seconds_left(100.0) == pytest.approx(70, abs=5)
    assert saver.seconds_left(10.0) == 0
    saver.go.set()
    assert saver.wait() is None
    assert saver.seconds_left(100.0) == 0
    assert not checkpointer.is_being_written()


def test_reading_a_checkpoint_is_no_stall(
    model: PreTrainedModel, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(1, trained(model))
    touched: list[bool] = []
    monkeypatch.setattr(heartbeat, "touch", lambda: touched.append(True))
    assert manifest.verify(path) is None
    hashed = len(touched)
    assert hashed >= len(manifest.read(path))
    checkpointer.load(path, fresh(model))
    assert len(touched) - hashed >= len(Shards(path).tensors)


def test_a_save_waits_for_the_one_before(
    tmp_path: Path, model: PreTrainedModel, tokenizer: Tokenizer, workers: Workers
) -> None:
    saver = Late(workers, print)
    threading.Timer(0.2, saver.go.set).start()
    for step in (1, 2):
        path = checkpoint_path(tmp_path, step)
        saver.save(path, trained(model), {}, "", tokenizer, with_model=False)
        assert steps_saved(tmp_path) == ([] if step == 1 else [1])
    assert saver.wait() is None
    assert steps_saved(tmp_path) == [1, 2]


def test_every_kind_of_tensor_comes_back(model: PreTrainedModel, saved: Saved) -> None:
    model.scale = nn.Parameter(torch.tensor(2.5))
    model.narrow = nn.Parameter(torch.randn(3, 5).to(torch.bfloat16))
    model.turned = nn.Parameter(torch.randn(4, 6).T)
    model.nothing = nn.Parameter(torch.zeros(0, 4))
    model.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
    model.register_buffer("count", torch.tensor([7]))
    model.register_buffer("cache", torch.randn(3), persistent=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for name in ("scale", "narrow", "turned", "nothing"):
        getattr(model, name).grad = torch.ones_like(getattr(model, name))
    optimizer.step()
    parts = Parts(model, optimizer)
    expected = whole(parts)
    path = saved(1, parts)
    stored = Shards(path)
    names = stored.names("model")
    assert {"scale", "narrow", "turned", "nothing", "frozen", "count"} <= set(names)
    assert "cache" not in names, "not persistent: computed anew"
    assert "lm_head.weight" not in names, "tied to the embeddings, which are there"
    assert torch.equal(stored.read("model.turned"), model.turned)
    with_state = {n.rpartition(".")[0] for n in stored.names("optimizer")}
    assert with_state == {"scale", "narrow", "turned", "nothing"}, "the others had no gradient"

    other = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.zero_()
    live = Parts(
        other, torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], lr=0.1)
    )
    checkpointer.load(path, live)
    assert same(whole(live), expected)
    assert not other.turned.is_contiguous()
    state = live.optimizer.state[other.narrow]
    assert state["exp_avg"].dtype == torch.bfloat16
    assert state["step"].dtype == torch.float32, "counts beyond 256"
    live.optimizer.step()


def test_moments_that_were_not_saved_are_gone(model: PreTrainedModel, saved: Saved) -> None:
    parts = trained(model, steps=0)
    start = whole(parts)
    path = saved(0, parts)
    moved = trained(copy.deepcopy(model))
    p = moved.model.get_input_embeddings().weight
    moved.optimizer.state[p]["max_exp_avg_sq"] = torch.zeros_like(p)  # of another setting
    checkpointer.load(path, moved)
    assert not moved.optimizer.state
    assert same(whole(moved), start)


def test_a_reference_is_kept_where_it_has_moved(model: PreTrainedModel, saved: Saved) -> None:
    parts = trained(model)
    still = saved(1, parts)
    parts.reference = copy.deepcopy(model)
    with torch.no_grad():
        parts.reference.get_input_embeddings().weight.mul_(2)
    moved = saved(2, parts)
    assert not checkpointer.has_reference(still)
    assert checkpointer.has_reference(moved)
    other = fresh(model)
    other.reference = fresh(model).model
    untouched = copy.deepcopy(other.reference.state_dict())
    checkpointer.load(still, other)
    assert same(other.reference.state_dict(), untouched)
    checkpointer.load(moved, other)
    assert same(other.reference.state_dict(), parts.reference.state_dict())
    assert not same(other.reference.state_dict(), other.model.state_dict())


def test_a_checkpoint_of_another_model_is_refused(model: PreTrainedModel, saved: Saved) -> None:
    path = saved(1, trained(model))
    wider, more, less = (copy.deepcopy(model) for _ in range(3))
    wider.model.norm.weight = nn.Parameter(torch.ones(48))
    more.extra = nn.Parameter(torch.ones(1))
    del less.model.norm
    for other, why in (
        (wider, r"model: model.norm.weight is \[32\] there, \[48\] here"),
        (more, "model: extra is not in the checkpoint"),
        (less, "model: model.norm.weight is only in the checkpoint"),
    ):
        with pytest.raises(ValueError, match=why):
            checkpointer.load(path, Parts(other, torch.optim.AdamW(other.parameters())))


def test_torn_checkpoint_is_rewritten(tmp_path: Path, model: PreTrainedModel, saved: Saved) -> None:
    empty(tmp_path, 2)
    partial = tmp_path / "checkpoints" / "step-4.tmp"
    partial.mkdir()
    (partial / "left-over").touch()
    assert steps_saved(tmp_path) == [2]
    path = saved(4, trained(model))
    assert steps_saved(tmp_path) == [2, 4]
    assert not partial.exists()
    assert not (path / "left-over").exists()


def test_the_same_name_replaces_its_checkpoint(model: PreTrainedModel, saved: Saved) -> None:
    saved(3, trained(model))
    path = saved(3, trained(model), {"step": "again"})
    assert checkpointer.load_state(path) == {"step": "again"}
    assert [p.name for p in path.parent.iterdir()] == ["step-3"]
    assert manifest.verify(path) is None


@pytest.mark.parametrize("new_is_there", [False, True])
def test_a_replacement_that_was_killed_is_undone(tmp_path: Path, new_is_there: bool) -> None:
    old = tmp_path / "checkpoints" / "step-3.replaced"
    old.mkdir(parents=True)
    (old / "which").write_text("old")
    if new_is_there:  # killed after the second rename
        empty(tmp_path, 3)
        (checkpoint_path(tmp_path, 3) / "which").write_text("new")
    assert resumable(tmp_path) == [checkpoint_path(tmp_path, 3)], "as it will be called"
    for _ in range(2):  # the second process finds nothing left to do
        recover(tmp_path)
    assert steps_saved(tmp_path) == [3]
    assert not old.exists()
    kept = (checkpoint_path(tmp_path, 3) / "which").read_text()
    assert kept == ("new" if new_is_there else "old")


def test_failed_replacement_is_undone(tmp_path: Path, model: PreTrainedModel, saved: Saved) -> None:
    path = saved(3, trained(model))
    with pytest.raises(FileNotFoundError):
        checkpointer.give_name(tmp_path / "no-such-folder", path)
    assert manifest.verify(path) is None


def test_what_follows_a_checkpoint_happens_once_it_has_its_name(
    tmp_path: Path, model: PreTrainedModel, saved: Saved, lines: list[str]
) -> None:
    path, seen = checkpoint_path(tmp_path, 3), []

    def prune_badly() -> None:
        seen.append((path.exists(), manifest.verify(path)))
        raise OSError("no such luck")

    saved(3, trained(model), done=prune_badly)
    assert seen == [(True, None)]
    assert lines == ["checkpoint step-3 is written, but then: no such luck"]


def test_a_save_that_fails_leaves_the_old_ones_and_the_run_goes_on(
    tmp_path: Path, model: PreTrainedModel, tokenizer: Tokenizer, saver: Checkpointer, lines: Any
) -> None:
    parts = trained(model)
    assert save(saver, checkpoint_path(tmp_path, 2), parts, tokenizer) is None
    for step in (2, 4):
        path = checkpoint_path(tmp_path, step)
        error = save(saver, path, parts, tokenizer, {"f": lambda: 0})
        assert f"checkpoint step-{step} could not be written: " in error
        assert "pickle" in error
        assert lines.pop() == f"{error}; the run continues"
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-2"]
    assert checkpointer.load_state(checkpoint_path(tmp_path, 2)) == {"name": "step-2"}
    assert save(saver, checkpoint_path(tmp_path, 4), parts, tokenizer) is None
    assert saver.error is None
    assert lines == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB; the test is skipped where nobody may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("looked", [True, False])
def test_a_full_disk_fails_one_save(
    small_disk: Path,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    saver: Checkpointer,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    looked: bool,
) -> None:
    if not looked:  # another user takes the space that was there a moment ago
        monkeypatch.setattr(manifest, "check_space", lambda folder, needed: None)
    parts = trained(model)
    assert save(saver, checkpoint_path(small_disk, 1), parts, tokenizer) is None
    other = small_disk / "other"
    other.write_bytes(bytes(1_200_000))
    error = save(saver, checkpoint_path(small_disk, 2), parts, tokenizer, plain=True)
    start = "checkpoint step-2 could not be written: No space left on device ("
    assert error.startswith(f"{start}{small_disk}/checkpoints: "), error
    assert " kB free, about " in error, error
    assert lines == [f"{error}; the run continues"]
    assert [p.name for p in (small_disk / "checkpoints").iterdir()] == ["step-1"]
    assert manifest.verify(checkpoint_path(small_disk, 1)) is None
    other.unlink()
    assert save(saver, checkpoint_path(small_disk, 2), parts, tokenizer, plain=True) is None


def test_what_killed_saves_have_left_makes_room_for_the_next(
    tmp_path: Path,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    workers: Workers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a disk that they have filled would fail every save, and no save would remove them."""
    saver, torn = Checkpointer(workers, print), tmp_path / "checkpoints" / "step-5.tmp"
    (torn / "training").mkdir(parents=True)
    monkeypatch.setattr(manifest, "free_bytes", lambda folder: 0 if torn.exists() else 1e9)
    assert save(saver, checkpoint_path(tmp_path, 6), trained(model), tokenizer) is None
    assert steps_saved(tmp_path) == [6]


@pytest.mark.parametrize(
    ("holds", "keep_last", "best", "damaged", "steps", "removed"),
    [
        (3.5, 2, None, None, [3, 4], []),  # a disk with room for one more
        (2.5, 2, None, None, [3, 4], [(3, 1), (4, 2)]),
        (1.5, 1, None, None, [1], []),
        (2.5, 2, None, 2, [1, 2], []),  # the only complete one stays
        (2.5, 1, 1, None, [1, 2], []),  # the best one and the newest stay
    ],
)
def test_the_oldest_checkpoint_goes_first_on_a_disk_that_holds_no_more(
    tmp_path: Path,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    saver: Checkpointer,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    holds: float,
    keep_last: int,
    best: int | None,
    damaged: int | None,
    steps: list[int],
    removed: list[tuple[int, int]],
) -> None:
    folder, parts = tmp_path / "checkpoints", trained(model)

    def taken() -> int:
        return sum(f.stat().st_blocks * 512 for f in folder.rglob("*"))

    save(saver, checkpoint_path(tmp_path, 1), parts, tokenizer)
    size = holds * taken()
    monkeypatch.setattr(manifest, "free_bytes", lambda folder: size - taken())
    for step in (2, 3, 4):
        path = checkpoint_path(tmp_path, step)
        kept = partial(retention.outdated, tmp_path, keep_last, best, path)
        saver.save(path, parts, {}, "", tokenizer, with_model=False, outdated=kept)
        if saver.wait() is None:
            retention.prune(tmp_path, keep_last, best, path)
        if step == damaged:
            (path / "training" / "state.pt").write_bytes(b"")
    assert steps_saved(tmp_path) == steps
    assert [line for line in lines if "removed" in line] == [
        f"checkpoint step-{new} fits on the disk only without step-{old}: removed before it is "
        f"written; step-{new - 1} stays"
        for new, old in removed
    ]
    failed = [line for line in lines if "could not be written: No space left" in line]
    assert len(failed) == 4 - steps[-1]


def test_an_unsafe_index_is_refused(model: PreTrainedModel, saved: Saved, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "evil"),)

    path = saved(1, trained(model))
    index = path / "training" / "shards" / ".metadata"
    index.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        Shards(path)
    index.write_bytes(b"cthis\nd\n.")
    with pytest.raises(pickle.UnpicklingError, match=r"this\.d"):
        Shards(path)
    assert "this" not in sys.modules, "importing runs code, too"
    assert not (tmp_path / "evil").exists()


def test_copies_of_a_shard_are_written_once_and_none_may_be_missing() -> None:
    upper, lower = (
        Piece(torch.ones(2, 3), torch.Size([row, 0]), torch.Size([4, 3])) for row in (0, 2)
    )
    planners = [PieceSavePlanner({"model.w": piece}) for piece in (upper, upper, lower)]
    local = [planner.create_local_plan() for planner in planners]
    plans, index = planners[0].create_global_plan(local)
    assert [len(plan.items) for plan in plans] == [1, 0, 1]
    assert len(index.state_dict_metadata["model.w"].chunks) == 2
    with pytest.raises(ValueError, match=r"model.w invalid fill tensor-volume: 12 chunks"):
        planners[0].create_global_plan(local[:2])


@pytest.mark.slow
def test_any_number_of_processes_loads_it(tmp_path: Path, workers: Workers) -> None:
    for processes in (2, 3):
        program = ["-m", "tests.checkpointing", str(tmp_path)]
        done = programs.run(programs.torchrun(processes, *program))
        assert done.returncode == 0, done.stdout + done.stderr
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    names = ["ddp", "fsdp2-True", "fsdp2-False", "three"]
    for name in names:
        assert manifest.verify(tmp_path / name) is None
        parts = checkpointing.make_parts(checkpointing.make_model(4), "single", 1)
        checkpointer.load(tmp_path / name, parts)
        assert same(whole(parts), expected), name
    sizes = [os.path.getsize(p) for p in (tmp_path / "ddp/training/shards").glob("*.distcp")]
    assert len(sizes) == 2
    assert max(sizes) < 1.2 * min(sizes), "each writes its half of what all hold alike"
    for name in ("ddp", "fsdp2-True", "three"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        assert len(loaded) > 20
        assert all(
            torch.equal(t, expected[f"model.{n}"]) for n, t in loaded.items() if "lm_" not in n
        )
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert "FSDP" not in config["architectures"][0]


@pytest.mark.parametrize(
    ("there", "keep_last", "best", "others", "kept"),
    [
        ([3, 20, 30, 100], 2, None, {}, [30, 100]),
        ([3, 20, 30, 100], 1, 20, {}, [20, 100]),
        ([3, 20, 30, 100], 2, 30, {}, [30, 100]),
        ([3, 20, 30, 100], 9, None, {}, [3, 20, 30, 100]),
        ([20, 30, 40], 1, None, {"newest": 30}, [30, 40]),  # gone on from 20, for 40 is damaged
        ([1, 2, 3], 1, None, {"in_use": 1}, [1, 3]),  # being read
    ],
)
def test_prune_keeps_the_newest_the_best_and_what_is_in_use(
    tmp_path: Path,
    there: list[int],
    keep_last: int,
    best: int | None,
    others: dict[str, int],
    kept: list[int],
) -> None:
    empty(tmp_path, *there)
    known = {name: checkpoint_path(tmp_path, step) for name, step in others.items()}
    in_use = {known["in_use"]} if "in_use" in known else ()
    retention.prune(tmp_path, keep_last, best, known.get("newest"), in_use)
    assert steps_saved(tmp_path) == kept


def test_prune_removes_a_link_and_not_what_lies_behind_it(tmp_path: Path) -> None:
    moved = tmp_path / "other_disk"
    (moved / "training").mkdir(parents=True)
    run = tmp_path / "run"
    checkpoint_path(run, 20).mkdir(parents=True)
    for link in (checkpoint_path(run, 10), interrupted_path(run, 5), kept_path(run, 4)):
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(moved)
    retention.prune(run, 1, None, checkpoint_path(run, 20))
    retention.discard_kept(run, 3)
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-20"]
    assert not [*(run / "replay").iterdir()]
    assert (moved / "training").is_dir()


@pytest.mark.parametrize("is_dangling", [False, True])
def test_a_checkpoint_takes_the_place_of_a_link(tmp_path: Path, is_dangling: bool) -> None:
    moved = tmp_path / "other_disk"
    if not is_dangling:
        moved.mkdir()
    (tmp_path / "step-1").symlink_to(moved)
    (tmp_path / "step-1.tmp").mkdir()
    checkpointer.give_name(tmp_path / "step-1.tmp", tmp_path / "step-1")
    assert not (tmp_path / "step-1").is_symlink()
    assert moved.is_dir() is not is_dangling
    assert {p.name for p in tmp_path.iterdir()} - {"other_disk"} == {"step-1"}


def test_prune_removes_torn_folders_but_not_the_one_being_written(
    tmp_path: Path, model: PreTrainedModel, tokenizer: Tokenizer, workers: Workers
) -> None:
    saver = Late(workers, print)
    path = checkpoint_path(tmp_path, 7)
    saver.save(path, trained(model), {}, "", tokenizer, with_model=False)
    for name in ("step-7.tmp", "step-5.tmp", "interrupted.tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-3.replaced").mkdir()
    retention.prune(tmp_path, 2, None)
    left = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert left == ["step-3", "step-7.tmp"]
    saver.go.set()
    assert saver.wait() is None
    shutil.rmtree(path)
    path.with_name("step-7.tmp").mkdir()
    retention.prune(tmp_path, 2, None)
    assert not path.with_name("step-7.tmp").exists(), "nobody writes it any more"


def test_checkpoints_of_another_course_are_set_aside(tmp_path: Path) -> None:
    empty(tmp_path, 1, 2, 10)
    aside = retention.set_aside(tmp_path, checkpoint_path(tmp_path, 1), 1)
    assert aside == ["step-2", "step-10"], "also without a state: what is damaged goes as well"
    assert steps_saved(tmp_path) == [1]
    assert (tmp_path / "checkpoints" / "step-10.old").is_dir()


def test_random_streams_go_on_where_they_were_saved(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.gauss(0, 1), float(np.random.normal()), torch.rand(1).item()]

    draw()  # half of a pair of normal numbers is now in each state
    torch.save(random_streams.rng_state(), tmp_path / "rng.pt")
    expected = [draw() for _ in range(3)]
    draw()
    random_streams.set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert [draw() for _ in range(3)] == expected


def test_random_streams_of_the_own_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process of eight saves one, and the only process of the next start has one device."""
    asked: list[Any] = []
    stream = torch.tensor([3])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *of: asked.append(of) or stream)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *what: asked.append(what))
    random_streams.set_rng_state(random_streams.rng_state())
    assert asked == [(), (stream,)], "on the other devices a process would take memory"
