"""Deadlines of the calls that one thread makes in turn, and the random streams of sessions.

A call is a coroutine of an environment. It runs in slices, from one `await` that waits to the next;
a synchronous environment has one slice. `Deadlines` knows which call holds the thread:

- In a slice, a timer raises `Overrun` at the call's deadline, in the main thread of a worker.
- Between slices, a call of the event loop does the same.
- Code that neither can interrupt is ended by the process that has started the worker: it reads
  `Mark`, in shared memory, and kills the worker (`sessions.py`).

Time that a call spends because others hold the thread is not counted.
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
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

GRACE = 0.5  # seconds after a deadline until a call that cannot be interrupted is killed
BEAT_SECONDS = 0.5  # between signs of life of an event loop


class Overrun(BaseException):
    """Raised in a call past its deadline. No `except Exception` of a user's can swallow it."""


class Mark:
    """Shared memory in which a worker notes the call that holds its thread.

    Three numbers: the call's number, 0 for none; the time at which it may be killed; the time of
    the event loop's last sign of life. Times are of the monotonic clock, which processes share.
    """

    SIZE = 24

    def __init__(self, fd: int) -> None:
        shared = memoryview(mmap.mmap(fd, self.SIZE))
        # An assignment to a view is one store. struct writes zeros first, which the reader may see.
        self._number, self._times = shared[:8].cast("q"), shared[8:].cast("d")

    def hold(self, number: int, until: float) -> None:
        """Notes the call that begins a slice, or that has more time from now on."""
        self._times[0] = until  # first: a number is never seen beside the time of another
        self._number[0] = number

    def release(self) -> None:
        """Notes that no call has the thread."""
        self._number[0] = 0

    def beat(self) -> None:
        """Notes that the event loop runs."""
        self._times[1] = time.monotonic()

    def read(self) -> tuple[int, float, float]:
        """Returns the three numbers; the time is that of the call, or of one after it."""
        number = self._number[0]
        return number, self._times[0], self._times[1]


@dataclass(eq=False)
class Streams:
    """The states of Python's and numpy's global random numbers that belong to one session."""

    python: Any = None
    numpy: Any = None  # a bit generator

    def save(self) -> None:
        """Takes the present states."""
        self.python = random.getstate()
        if (module := _numpy_random()) is not None:
            self.numpy = module.get_bit_generator()

    def restore(self) -> None:
        """Makes the states that were taken the present ones."""
        if self.python is not None:
            random.setstate(self.python)
        self.restore_numpy()

    def restore_numpy(self) -> None:
        """Makes numpy's state the present one, without a normal number that it has kept back.

        A slice begins without one whether or not another session had a slice in between.
        """
        if (module := _numpy_random()) is not None:
            if self.numpy is None:
                self.numpy = module.MT19937(0)
            module.set_bit_generator(self.numpy)


def _numpy_random() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)


def seed_everything(seed: int) -> None:
    """Seeds Python's and numpy's random numbers."""
    random.seed(seed)
    if (module := _numpy_random()) is not None:
        module.seed(seed % 2**32)


class Start(NamedTuple):
    """The moment from which a deadline counts."""

    time: float
    busy: float  # seconds that the slices of the call had taken
    busy_of_all: float  # of all calls


@dataclass(eq=False)
class Run:
    """A call under way."""

    number: int
    streams: Streams
    late: Callable[[], None]  # called if the call waits past its deadline
    start: Start = Start(0.0, 0.0, 0.0)
    busy: float = 0.0  # seconds that its slices took
    timer: asyncio.TimerHandle | None = None


