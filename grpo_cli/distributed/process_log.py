"""Writes what a process of a job has to say: its log, its stacks, and lines on the terminal."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import IO

from grpo_cli.distributed import heartbeat


class ProcessLog:
    """The log of one process, and the terminal of the job (`screen`)."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        folder.mkdir(parents=True, exist_ok=True)
        self.screen: IO[str] = sys.stderr
        self._stacks = open(self.path("stacks.txt"), "a", encoding="utf-8")  # noqa: SIM115
        # Dumps the stacks on a segmentation fault, and on SIGABRT even while the GIL is held.
        faulthandler.enable(self._stacks, all_threads=True)

    def path(self, kind: str = "log") -> Path:
        """Returns the path of this process's log, or of its file of another kind."""
        return self.folder / f"rank-{self.rank}.{kind}"

    def redirect(self) -> None:
        """Redirects output to the log, except on rank 0; `screen` remains the terminal."""
        if self.rank == 0:
            return
        flush_output()
        terminal = os.dup(2)
        self.screen = open(terminal, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
        log = os.open(self.path(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for fd in (1, 2):
            os.dup2(log, fd)
        os.close(log)
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(line_buffering=True)
        now = datetime.now().isoformat(sep=" ", timespec="seconds")
        print(f"--- {now} process {self.rank} on {heartbeat.node()}, pid {os.getpid()}")

    def write(self, text: str) -> None:
        """Writes a traceback to the log."""
        now = datetime.now().isoformat(sep=" ", timespec="seconds")
        with (
            contextlib.suppress(OSError),  # a full disk may be the error's cause
            open(self.path(), "a", encoding="utf-8", errors="backslashreplace") as log,
        ):
            log.write(f"--- {now} {heartbeat.where()}\n{text}")

    def print(self, text: str) -> None:
        """Prints a line on the terminal; waits at most 2 seconds."""
        # A single write, since other processes write to the same terminal.
        within(2.0, lambda: print(text + "\n", end="", file=self.screen, flush=True))

    def dump_stacks(self, title: str) -> None:
        """Writes the stacks of all threads of this process."""
        with contextlib.suppress(OSError):  # a full disk may be the cause of the failure
            self._stacks.write(f"--- {title}\n")
            self._stacks.flush()
            faulthandler.dump_traceback(self._stacks, all_threads=True)

    def close(self) -> None:
        """Closes the file of stacks."""
        faulthandler.disable()
        self._stacks.close()
        self.discard_empty()

    def discard_empty(self) -> None:
        """Deletes the file of stacks if there are none."""
        path = self.path("stacks.txt")
        with contextlib.suppress(OSError):
            if path.stat().st_size == 0:
                path.unlink()


def write_error_file(text: str, when: float) -> None:
    """Writes the file from which torchrun, if it started this process, reports its error."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    extra = {"py_callstack": text, "timestamp": str(int(when))}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": text, "extraInfo": extra}}, file)


def flush_output() -> None:
    """Flushes stdout and stderr, unless they are closed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def within(seconds: float, action: Callable[[], object]) -> None:
    """Runs an action that may hang, such as a write to an unread stream, for at most `seconds`."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(seconds)
