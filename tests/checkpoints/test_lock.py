"""A folder is one run's at a time, for as long as its main process lives, or its torchrun."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.checkpoints import paths
from grpo_cli.checkpoints.lock import NAME, Lock, torchrun
from grpo_cli.distributed import heartbeat
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.training import build, prepare
from grpo_cli.training.resume import save
from grpo_cli.training.run import Run
from grpo_cli.training.step import Step, make_clock
from tests.training.test_train import built, recipe, trained

HOLDER = """
import subprocess, sys
from pathlib import Path
from grpo_cli.checkpoints.lock import Lock
lock = Lock(Path(sys.argv[1]))
child = subprocess.Popen(["sleep", "60"], close_fds=False)  # as a reward function may start one
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written to: Not a directory"):
        Lock(tmp_path / "file" / "run")


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock, and a child that outlives it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    child = 0
    try:
        child = int(process.stdout.readline())
        yield process
    finally:
        process.kill()
        if child:  # which has the other end of the pipe too
            os.kill(child, signal.SIGKILL)
        process.communicate()


def test_a_second_run_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "run"  # made on the way
    with holder(folder) as other:
        for _ in range(2):  # whoever is refused leaves the holder's name alone
            with pytest.raises(UserError) as refused:
                Lock(folder)
            said = str(refused.value)
            assert said.startswith(f"output_dir = {folder}: another run writes to it (process ")
            assert f"process {other.pid} on {heartbeat.node()}, since 2" in said
            assert said.endswith("wait for its end, or choose another output_dir.")
            assert "\n" not in said
        Lock(tmp_path / "outputs").release()  # another folder


def test_what_a_killed_run_held_is_free(tmp_path: Path) -> None:
    with holder(tmp_path) as other:
        with pytest.raises(UserError):
            Lock(tmp_path)
        other.kill()
        other.wait()
        own = Lock(tmp_path)  # though its child lives
        with pytest.raises(UserError, match=rf"\(process {os.getpid()} on "):
            Lock(tmp_path)
        own.release()
    assert (tmp_path / NAME).read_text().count("\n") == 1, "the name of whoever came before is gone"


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", without)
        locks = [Lock(tmp_path), Lock(tmp_path)]
    assert [lock.file for lock in locks] == [None, None]
    Lock(tmp_path).release()
    for lock in locks:
        lock.release()


def rename(folder: Path) -> None:
    folder.rename(folder.with_name("renamed"))


