"""Starts, limits and kills worker processes.

`pool.Pool` and `environments.sessions` use it. Worker processes import this module, so it imports
almost nothing.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from grpo_cli import IMPORT_ROOT

START_SECONDS = 120.0  # for a worker to import its functions, even on a busy machine or a slow disk
MAX_FAILED_STARTS = 3  # consecutive failures
RETRY_SECONDS = 0.5  # delay before another start
KILL_ROUNDS = 20  # searches for a worker's children, which may start others meanwhile
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Watch:
    """A thread that starts and serves workers, which the kernel kills when the thread ends.

    Args:
        name: name of the thread.
        turn: called repeatedly: takes calls, waits for `bell` and replies, kills late workers.
        leave: called at the end, also after errors; must answer waiting callers.
        broken: prefix of the reason if `turn` raises, which is a bug.
    """

    def __init__(
        self, name: str, turn: Callable[[], None], leave: Callable[[], None], broken: str
    ) -> None:
        self.lock = threading.Lock()  # guards `ended`, and the data that callers hand over
        self.ended: str | None = None  # reason of the end
        self.bell, self._ring = socket.socketpair()
        self.bell.setblocking(False)
        self._ring.setblocking(False)
        self._turn, self._leave, self._broken = turn, leave, broken
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Rings the bell, which ends a turn's wait. Thread-safe."""
        with contextlib.suppress(OSError):  # full: the thread wakes anyway; closed: it has ended
            self._ring.send(b".")

    def quiet(self) -> None:
        """Clears the bell."""
        with contextlib.suppress(BlockingIOError):
            self.bell.recv(4096)

    def end(self, reason: str) -> None:
        """Makes the present turn the last one."""
        with self.lock:
            self.ended = self.ended or reason
        self.wake()

    def join(self, seconds: float) -> None:
        """Waits until the thread ends."""
        self._thread.join(timeout=seconds)

    def _run(self) -> None:
        try:
            while self.ended is None:
                self._turn()
        except BaseException as error:
            self.end(f"{self._broken}: {type(error).__name__}: {error}")
            raise
        finally:
            self._leave()
            self.bell.close()


def start(
    module: str, pass_fds: Sequence[int] = ()
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts `python -m module FD ...`, whose first argument is a socket to this process.

    Its output goes to this process's stderr. If it calls `die_with`, the kernel kills it when the
    thread that started it ends.

    Args:
        pass_fds: additional file descriptors, passed as further arguments.

    Returns:
        (the process, this process's end of the socket).

    Raises:
        OSError: no process or file descriptor is available.
    """
    ours, theirs = socket.socketpair()
    fds = [theirs.fileno(), *pass_fds]
    with theirs, contextlib.ExitStack() as if_it_fails:
        if_it_fails.callback(ours.close)
        process = subprocess.Popen(
            # -P: a random.py in the working folder must not shadow Python's own.
            [sys.executable, "-P", "-m", module, *map(str, fds)],
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__.fileno() if sys.__stderr__ else None,  # stdout belongs to the run
            pass_fds=fds,
            start_new_session=True,  # Ctrl-C is for the run, and a kill is for all of it
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": str(IMPORT_ROOT)},
        )
        if_it_fails.pop_all()
    return process, ours


def settle(parent: int, memory_gb: float | None) -> None:
    """Binds the calling worker process to its parent, and limits its memory.

    Args:
        memory_gb: limit of its address space; None: no limit.
    """
    die_with(parent)
    if memory_gb is not None:
        limit_memory(int(memory_gb * 2**30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_memory(limit: int) -> None:
    """Limits the address space of this process, in bytes."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when the process that started it ends."""
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # its descendants remain its own
    if os.getppid() != parent:  # the parent ended before the line above
        os._exit(1)


def kill_tree(pid: int) -> None:
    """Kills a process and all of its descendants, including those in other sessions."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGSTOP)  # it starts nothing more, and orphans remain its children
    for _ in range(KILL_ROUNDS):
        below = descendants(pid)
        for child in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        if not below:
            break
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Returns the living descendants of a process from /proc; [] without /proc."""
    children: dict[int, list[int]] = collections.defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children[int(parent)].append(int(entry.parent.name))
    below, new = [], [pid]
    while new:
        new = [child for parent in new for child in children[parent]]
        below += new
    return below


def overrun(seconds: float) -> str:
    """Returns the error message of a call that exceeded its deadline."""
    return f"took more than {seconds:g} s and was stopped"


def ending(status: int) -> str:
    """Describes how a process ended: `signal 9`, `exit code 0`."""
    return f"signal {-status}" if status < 0 else f"exit code {status}"
