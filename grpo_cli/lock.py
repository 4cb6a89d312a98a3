"""Whose a run's folder is: one run's at a time, and of which torchrun's."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from grpo_cli import heartbeat
from grpo_cli.errors import UserError

NAME = ".lock"
JOB = ".job"  # names the torchruns whose processes write to the folder


class Lock:
    """Held by the main process while the run lives; the system lets go of it, however it ends."""

    def __init__(self, folder: Path) -> None:
        """Takes the lock.

        Raises:
            UserError: another run holds it, or the folder cannot be made.
        """
        path = folder / NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.file: IO[str] | None = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"output_dir = {folder}: cannot be written to: {error.strerror}."
            ) from error
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = path.read_text(encoding="utf-8").strip() or "another process"
            self.release()
            raise UserError(
                f"output_dir = {folder}: another run writes to it ({holder}); wait for its end, or "
                "choose another output_dir."
            ) from error
        except OSError:  # a file system without locks
            self.release()
            return
        self.file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        self.file.write(f"process {os.getpid()} on {heartbeat.node()}, since {since}\n")
        self.file.flush()

    def release(self) -> None:
        """Lets others in."""
        if self.file is not None:
            self.file.close()
            self.file = None


def torchrun() -> str | None:
    """What tells the torchrun that started this process from all others; None if none did.

    It stays the same when torchrun starts its processes again. An id alone would not do: it is
    often "none", or one that a user gives to every job. But torchrun makes a folder of its own for
    the errors of its processes, .../ID_RANDOM/attempt_0/0/error.json.
    """
    given, errors = os.environ.get("TORCHELASTIC_RUN_ID"), os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not given:
        return None
    if errors:
        return f"{given} {Path(errors).parent.parent.parent}"
    return None if given == "none" else given


def note_torchruns(folder: Path, names: Iterable[str | None]) -> None:
    """Writes down whose run it is that the folder holds.

    Args:
        names: `torchrun()` of each process.
    """
    lines = sorted({name for name in names if name is not None})
    (folder / JOB).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def is_restart(folder: Path) -> bool:
    """Whether torchrun starts its processes again, and the folder holds what they have begun."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return False
    try:
        return torchrun() in (folder / JOB).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return False
