"""Starts, serves and kills worker processes.

`scoring.pool` and `environments.sessions` build on `WorkerProcesses`. Workers import this module,
so it imports almost nothing.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import math
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Generic, TypeVar

from grpo_cli import IMPORT_ROOT

START_SECONDS = 120.0  # for a worker to import its functions, even on a busy machine or a slow disk
NOT_READY = f"its worker process was not ready after {START_SECONDS:g} s"
MAX_FAILED_STARTS = 3  # consecutive failures
RETRY_SECONDS = 0.5  # delay before another start
MESSAGE_SECONDS = 10  # time limit of one message between worker and run, once it has begun
KILL_ROUNDS = 20  # searches for a worker's children, which may start others meanwhile
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(eq=False)
class Worker:
    """A worker process. Used only in the thread of its `WorkerProcesses`."""

    process: subprocess.Popen[bytes]
    pipe: Connection
    deadline: float  # time at which it must be ready; subclasses use it afterwards
    ready: bool = False


AnyWorker = TypeVar("AnyWorker", bound=Worker)


class WorkerProcesses(Generic[AnyWorker]):
    """Worker processes, which one thread starts, serves and kills.

    Each worker has its own socket, since pools with one queue lock break when a worker dies while
    holding it. The kernel kills the workers when the thread ends. A subclass defines the methods
    that raise `NotImplementedError`; all except `__init__`, `end` and `wake` run in the thread.

    Args:
        name: name of the thread.
        size: maximum number of workers.
        memory_gb: address space per worker; exceeding it is a MemoryError. None: no limit.
    """

    module: str  # a worker runs `python -m module`, which begins with `connect`
    worker_type: type[AnyWorker]

    def __init__(self, name: str, size: int, memory_gb: float | None) -> None:
        self.size, self.memory_gb = size, memory_gb
        self.workers: list[AnyWorker] = []
        self.lock = threading.Lock()  # guards `inbox` and `ended`
        self.inbox: list[Any] = []  # calls that callers have handed over
        self.ended: str | None = None  # reason of the end
        self._failed_starts = 0  # consecutive failures
        self.start_error: str | None = None  # why no process could be started
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def hand_over(self, call: Any) -> None:
        """Queues a call for the workers; after their end it fails. Thread-safe."""
        with self.lock:
            if self.ended is None:
                self.inbox.append(call)
            else:
                self.fail(call, self.ended)
        self.wake()

    def wake(self) -> None:
        """Ends the thread's wait, so that it takes new calls. Thread-safe."""
        with contextlib.suppress(OSError):  # full: the thread wakes anyway; closed: it has ended
            self._ring.send(b".")

    def end(self, reason: str) -> None:
        """Ends all workers and their calls, and waits for that."""
        with self.lock:
            self.ended = self.ended or reason
        self.wake()
        self._thread.join(timeout=10)

    # Hooks of a subclass

    def take_calls(self) -> None:
        """Starts workers, and sends them the calls that callers have handed over."""
        raise NotImplementedError

    def received(self, worker: AnyWorker, message: Any) -> None:
        """Processes a worker's message."""
        raise NotImplementedError

    def unreadable(self, worker: AnyWorker, error: Exception) -> None:
        """Processes a message that cannot be unpickled."""
        raise NotImplementedError

    def next_check(self, worker: AnyWorker) -> float:
        """Returns the time of the next `check` of a worker that is ready."""
        raise NotImplementedError

    def check(self, worker: AnyWorker) -> None:
        """Dismisses a worker whose call is past its deadline."""
        raise NotImplementedError

    def lost(self, worker: AnyWorker, reason: str, *, late: bool) -> None:
        """Ends the calls of a worker that has been killed."""
        raise NotImplementedError

    def fail(self, call: Any, reason: str) -> None:
        """Ends a call that no worker has taken."""
        raise NotImplementedError

    def fail_waiting(self, reason: str) -> None:
        """Ends the calls that no worker has taken yet."""
        with self.lock:
            calls, self.inbox = self.inbox, []
        for call in calls:
            self.fail(call, reason)

    # The thread

    def _run(self) -> None:
        try:
            while self.ended is None:
                self.take_calls()
                if self.start_error is not None:
                    self._could_not_start(self.start_error)
                    self.start_error = None
                    time.sleep(RETRY_SECONDS)
                    continue
                self._wait()
                for worker in list(self.workers):
                    if worker.ready:
                        self.check(worker)
                    elif worker.deadline < time.monotonic():
                        self.dismiss(worker, NOT_READY)
        except BaseException as error:  # a bug
            name = threading.current_thread().name
            with self.lock:
                self.ended = f"the thread {name} broke: {type(error).__name__}: {error}"
            raise
        finally:
            self.leave()

    def leave(self) -> None:
        """Ends all workers and all calls; also after errors."""
        assert self.ended is not None, "set before"
        for worker in list(self.workers):
            self.dismiss(worker, self.ended)
        self.fail_waiting(self.ended)
        self._bell.close()

    def start_worker(self, settings: Any, pass_fds: Sequence[int] = ()) -> AnyWorker | None:
        """Starts a worker, whose output goes to this process's stderr.

        Args:
            settings: what `connect` returns in the worker.
            pass_fds: additional file descriptors, passed as arguments of the module.

        Returns:
            The worker; None if the system allows no more processes.
        """
        try:
            ours, theirs = socket.socketpair()
            with theirs, contextlib.ExitStack() as if_it_fails:
                if_it_fails.callback(ours.close)
                fds = [theirs.fileno(), *pass_fds]
                process = subprocess.Popen(
                    # -P: a random.py in the working folder must not shadow Python's own.
                    [sys.executable, "-P", "-m", self.module, *map(str, fds)],
                    stdin=subprocess.DEVNULL,
                    stdout=sys.__stderr__.fileno() if sys.__stderr__ else None,
                    pass_fds=fds,
                    start_new_session=True,  # Ctrl-C is for the run, and a kill is for all of it
                    env={**os.environ, **ONE_THREAD, "PYTHONPATH": str(IMPORT_ROOT)},
                )
                if_it_fails.pop_all()
        except OSError as error:  # no more processes, or no such interpreter
            if not self.workers:  # else the existing workers suffice
                self.start_error = str(error)
            return None
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # may stop within a message
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", MESSAGE_SECONDS, 0))
        pipe = Connection(ours.detach())
        with contextlib.suppress(OSError):  # it died at once; its end of file is read next
            pipe.send((os.getpid(), self.memory_gb, list(map(str, sys.path)), settings))
        worker = self.worker_type(process, pipe, time.monotonic() + START_SECONDS)
        self.workers.append(worker)
        return worker

    def _wait(self) -> None:
        """Waits until a worker sends a message or ends, a call arrives, or a check is due."""
        due = min(
            (self.next_check(w) if w.ready else w.deadline for w in self.workers), default=math.inf
        )
        patience = None if due == math.inf else max(0.0, due - time.monotonic()) + 0.001
        pipes: dict[Any, AnyWorker] = {w.pipe: w for w in self.workers}
        for one in wait([*pipes, self._bell], patience):
            if one is self._bell:
                with contextlib.suppress(BlockingIOError):
                    self._bell.recv(4096)
            else:
                self._receive(pipes[one])

    def _receive(self, worker: AnyWorker) -> None:
        try:
            message = worker.pipe.recv()
        except (EOFError, OSError):
            self.dismiss(worker)
            return
        except Exception as error:
            self.unreadable(worker, error)
            return
        if message == "ready":
            worker.ready, self._failed_starts = True, 0
        else:
            self.received(worker, message)

    def dismiss(self, worker: AnyWorker, reason: str | None = None, *, late: bool = False) -> None:
        """Kills a worker with all its descendants; its calls end.

        Args:
            reason: by default, the process's exit status.
            late: whether a call is past its deadline.
        """
        self.workers.remove(worker)
        worker.pipe.close()
        if reason is None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may still exit by itself
                worker.process.wait(0.5)
        kill_tree(worker.process.pid)
        status = worker.process.wait()
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        reason = reason or f"its worker process ended ({how})"
        self.lost(worker, reason, late=late)
        if not worker.ready and self.ended is None:
            self._could_not_start(reason)

    def _could_not_start(self, reason: str) -> None:
        """Fails the waiting calls after MAX_FAILED_STARTS, instead of retrying forever."""
        self._failed_starts += 1
        if self._failed_starts == MAX_FAILED_STARTS:
            self._failed_starts = 0
            self.fail_waiting(f"no worker process could be started: {reason}")


def connect() -> tuple[Connection, Any]:
    """Begins a worker process: binds it to its parent, and limits its memory.

    Returns:
        (the pipe to the parent, the settings given to `start_worker`).
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # SLURM may send it to all processes of a run
    os.set_inheritable(int(sys.argv[1]), False)  # child processes must not keep it open
    pipe = Connection(int(sys.argv[1]))
    parent, memory_gb, path, settings = pipe.recv()
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # its descendants remain its own
    if os.getppid() != parent:  # the parent ended before the lines above
        os._exit(1)
    if memory_gb is not None:
        limit, (_, hard) = int(memory_gb * 2**30), resource.getrlimit(resource.RLIMIT_AS)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path[:] = path
    return pipe, settings


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
