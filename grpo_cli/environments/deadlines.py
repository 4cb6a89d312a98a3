"""Deadlines of calls that share one thread, and the random states of sessions.

A call is a coroutine of an environment. It runs in slices, from one suspending `await` to the next;
a synchronous environment has one slice. `Deadlines` tracks which call holds the thread:

- In a slice, a timer raises `Overrun` at the call's deadline, in the main thread of a worker.
- Between slices, a callback of the event loop does the same.
- If neither can interrupt the code, the worker's parent process kills the worker. It reads the
  deadline from `Mark`, in shared memory (`sessions.py`).

Time in which other calls hold the thread does not count.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import mmap
import random
import signal
import sys
import threading
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any

from grpo_cli.scoring.guards import contained
from grpo_cli.scoring.processes import overrun

GRACE = 0.5  # seconds after a deadline until a call that cannot be interrupted is killed
BEAT_SECONDS = 0.5  # interval of an event loop's heartbeat


class Overrun(BaseException):
    """Raised in a call past its deadline. A user's `except Exception` does not catch it."""


class Mark:
    """Shared memory in which a worker records the call that holds its thread.

    It has three numbers: the call's number or 0, the time at which the call may be killed, and the
    event loop's last heartbeat. Times are of the monotonic clock, which processes share.
    """

    SIZE = 24

    def __init__(self, fd: int) -> None:
        shared = memoryview(mmap.mmap(fd, self.SIZE))
        # Assigning to a view is one store; struct writes zeros first, which a reader might see.
        self._number, self._times = shared[:8].cast("q"), shared[8:].cast("d")

    def hold(self, number: int, until: float) -> None:
        """Records the call that begins a slice, or its new deadline."""
        self._times[0] = until  # first, so that a reader never pairs a number with an older time
        self._number[0] = number

    def release(self) -> None:
        """Records that no call holds the thread."""
        self._number[0] = 0

    def beat(self) -> None:
        """Records a heartbeat of the event loop."""
        self._times[1] = time.monotonic()

    def read(self) -> tuple[int, float, float]:
        """Returns the three numbers; the time may already be that of a later call."""
        number = self._number[0]
        return number, self._times[0], self._times[1]


@dataclass(eq=False)
class Streams:
    """One session's states of Python's and numpy's global random generators."""

    python: Any = None
    numpy: Any = None  # a bit generator

    def save(self) -> None:
        """Stores the current global states."""
        self.python = random.getstate()
        if (module := _numpy_random()) is not None:
            self.numpy = module.get_bit_generator()

    def restore(self) -> None:
        """Sets the global states to the stored ones."""
        if self.python is not None:
            random.setstate(self.python)
        self.restore_numpy()

    def restore_numpy(self) -> None:
        """Sets numpy's global state, without the cached normal variate.

        So every slice begins without one, whether or not another session ran in between.
        """
        if (module := _numpy_random()) is not None:
            if self.numpy is None:
                self.numpy = module.MT19937(0)
            module.set_bit_generator(self.numpy)


def _numpy_random() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)


def seed_everything(seed: int) -> None:
    """Seeds Python's and numpy's global random generators."""
    random.seed(seed)
    if (module := _numpy_random()) is not None:
        module.seed(seed % 2**32)


@dataclass(eq=False)
class RunningCall:
    """A running call."""

    number: int
    streams: Streams
    late: Callable[[], object]  # called if the deadline passes between slices
    start: float = 0.0  # age at which its deadline began
    busy: float = 0.0  # seconds in its slices
    task: asyncio.Task[Any] | None = None
    timer: asyncio.TimerHandle | None = None