class Deadlines:
    """Gives each call `seconds` from the moment at which it begins.

    Args:
        seconds: None: as long as it takes.
        mark: where to note the call that holds the thread.
        interrupt: whether a timer's signal interrupts slices; needs the main thread.
    """

    def __init__(
        self, seconds: float | None = None, mark: Mark | None = None, interrupt: bool = False
    ) -> None:
        self.seconds, self.mark, self.interrupt = seconds, mark, interrupt
        self.run: Run | None = None  # that holds the thread
        self._busy = 0.0  # seconds of all slices
        self._sliced = 0.0  # when the present slice began
        self._owner: Streams | None = None  # of the present random states
        self._outside = Streams()  # of the thread itself
        if interrupt:
            assert threading.current_thread() is threading.main_thread(), "signals come there"
            signal.signal(signal.SIGALRM, self._interrupt)

    # For a call, about its own deadline

    def begin(self, slack: float = 0.0) -> None:
        """Gives the present call its full time from now on: a tool of a turn begins.

        Args:
            slack: seconds beyond, for a call that has a deadline within.
        """
        if self.run is not None:
            self.run.start = self._now(self.run, slack)
            self._arm(self.run)

    async def within(self, awaitable: Awaitable[Any]) -> Any:
        """Awaits until the deadline; returns the result or raises `Overrun`."""
        task = asyncio.ensure_future(self.wrap(contained(awaitable)))
        try:
            if (run := self.run) is None or self.seconds is None:
                return await task
            start = self._now(run)
            self.begin(GRACE / 2)
            while not task.done() and (left := self._left(run, start)) > 0:
                await asyncio.wait({task}, timeout=left)
            if not task.done():
                raise Overrun(overrun(self.seconds))
            return task.result()
        finally:
            task.cancel()  # and not waited for: it may ignore the cancellation

    def wrap(self, coroutine: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
        """Returns a coroutine for a task of its own that counts as a part of the present call."""
        return coroutine if self.run is None else self._drive(self.run, coroutine)

    # For the host of sessions

    async def call(self, run: Run, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs a call; its deadline counts from now."""
        run.start = self._now(run)
        try:
            return await self._drive(run, coroutine)
        finally:
            if run.timer is not None:
                run.timer.cancel()

    def _drive(self, run: Run, coroutine: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
        return _awaited(_Slices(self, run, coroutine))

    def _now(self, run: Run, slack: float = 0.0) -> Start:
        return Start(time.monotonic() + slack, run.busy, self._busy)

    def _left(self, run: Run, start: Start | None = None) -> float:
        """Returns the seconds until a call's deadline, without the time that others have held."""
        assert self.seconds is not None
        start = start or run.start
        others = (self._busy - start.busy_of_all) - (run.busy - start.busy)
        return self.seconds + others - (time.monotonic() - start.time)

    def _enter(self, run: Run) -> None:
        if self._owner is not run.streams:
            (self._owner or self._outside).save()
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
        if not self.interrupt and self._owner is not None:  # a thread of the run
            self._owner.save()
            self._outside.restore()
            self._owner = None

    def _arm(self, run: Run) -> None:
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

    def _waits(self, run: Run) -> None:
        """Watches a call that waits for something."""
        if run.timer is None and self.seconds is not None:
            loop = asyncio.get_running_loop()
            run.timer = loop.call_later(max(self._left(run), 0.0), self._look, run)

    def _look(self, run: Run) -> None:
        run.timer = None
        if self._left(run) > 0:
            self._waits(run)
        else:
            run.late()


class _Slices:
    """Awaits a coroutine, and says when each of its slices begins and ends."""

    def __init__(self, deadlines: Deadlines, run: Run, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.deadlines, self.run, self.coroutine = deadlines, run, coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        advance: Callable[[], Any] = functools.partial(self.coroutine.send, None)
        while True:
            try:
                self.deadlines._enter(self.run)
                try:
                    waits_for = advance()
                finally:
                    self.deadlines._exit()
            except StopIteration as result:
                return result.value
            self.deadlines._waits(self.run)
            try:
                answer = yield waits_for
            except BaseException as error:
                advance = functools.partial(self.coroutine.throw, error)
            else:
                advance = functools.partial(self.coroutine.send, answer)


async def _awaited(slices: _Slices) -> Any:
    return await slices


async def contained(awaitable: Awaitable[Any]) -> Any:
    """Awaits; turns a SystemExit, which would end the event loop, into a RuntimeError."""
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        raise RuntimeError(described(error)) from error


async def result_of(value: Any) -> Any:
    """Returns what a function of a user's gives, which may be an awaitable."""
    return await value if inspect.isawaitable(value) else value


def overrun(seconds: float) -> str:
    """Returns the text of a call that was stopped at its deadline."""
    return f"took more than {seconds:g} s and was stopped"


def described(error: BaseException) -> str:
    """Returns `ValueError: message`."""
    try:
        message = str(error)
    except Exception:  # its own __str__ raised
        message = "it cannot say what"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def blame(error: BaseException) -> str:
    """Returns `ValueError: message at file.py:12`, with the place where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return described(error) + place
