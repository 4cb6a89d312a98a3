"""Runs reward functions that may never return in workers, with a hard deadline per call.

A call past its deadline is ended by killing its worker with all descendants. The worker is
replaced, and no other call waits. Python's own pools cannot kill a worker, and pools with one queue
lock break when a worker dies while holding it. Here each worker has its own socket, and one thread
serves them all.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from grpo_cli.scoring import processes
from grpo_cli.scoring.processes import (
    MAX_FAILED_STARTS,
    RETRY_SECONDS,
    START_SECONDS,
    Watch,
    ending,
    kill_tree,
    overrun,
)

MESSAGE_SECONDS = 10  # time limit of one message between worker and pool, once it has begun


@dataclass(frozen=True)
class Call:
    """One call of a reward function, picklable."""

    path: str  # module:function
    arguments: Mapping[str, Any]
    seconds: float  # deadline, counted from when a worker takes the call


@dataclass(frozen=True)
class CallResult:
    """The result of a call. Failures are not raised: `error` describes them."""

    values: Any = None  # return value of the function
    metrics: Sequence[tuple[str, float]] = ()  # calls of log_metric
    extras: Sequence[tuple[str, list[Any]]] = ()  # calls of log_extra
    seconds: float = 0.0
    error: str | None = None
    timed_out: bool = False


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    pipe: Connection
    deadline: float  # for being ready, then for the present call
    ready: bool = False
    job: tuple[int, Call, Future[CallResult]] | None = None  # (number of the call, call, future)
    log_history: list[dict[str, Any]] = field(default_factory=list)  # log lines that it has

    @property
    def is_busy(self) -> bool:
        """Whether the worker is starting or has a call, and so has a deadline."""
        return self.job is not None or not self.ready


@dataclass
class Pool:
    """`size` workers that call functions by dotted path, each one call at a time.

    Args:
        size: number of worker processes.
        memory_gb: address space per worker; exceeding it is a MemoryError. None: no limit.
        preload: modules to import before the first call, outside its deadline.
    """

    size: int
    memory_gb: float | None = 4.0
    preload: Sequence[str] = ()
    _queue: collections.deque[tuple[Call, Future[CallResult]]] = field(
        default_factory=collections.deque
    )
    _workers: list[_Worker] = field(default_factory=list)
    _failed_starts: int = 0  # consecutive failures

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self._watch = Watch("reward-pool", self._turn, self._leave, "the pool of workers broke")
        self._watch.start()

    def submit(self, call: Call) -> Future[CallResult]:
        """Queues a call. Its future always completes with a `CallResult`."""
        future: Future[CallResult] = Future()
        with self._watch.lock:
            if self._watch.ended is None:
                self._queue.append((call, future))
            else:
                future.set_result(CallResult(error=self._watch.ended))
        self._watch.wake()
        return future

    def close(self) -> None:
        """Kills the workers; pending calls end with an error."""
        self._watch.end("the pool was closed")
        self._watch.join(10)

    def _turn(self) -> None:
        self._start_workers()
        self._send_calls()
        self._wait()
        for worker in list(self._workers):
            if worker.is_busy and worker.deadline < time.monotonic():
                self._overrun(worker)

    def _leave(self) -> None:
        for worker in list(self._workers):
            self._dismiss(worker, self._watch.ended)
        with self._watch.lock:
            left, self._queue = self._queue, collections.deque()
        for _, future in left:
            future.set_result(CallResult(error=self._watch.ended))

    def _start_workers(self) -> None:
        """Starts one worker per call, up to `size`."""
        while len(self._workers) < self._wanted():
            try:
                self._workers.append(self._start_worker())
            except OSError as error:  # no more processes, or no such interpreter
                if self._workers:
                    return  # the existing workers suffice
                self._could_not_start(str(error))
                time.sleep(RETRY_SECONDS)

    def _wanted(self) -> int:
        return min(self.size, len(self._queue) + sum(w.job is not None for w in self._workers))

    def _start_worker(self) -> _Worker:
        process, ours = processes.start("grpo_cli.scoring.pool_worker")
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # may stop within a message
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", MESSAGE_SECONDS, 0))
        pipe = Connection(ours.detach())
        settings = (os.getpid(), self.memory_gb, list(map(str, sys.path)), list(self.preload))
        with contextlib.suppress(OSError):  # it died at once; its end of file is read next
            pipe.send(settings)
        return _Worker(process, pipe, time.monotonic() + START_SECONDS)

    def _send_calls(self) -> None:
        for worker in self._workers:
            if not worker.ready or worker.job is not None:
                continue
            with self._watch.lock:
                if not self._queue:
                    return
                call, future = self._queue.popleft()
            number = next(self._numbers)
            worker.job = number, call, future
            worker.deadline = time.monotonic() + call.seconds
            arguments, log_history = without_log(call.arguments, worker.log_history)
            known = common_length(log_history, worker.log_history)
            try:
                worker.pipe.send((number, call.path, arguments, (known, log_history[known:])))
                worker.log_history = log_history
            except OSError:  # it died in between, and its end of file is read next; or its deadline
                pass
            except Exception as error:  # an argument cannot be pickled
                self._answer(worker, CallResult(error=f"{type(error).__name__}: {error}"))

    def _wait(self) -> None:
        """Waits until a worker sends a message or ends, a call arrives, or a deadline passes."""
        deadlines = [w.deadline for w in self._workers if w.is_busy]
        patience = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        pipes: dict[Any, _Worker] = {w.pipe: w for w in self._workers}
        for one in wait([*pipes, self._watch.bell], patience):
            if one is self._watch.bell:
                self._watch.quiet()
            else:
                self._receive(pipes[one])

    def _receive(self, worker: _Worker) -> None:
        try:
            message = worker.pipe.recv()
        except (EOFError, OSError):
            self._dismiss(worker)
            return
        except Exception as error:  # the result cannot be unpickled here
            self._answer(worker, CallResult(error=f"{type(error).__name__}: {error}"))
            return
        if message == "ready":
            worker.ready, self._failed_starts = True, 0
            return
        number, done = message
        if worker.job is not None and worker.job[0] == number:
            self._answer(worker, done)

    def _answer(self, worker: _Worker, done: CallResult) -> None:
        if worker.job is not None:
            worker.job[2].set_result(done)
            worker.job = None

    def _overrun(self, worker: _Worker) -> None:
        if worker.job is not None:
            seconds = worker.job[1].seconds
            self._answer(
                worker, CallResult(timed_out=True, seconds=seconds, error=overrun(seconds))
            )
            self._dismiss(worker)
        else:
            self._dismiss(worker, f"its worker process was not ready after {START_SECONDS:g} s")

    def _dismiss(self, worker: _Worker, reason: str | None = None) -> None:
        """Kills a worker and its process group; its call ends with an error.

        Args:
            reason: the error; by default, the process's exit status.
        """
        self._workers.remove(worker)
        worker.pipe.close()
        if reason is None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may still exit by itself
                worker.process.wait(0 if worker.ready and worker.job is None else 0.5)
        kill_tree(worker.process.pid)
        status = worker.process.wait()
        reason = reason or f"its worker process ended ({ending(status)})"
        self._answer(worker, CallResult(error=reason))
        if not worker.ready and self._watch.ended is None:
            self._could_not_start(reason)

    def _could_not_start(self, reason: str) -> None:
        """Fails the queued calls after MAX_FAILED_STARTS, instead of retrying forever."""
        self._failed_starts += 1
        if self._failed_starts < MAX_FAILED_STARTS:
            return
        self._failed_starts = 0
        with self._watch.lock:
            jobs, self._queue = list(self._queue), collections.deque()
        for _, future in jobs:
            future.set_result(CallResult(error=f"no worker process could be started: {reason}"))


def without_log(
    arguments: Mapping[str, Any], known: list[dict[str, Any]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Splits the run's log off a call's arguments; returns (arguments, log).

    The log grows with the run, so a worker keeps it and receives only the missing lines.

    Args:
        known: the lines that the worker has; returned if the call reads no log.
    """
    if (state := arguments.get("trainer_state")) is None:
        return dict(arguments), known
    return {**arguments, "trainer_state": replace(state, log_history=[])}, state.log_history


def common_length(lines: list[dict[str, Any]], known: list[dict[str, Any]]) -> int:
    """Returns the number of known lines if `lines` begins with them, else 0."""
    return len(known) if lines[: len(known)] == known else 0