class Deadlines:
    """Limits each call to `seconds` from its start.

    Args:
        seconds: time limit; None: no limit.
        mark: shared memory that records the call that holds the thread.
        interrupt: whether a timer signal interrupts slices; requires the main thread.
    """

    def __init__(
        self, seconds: float | None = None, mark: Mark | None = None, interrupt: bool = False
    ) -> None:
        self.seconds, self.mark, self.interrupt = seconds, mark, interrupt
        self.run: RunningCall | None = None  # the call that holds the thread
        self._busy = 0.0  # seconds in all slices
        self._sliced = 0.0  # start of the current slice
        self._owner: Streams | None = None  # session of the current random states
        if interrupt:
            assert threading.current_thread() is threading.main_thread(), "signals come there"
            signal.signal(signal.SIGALRM, self._interrupt)

    # Called from within a call

    def begin(self, slack: float = 0.0) -> None:
        """Restarts the current call's deadline, as for each tool of a turn.

        Args:
            slack: extra seconds for a call that contains another deadline.
        """
        if self.run is not None:
            self.run.start = self._age(self.run) + slack
            self._arm(self.run)

    async def within(self, awaitable: Awaitable[Any]) -> Any:
        """Awaits until the deadline; returns the result or raises `Overrun`."""
        task = asyncio.ensure_future(self.wrap(contained(awaitable)))
        try:
            if (run := self.run) is None or self.seconds is None:
                return await task
            start = self._age(run)
            self.begin(GRACE / 2)
            while not task.done() and (left := self._left(run, start)) > 0:
                await asyncio.wait({task}, timeout=left)
            if not task.done():
                raise Overrun(overrun(self.seconds))
            return task.result()
        finally:
            task.cancel()  # without waiting, since it may ignore the cancellation

    def wrap(self, coroutine: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
        """Wraps a coroutine for a separate task, whose slices count as the current call's."""
        return coroutine if self.run is None else self._drive(self.run, coroutine)

    # Called by the host of sessions

    async def call(self, run: RunningCall, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs a call, whose deadline starts now."""
        run.start = self._age(run)
        try:
            return await self._drive(run, coroutine)
        finally:
            if run.timer is not None:
                run.timer.cancel()

    async def _drive(self, run: RunningCall, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await self._slices(run, coroutine)

    @types.coroutine
    def _slices(
        self, run: RunningCall, coroutine: Coroutine[Any, Any, Any]
    ) -> Generator[Any, Any, Any]:
        """Awaits a coroutine, and notes the begin and the end of its slices."""
        advance: Callable[[], Any] = functools.partial(coroutine.send, None)
        while True:
            try:
                self._enter(run)
                try:
                    waits_for = advance()
                finally:
                    self._exit()
            except StopIteration as result:
                return result.value
            self._waits(run)
            try:
                answer = yield waits_for
            except BaseException as error:
                advance = functools.partial(coroutine.throw, error)
            else:
                advance = functools.partial(coroutine.send, answer)

    def _age(self, run: RunningCall) -> float:
        """Returns a call's clock, which stands still while other calls hold the thread."""
        return time.monotonic() - (self._busy - run.busy)

    def _left(self, run: RunningCall, start: float | None = None) -> float:
        """Returns the seconds until a call's deadline."""
        assert self.seconds is not None
        return self.seconds - (self._age(run) - (run.start if start is None else start))

    def _enter(self, run: RunningCall) -> None:
        if self._owner is not run.streams:
            if self._owner is not None:
                self._owner.save()
            run.streams.restore()
            self._owner = run.streams
        else:
            run.streams.restore_numpy()
        self.run, self._sliced = run, time.monotonic()
        self._arm(run)

    def _exit(self) -> None:
        run, self.run = self.run, None
        if self.interrupt:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        if self.mark is not None:
            self.mark.release()
        assert run is not None
        spent = time.monotonic() - self._sliced
        run.busy += spent
        self._busy += spent

    def _arm(self, run: RunningCall) -> None:
        if self.seconds is None:
            return
        left = max(self._left(run), 0.001)
        if self.mark is not None:
            self.mark.hold(run.number, time.monotonic() + left + GRACE)
        if self.interrupt:
            signal.setitimer(signal.ITIMER_REAL, left)

    def _interrupt(self, *_: Any) -> None:
        if self.run is not None and self.seconds is not None:
            raise Overrun(overrun(self.seconds))

    def _waits(self, run: RunningCall) -> None:
        """Schedules the check of a suspended call's deadline."""
        if run.timer is None and self.seconds is not None:
            loop = asyncio.get_running_loop()
            run.timer = loop.call_later(max(self._left(run), 0.0), self._look, run)

    def _look(self, run: RunningCall) -> None:
        run.timer = None
        if self._left(run) > 0:
            self._waits(run)
        else:
            run.late()


async def result_of(value: Any) -> Any:
    """Returns the result of a user's function, awaiting it if it is an awaitable."""
    return await value if inspect.isawaitable(value) else value
