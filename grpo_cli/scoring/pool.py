"""Runs reward functions that may never return in workers, with a hard deadline per call.

A call past its deadline is ended by killing its worker with all descendants. The worker is
replaced, and no other call waits. Python's own pools cannot kill a worker.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_cli.scoring.guards import CallResult
from grpo_cli.scoring.processes import Worker, WorkerProcesses, overrun


@dataclass(frozen=True)
class Call:
    """One call of a reward function, picklable."""

    path: str  # module:function
    arguments: Mapping[str, Any]
    seconds: float  # deadline, counted from when a worker takes the call


@dataclass(eq=False)
class _Worker(Worker):
    job: tuple[Call, Future[CallResult]] | None = None
    log_history: list[dict[str, Any]] = field(default_factory=list)  # log lines that it has


class Pool(WorkerProcesses[_Worker]):
    """Workers that call functions by dotted path, each one call at a time.

    Args:
        size: number of worker processes.
        memory_gb: address space per worker; exceeding it is a MemoryError. None: no limit.
        preload: modules to import before the first call, outside its deadline.
    """

    module = "grpo_cli.scoring.pool_worker"
    worker_type = _Worker

    def __init__(
        self, size: int, memory_gb: float | None = 4.0, preload: Sequence[str] = ()
    ) -> None:
        self.preload = list(preload)
        super().__init__("reward-pool", size, memory_gb)

    def submit(self, call: Call) -> Future[CallResult]:
        """Queues a call. Its future always completes with a `CallResult`."""
        future: Future[CallResult] = Future()
        self.hand_over((call, future))
        return future

    def close(self) -> None:
        """Kills the workers; pending calls end with an error."""
        self.end("the pool was closed")

    def take_calls(self) -> None:
        """Starts one worker per call, up to `size`, and sends calls to idle workers."""
        busy = sum(worker.job is not None for worker in self.workers)
        while len(self.workers) < min(self.size, len(self.inbox) + busy):
            if self.start_worker(self.preload) is None:
                break
        for worker in self.workers:
            if worker.ready and worker.job is None:
                with self.lock:
                    if not self.inbox:
                        return
                    worker.job = self.inbox.pop(0)
                self._send(worker, worker.job[0])

    def _send(self, worker: _Worker, call: Call) -> None:
        worker.deadline = time.monotonic() + call.seconds
        arguments, lines = dict(call.arguments), worker.log_history
        if (state := arguments.get("trainer_state")) is not None:
            # The log grows with the run, so a worker keeps it and receives only the missing lines.
            arguments["trainer_state"], lines = replace(state, log_history=[]), state.log_history
        known = len(worker.log_history)
        known = known if lines[:known] == worker.log_history else 0
        try:
            worker.pipe.send((call.path, arguments, (known, lines[known:])))
            worker.log_history = lines
        except OSError:  # it died in between, and its end of file is read next; or its deadline
            pass
        except Exception as error:  # an argument cannot be pickled
            self.unreadable(worker, error)

    def received(self, worker: _Worker, message: CallResult) -> None:
        """Completes a call."""
        if worker.job is not None:
            worker.job[1].set_result(message)
            worker.job = None

    def unreadable(self, worker: _Worker, error: Exception) -> None:
        """Completes a call whose result, or an argument, cannot be pickled."""
        self.received(worker, CallResult(error=f"{type(error).__name__}: {error}"))

    def next_check(self, worker: _Worker) -> float:
        """Returns the deadline of a worker's call."""
        return math.inf if worker.job is None else worker.deadline

    def check(self, worker: _Worker) -> None:
        """Kills a worker whose call is past its deadline."""
        if worker.job is not None and worker.deadline < time.monotonic():
            self.dismiss(worker, overrun(worker.job[0].seconds), late=True)

    def lost(self, worker: _Worker, reason: str, *, late: bool) -> None:
        """Completes the call of a worker that has been killed."""
        if worker.job is not None:
            seconds = worker.job[0].seconds if late else 0.0
            self.received(worker, CallResult(seconds=seconds, error=reason, timed_out=late))

    def fail(self, call: tuple[Call, Future[CallResult]], reason: str) -> None:
        """Completes a queued call with an error."""
        call[1].set_result(CallResult(error=reason))
