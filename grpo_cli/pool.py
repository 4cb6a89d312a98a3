"""Worker processes for reward functions that may never return: a hard deadline for each call.

A call that overruns takes its worker down with it (and everything that the worker has started); the
worker is replaced, and no other call waits for it. Python's own pools cannot kill a worker, and
those that share one queue lock among workers break when one dies while holding it: here each worker
has a socket of its own, and one thread looks after them all.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

START_SECONDS = 120.0  # for a worker to import what it is to run, on a busy machine or a slow disk


@dataclass(frozen=True)
class Call:
    """One call of a reward function, in words that travel to another process."""

    path: str  # module:function
    arguments: Mapping[str, Any]
    seconds: float  # deadline, from when a worker takes it up


@dataclass(frozen=True)
class Done:
    """What came of a call. Never raised: `error` says what went wrong."""

    values: Any = None  # what the function returned
    metrics: Sequence[tuple[str, float]] = ()  # calls of log_metric
    extras: Sequence[tuple[str, list[Any]]] = ()  # calls of log_extra
    seconds: float = 0.0
    error: str | None = None
    timed_out: bool = False


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    pipe: Connection
    started: float
    ready: bool = False
    job: tuple[Call, Future[Done]] | None = None
    deadline: float = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether it is starting or at a call, and so has a deadline."""
        return self.job is not None or not self.ready


@dataclass
class Pool:
    """`size` workers that call functions by dotted path, one call at a time each.

    Args:
        size: worker processes. memory_gb: address space of each, None for no limit; what needs more
            gets a MemoryError instead of the machine's last byte. preload: modules to import before
            the first call, so that no call's deadline pays for them.
    """

    size: int
    memory_gb: float | None = 4.0
    preload: Sequence[str] = ()
    _queue: collections.deque[tuple[Call, Future[Done]]] = field(default_factory=collections.deque)
    _workers: list[_Worker] = field(default_factory=list)
    _closing: bool = False
    _failed_starts: int = 0

    def __post_init__(self) -> None:
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._look_after, name="reward-pool", daemon=True)
        self._thread.start()

    def submit(self, call: Call) -> Future[Done]:
        """Queues a call. Its future always ends, with a `Done`."""
        future: Future[Done] = Future()
        with self._lock:
            assert not self._closing, "the pool is closed"
            self._queue.append((call, future))
        self._wake()
        return future

    def close(self) -> None:
        """Kills the workers; calls under way end with an error."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._wake()
        self._thread.join(timeout=10)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full bell has rung
            self._ring.send(b".")

    def _look_after(self) -> None:
        """The pool's thread. It starts the workers: they are killed by the kernel when it ends."""
        try:
            while not self._closing:
                self._hire()
                self._hand_out()
                deadlines = [w.deadline for w in self._workers if w.is_busy]
                patience = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
                pipes = {w.pipe: w for w in self._workers}
                for one in wait([*pipes, self._bell], patience):
                    if one is self._bell:
                        with contextlib.suppress(BlockingIOError):
                            self._bell.recv(4096)
                    else:
                        self._hear(pipes[one])  # type: ignore[index]
                for worker in list(self._workers):
                    if worker.is_busy and worker.deadline < time.monotonic():
                        self._overrun(worker)
        finally:
            for worker in list(self._workers):
                self._dismiss(worker, "the pool was closed")
            for _, future in self._queue:
                future.set_result(Done(error="the pool was closed"))

    def _hire(self) -> None:
        """As many workers as there is work for, up to `size`."""
        wanted = min(self.size, len(self._queue) + sum(w.job is not None for w in self._workers))
        while len(self._workers) < wanted:
            ours, theirs = socket.socketpair()
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", "grpo_cli.pool_worker", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is for the run, and a kill is for all of it
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
            pipe = Connection(ours.detach())
            now = time.monotonic()
            with contextlib.suppress(OSError):  # it died at once: its end of file is read next
                pipe.send((os.getpid(), self.memory_gb, list(self.preload)))
            self._workers.append(_Worker(process, pipe, now, deadline=now + START_SECONDS))

    def _hand_out(self) -> None:
        for worker in self._workers:
            if not worker.ready or worker.job is not None:
                continue
            with self._lock:
                if not self._queue:
                    return
                worker.job = self._queue.popleft()
            call = worker.job[0]
            worker.deadline = time.monotonic() + call.seconds
            try:
                worker.pipe.send((call.path, dict(call.arguments)))
            except OSError:  # it died in between: its end of file is read next
                pass
            except Exception as error:  # an argument that cannot be pickled
                self._answer(worker, Done(error=f"{type(error).__name__}: {error}"))

    def _hear(self, worker: _Worker) -> None:
        try:
            message = worker.pipe.recv()
        except (EOFError, OSError):
            self._dismiss(worker, None)
            return
        except Exception as error:  # what it sent cannot be unpickled here
            message = Done(error=f"{type(error).__name__}: {error}")
        if message == "ready":
            worker.ready, self._failed_starts = True, 0
        elif isinstance(message, Done):
            self._answer(worker, message)

    def _answer(self, worker: _Worker, done: Done) -> None:
        if worker.job is not None:
            worker.job[1].set_result(done)
            worker.job = None

    def _overrun(self, worker: _Worker) -> None:
        if worker.job is not None:
            seconds = worker.job[0].seconds
            self._answer(worker, Done(timed_out=True, seconds=seconds, error=overrun(seconds)))
        self._dismiss(worker, None)

    def _dismiss(self, worker: _Worker, reason: str | None) -> None:
        """Ends a worker and all that it has started; a call that it was at ends with an error."""
        self._workers.remove(worker)
        worker.pipe.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        status = worker.process.wait()
        died = f"its worker process ended ({_ending(status)})"
        self._answer(worker, Done(error=reason or died))
        if not worker.ready and reason is None:
            self._could_not_start(died)

    def _could_not_start(self, died: str) -> None:
        """A worker that cannot even start will not do so next time: say so instead of for ever."""
        self._failed_starts += 1
        if self._failed_starts < 3:
            return
        with self._lock:
            jobs, self._queue = list(self._queue), collections.deque()
        for _, future in jobs:
            future.set_result(Done(error=f"no worker process could be started: {died}"))


def overrun(seconds: float) -> str:
    """What is said of a call that was stopped at its deadline."""
    return f"took more than {seconds:g} s and was stopped"


def _ending(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit code {status}"
