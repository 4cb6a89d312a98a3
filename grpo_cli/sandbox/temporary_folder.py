"""Makes and removes the temporary folders of sandboxes."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from grpo_cli.sandbox.folders import remove

PREFIX = "grpo-sandbox-"
TMP_VARIABLE = "GRPO_SANDBOX_TMP"  # folder in which sandboxes create their own folders
MARK = "GRPO_SANDBOX"  # variable in sandboxed processes: the sandbox's folder or its starter
KILL_SECONDS = 8.0  # for the processes that a sandbox has left


class TemporaryFolder:
    """A folder on disk, which the sandbox removes even if the process that started it is killed."""

    def __init__(self) -> None:
        self.path = os.path.join(_tmp_parent(), PREFIX + os.urandom(8).hex())
        os.mkdir(self.path, 0o711)

    def remove(self, uid: int | None) -> None:
        """Kills what the sandbox has left, by its mark and its own user if any, and removes it."""
        if os.path.lexists(self.path):
            _kill_marked(self.path, uid)  # a program can remove the mark, but not its own user
        with contextlib.suppress(OSError):
            remove(self.path)


def _tmp_parent() -> str:
    if parent := os.environ.get(TMP_VARIABLE):
        return os.path.abspath(parent)
    import tempfile

    return tempfile.gettempdir()


def _kill_marked(folder: str, uid: int | None) -> None:
    """Kills the processes that have a sandbox's mark in their environment, or its user."""
    mark = f"{MARK}={folder}".encode()
    end = time.monotonic() + KILL_SECONDS
    unseen = 0
    while unseen < 2 and time.monotonic() < end:
        pids = map(int, filter(str.isdigit, os.listdir("/proc")))
        found = [p for p in pids if _has(p, mark) or (uid is not None and _uid_of(p) == uid)]
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        # A process that forked and ended during the read left a child that was not yet listed.
        unseen = 0 if found else unseen + 1
        time.sleep(0.01)


def _uid_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("Uid:"))
    except (OSError, StopIteration):
        return -1


def _has(pid: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except OSError:
        return False
