"""Decides which checkpoints and kept steps of a run are kept, and deletes the others."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from grpo_cli.checkpoints import manifest, shards
from grpo_cli.checkpoints.paths import (
    KEPT,
    PARTIAL,
    STATE,
    checkpoint_path,
    has_training_state,
    is_interrupted,
    is_model,
    recover,
    remove,
    resumable,
    step_of,
    steps_saved,
)
from grpo_cli.errors import listed

being_written: set[Path] = set()  # this process's checkpoints under their names with PARTIAL


def outdated(
    folder: Path,
    keep_last: int,
    best: int | None,
    newest: Path | None = None,
    in_use: Collection[Path] = (),
) -> list[Path]:
    """Returns a run's checkpoints except the newest `keep_last` and the best, oldest first.

    Args:
        newest: counts among the newest, even if it is not yet written.
        in_use: checkpoints that are kept for now, because they are being read.
    """
    steps = set(steps_saved(folder))
    if newest is not None and not is_interrupted(newest):
        steps.add(step_of(newest))
    found = [checkpoint_path(folder, s) for s in sorted(steps)[:-keep_last] if s != best]
    return [path for path in found if path != newest and path not in in_use]


def prune(
    folder: Path,
    keep_last: int,
    best: int | None,
    newest: Path | None = None,
    in_use: Collection[Path] = (),
) -> None:
    """Removes the `outdated` checkpoints of a run, and all but the model of a best one among them.

    Args:
        newest: the checkpoint just written. One of an interrupted step is removed once there is
            another.
    """
    recover(folder)
    remove_torn(folder / "checkpoints")
    for path in outdated(folder, keep_last, best, newest, in_use):
        remove(path)
    for path in outdated(folder, keep_last, None, newest, in_use):  # the best one
        if is_model(path) and has_training_state(path):
            with contextlib.suppress(OSError, manifest.Damaged):  # then it keeps what it has
                keep_model_only(path)
    for path in resumable(folder):
        if is_interrupted(path) and newest not in (None, path):
            remove(path)


def make_room(path: Path, needed: int, outdated: list[Path], say: Callable[[str], None]) -> None:
    """Removes outdated checkpoints, oldest first, if that makes `path` fit on the disk.

    Keeps the newest complete one, since the current save may fail.

    Args:
        needed: bytes that `path` needs.
    """
    free, gone = manifest.free_bytes(path.parent), []
    others = (p for p in resumable(path.parent.parent) if p != path)
    stays = next((p for p in others if manifest.listed(p)[1] is None), None)
    for old in outdated if stays is not None else ():
        if free < needed and old != stays:
            own = [] if old.is_symlink() else old.rglob("*")  # nothing behind a link is removed
            free += sum(file.stat().st_blocks * 512 for file in own)
            gone.append(old)
    if not gone or free < needed:
        return
    for old in gone:
        remove(old)
    assert stays is not None, "nothing is removed without it"
    say(
        f"checkpoint {path.name} fits on the disk only without {listed(p.name for p in gone)}: "
        f"removed before it is written; {stays.name} stays"
    )


def remove_torn(checkpoints: Path) -> None:
    """Removes the incomplete checkpoints of interrupted saves."""
    for torn in checkpoints.glob(f"*{PARTIAL}"):
        if torn not in being_written:
            shutil.rmtree(torn, ignore_errors=True)


def keep_model_only(path: Path) -> None:
    """Deletes what resuming needs from a checkpoint with a model folder."""
    files, gone = manifest.read(path), (STATE, f"{shards.SHARDS}/")
    manifest.write(path, {n: entry for n, entry in files.items() if not n.startswith(gone)})
    (path / STATE).unlink(missing_ok=True)
    shutil.rmtree(path / shards.SHARDS, ignore_errors=True)


def discard_kept(folder: Path, after: int) -> None:
    """Removes kept steps and completions of steps that the run repeats, and incomplete ones.

    Args:
        after: last step to keep, counted from 1.
    """
    remove_torn(folder / KEPT)
    for path in (*folder.glob(f"{KEPT}/step-*"), *folder.glob("completions/step-*.parquet")):
        if step_of(path) > after:
            remove(path)


def set_aside(folder: Path, path: Path, after: int) -> list[str]:
    """Renames the checkpoints of a run after `path`, so that resume=auto ignores them.

    Args:
        path: the checkpoint from which the run resumes.
        after: number of steps of that checkpoint.

    Returns:
        The names of the renamed checkpoints.
    """
    resumed = (after, is_interrupted(path))
    # Including damaged ones, which must not count as the newest during pruning.
    paths = [checkpoint_path(folder, step) for step in steps_saved(folder)]
    paths += [p for p in resumable(folder) if is_interrupted(p)]
    later = [p for p in paths if (step_of(p), is_interrupted(p)) > resumed]
    for beyond in later:
        old = beyond.with_name(beyond.name + ".old")
        with contextlib.suppress(OSError):
            remove(old)
        beyond.rename(old)
    return [p.name for p in later]
