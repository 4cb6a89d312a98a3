"""Locks a run's folder for one run at a time, and records the torchruns that write to it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from grpo_cli.checkpoints import paths
from grpo_cli.distributed import heartbeat
from grpo_cli.errors import TrainingError, UserError

NAME = ".lock"
JOB = ".job"  # lists the torchruns whose processes write to the folder


class Lock:
    """The main process's lock of a run's folder, which the system frees when the process ends."""

    def __init__(self, folder: Path) -> None:
        """Takes the lock.

        Raises:
            UserError: another run holds it, or the folder cannot be created.
        """
        path = folder / NAME
        for file in (folder / name for name in (NAME, *paths.RUN_FILES)):
            if os.path.lexists(file) and not file.is_file():  # a folder, a pipe, a broken link
                raise UserError(
                    f"output_dir = {paths.shown(folder)}: its {file.name} is not a plain file; "
                    "remove it, or choose another output_dir."
                )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.file: IO[str] | None = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"output_dir = {paths.shown(folder)}: cannot be written to: {error.strerror}."
            ) from error
        self.folder = folder
        # Keep the folder open, so that no other folder gets its inode.
        self._open: int | None = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = path.read_text(encoding="utf-8").strip() or "another process"
            self.release()
            raise UserError(
                f"output_dir = {paths.shown(folder)}: another run writes to it ({holder}); "
                "wait for its end, or choose another output_dir."
            ) from error
        except OSError:  # the file system has no locks
            self.file.close()
            self.file = None
            return
        self.file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        self.file.write(f"process {os.getpid()} on {heartbeat.node()}, since {since}\n")
        self.file.flush()

    def check_folder(self) -> None:
        """Checks that the folder is still the one that was locked.

        Raises:
            TrainingError: it was renamed, removed or recreated.
        """
        assert self._open is not None, "not released"
        try:
            is_there = os.path.samestat(os.fstat(self._open), self.folder.stat())
        except OSError:  # no such folder, or its file system is gone
            is_there = False
        if not is_there:
            raise TrainingError(
                f"output_dir = {paths.shown(self.folder)}: was renamed or removed while the run "
                "wrote to it. The run ends; if the folder was renamed, "
                "output_dir=ITS_NEW_NAME resume=auto continues it.",
                alone=True,
            )

    def release(self) -> None:
        """Releases the folder for other runs."""
        if self.file is not None:
            self.file.close()
            self.file = None
        if self._open is not None:
            os.close(self._open)
            self._open = None


def torchrun() -> str | None:
    """Returns a unique name of the torchrun that started this process; None without one.

    The name does not change when torchrun restarts its processes. The run id is not enough: it is
    often "none", or the same for all jobs of a user. But each torchrun creates its own folder for
    its processes' errors, .../ID_RANDOM/attempt_0/0/error.json.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    errors = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not run_id:
        return None
    if errors:
        return f"{run_id} {Path(errors).parent.parent.parent}"
    return None if run_id == "none" else run_id


def note_torchruns(folder: Path, names: Iterable[str | None]) -> None:
    """Records the torchruns of the run in the folder.

    Args:
        names: `torchrun()` of each process.
    """
    lines = sorted({name for name in names if name is not None})
    (folder / JOB).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def is_restart(folder: Path) -> bool:
    """Returns whether torchrun restarted its processes and the folder holds their earlier run."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return False
    try:
        return torchrun() in (folder / JOB).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return False
