"""Makes, locks and removes the temporary folders of sandboxes, also of killed ones."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time

from grpo_cli.sandbox.folders import remove

PREFIX = "grpo-sandbox-"
TMP_VARIABLE = "GRPO_SANDBOX_TMP"  # folder in which sandboxes create their own folders
MARK = "GRPO_SANDBOX"  # variable in sandboxed processes: the sandbox's folder or its starter
KILL_SECONDS = 8.0  # for the processes that a sandbox has left


class TemporaryFolder:
    """A folder on disk, locked while its sandbox or the process that started it lives."""

    def __init__(self) -> None:
        while True:
            self.path = os.path.join(_tmp_parent(), PREFIX + os.urandom(8).hex())
            os.mkdir(self.path, 0o711)
            with contextlib.suppress(FileNotFoundError):  # a sweep just removed it
                if (lock := _locked(self.path)) is not None:
                    self.lock = lock
                    return

    def remove(self, uid: int | None) -> None:
        """Kills what the sandbox has left, by its mark and its own user if any, and removes it."""
        if os.path.lexists(self.path):
            _kill_marked(self.path, uid)  # a program can remove the mark, but not its own user
        with contextlib.suppress(OSError):  # a later sweep removes the rest
            remove(self.path)
        os.close(self.lock)


def _locked(path: str, owner: int | None = None) -> int | None:
    """Opens and locks a folder; None if its sandbox holds the lock, or it has another owner."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    with contextlib.suppress(BlockingIOError):
        if owner in (None, os.fstat(fd).st_uid):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
    os.close(fd)
    return None


def _tmp_parent() -> str:
    if parent := os.environ.get(TMP_VARIABLE):
        return os.path.abspath(parent)
    import tempfile

    return tempfile.gettempdir()


def sweep(parent: str | None = None) -> int:
    """Removes the folders of sandboxes that died with the process that started them.

    A sandbox removes its folder even if that process is killed. Folders and processes remain only
    if the sandbox itself was killed.

    Args:
        parent: the folder that holds them; by default the one that this process uses.

    Returns:
        The number of folders removed.
    """
    parent, count = parent or _tmp_parent(), 0
    names = os.listdir(parent) if os.path.isdir(parent) else []
    for path in (os.path.join(parent, name) for name in names if name.startswith(PREFIX)):
        try:
            lock = _locked(path, os.geteuid())
        except OSError:
            continue
        if lock is not None:
            with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as at_end:
                at_end.callback(os.close, lock)
                _kill_marked(path)
                remove(path)
                count += 1
    return count


def _kill_marked(folder: str, uid: int | None = None) -> None:
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