def replace(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize("change", [rename, shutil.rmtree, replace])
def test_a_moved_folder_is_noticed(tmp_path: Path, change: Callable[[Path], None]) -> None:
    lock = Lock(tmp_path / "run")
    lock.check_folder()
    change(tmp_path / "run")
    with pytest.raises(TrainingError, match=rf"^output_dir = {tmp_path}/run: was renamed or rem"):
        lock.check_folder()
    lock.release()


def test_a_run_ends_when_its_folder_is_gone(tmp_path: Path) -> None:
    live = built(tmp_path / "run")
    rename(live.folder)
    for write in (Step(live, 0, make_clock(live)).log, partial(save, live)):
        with pytest.raises(TrainingError, match="was renamed or removed"):
            write()
    live.close()
    assert not live.folder.exists()


def test_a_run_holds_its_folder_until_it_is_closed(tmp_path: Path) -> None:
    live = built(tmp_path)
    (live.folder / "metrics.jsonl").write_text('{"step": 1}\n')
    for changes in ({"overwrite": True}, {"resume": "auto"}):
        prepared = prepare.for_training(recipe(tmp_path, **changes))
        with pytest.raises(UserError, match=rf"process {os.getpid()} on "):
            build.build(prepared, ["grpo", "train"])
        prepared.scorer.executor.close()
    assert (live.folder / "metrics.jsonl").exists(), "overwrite has discarded nothing"
    live.close()
    built(tmp_path, overwrite=True).close()


def test_a_run_that_cannot_be_built_lets_go_of_its_folder(tmp_path: Path) -> None:
    prepared = prepare.for_training(recipe(tmp_path, resume="auto"))
    for n in (10, 2):  # since then, and empty
        paths.checkpoint_path(prepared.folder, n).mkdir(parents=True)
    with pytest.raises(UserError, match=r"none of .*step-2, .*step-10 is complete") as error:
        build.build(prepared, ["grpo", "train"])
    prepared.scorer.executor.close()
    Lock(prepared.folder).release()
    assert error.value.__traceback__ is not None, "which has held on to it so far"


def test_a_folder_that_another_run_has_filled_is_not_taken(tmp_path: Path) -> None:
    prepared = prepare.for_training(recipe(tmp_path))
    paths.checkpoint_path(prepared.folder, 2).mkdir(parents=True)
    with pytest.raises(UserError, match="holds a run already up to step 2"):
        build.build(prepared, ["grpo", "train"])
    prepared.scorer.executor.close()


def test_the_lock_is_no_part_of_a_run(tmp_path: Path) -> None:
    """A folder with nothing but a lock holds none, and overwrite=true leaves the lock there."""
    lock = Lock(tmp_path)
    assert not paths.holds_run(tmp_path)
    paths.discard_run(tmp_path)
    with pytest.raises(UserError):
        Lock(tmp_path)
    lock.release()


@pytest.mark.parametrize("name", ["tensorboard", "checkpoints"])
def test_nothing_is_deleted_behind_a_link(tmp_path: Path, name: str) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "run"
    (precious / "step-1").mkdir(parents=True)
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("{}")
    (folder / name).symlink_to(precious)
    with pytest.raises(UserError, match=rf"{folder}/{name} is a link to {precious}; overwrite=tr"):
        paths.discard_run(folder)
    assert (folder / "metrics.jsonl").exists(), "nothing else is gone, either"
    (folder / name).unlink()
    (folder / name).mkdir()
    (folder / name / "step-1").symlink_to(precious)
    paths.discard_run(folder)
    assert not (folder / name / "step-1").is_symlink()
    assert (precious / "step-1").exists()


@pytest.mark.runs
def test_a_replacement_under_way_is_left_to_the_run_that_makes_it(tmp_path: Path) -> None:
    live = trained(tmp_path, steps=2)
    path = paths.checkpoint_path(live.folder, 2)
    aside = path.with_name(path.name + paths.REPLACED)
    path.rename(aside)  # between two renames
    own = Lock(live.folder)
    prepared = prepare.for_training(recipe(tmp_path, resume="auto"))
    with pytest.raises(UserError, match="another run writes to it"):
        build.build(prepared, ["grpo", "train"])
    assert aside.exists()
    own.release()  # it was killed there
    resumed = build.build(prepared, ["grpo", "train"])
    resumed.close()
    assert resumed.state.step == 2
    assert path.exists()
    assert not aside.exists()


class Torchrun:
    def __init__(self, patch: pytest.MonkeyPatch, name: str, job: str = "none") -> None:
        self.patch, self.name, self.job = patch, name, job

    def starts(self, attempt: int) -> None:
        errors = f"/tmp/torchelastic_{self.name}/{self.job}_x/attempt_{attempt}/0/error.json"
        self.patch.setenv("TORCHELASTIC_RUN_ID", self.job)
        self.patch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        self.patch.setenv("TORCHELASTIC_ERROR_FILE", errors)


@pytest.mark.parametrize("job", ["none", "100"])
def test_what_tells_one_torchrun_from_another(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert torchrun() is None
    names = set()
    for name in ("a", "b"):
        for attempt in (0, 1, 2):
            Torchrun(monkeypatch, name, job).starts(attempt)
            names.add(torchrun())
    assert len(names) == 2, "each is the same whenever it starts its processes"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")  # as with --log-dir=/dev/null
    assert torchrun() == (None if job == "none" else job)


def begun(folder: Path, **changes: Any) -> Run:
    """A run of a process that dies before its first step."""
    run = built(folder, **changes)
    run.close()
    return run


@pytest.mark.runs
def test_a_restart_does_not_go_on_with_the_run_that_was_to_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Torchrun(monkeypatch, "before").starts(0)
    before = trained(tmp_path, steps=2)
    kept = (before.folder / "recipe.yaml").read_text()
    for attempt in (0, 1):
        Torchrun(monkeypatch, "now").starts(attempt)
        with pytest.raises(UserError, match="holds a run already up to step 2"):
            built(tmp_path, seed=7)
    assert (before.folder / "recipe.yaml").read_text() == kept


@pytest.mark.runs
def test_a_restart_discards_the_old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path, steps=2)
    own = Torchrun(monkeypatch, "own")
    own.starts(0)

    def dies(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(paths, "discard_run", dies)
        with pytest.raises(RuntimeError):
            built(tmp_path, overwrite=True)
    own.starts(1)
    assert begun(tmp_path, overwrite=True).state.step == 0
    own.starts(2)
    assert trained(tmp_path, overwrite=True, steps=2).state.step == 2
    own.starts(3)
    assert begun(tmp_path, overwrite=True).state.step == 2, "what it has done itself stays"


@pytest.mark.runs
@pytest.mark.parametrize("inside", [True, False])
def test_a_restart_does_not_go_back_to_where_the_first_start_began(
    inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = trained(tmp_path, steps=2 if inside else 1, checkpoint__every=1)
    changes: dict[str, Any] = {
        "resume": str(paths.checkpoint_path(before.folder, 1) if inside else before.folder),
        "checkpoint__every": 1,
        "output_dir": str(before.folder if inside else tmp_path / "other"),
    }
    own = Torchrun(monkeypatch, "own")
    own.starts(0)
    assert begun(tmp_path, **changes).state.step == 1
    Path(changes["output_dir"], "metrics.jsonl").write_text('{"step": 2}\n')
    own.starts(1)  # it had no checkpoint of its own yet
    assert begun(tmp_path, **changes).state.step == 1
    trained(tmp_path, steps=4, **changes)
    own.starts(2)
    assert begun(tmp_path, **changes).state.step == 4
    Torchrun(monkeypatch, "later").starts(1)  # of the last two checkpoints step-1 is none
    match = "no checkpoint with a training state" if inside else "holds another run than resume"
    with pytest.raises(UserError, match=match):
        built(tmp_path, **changes)
