"""Records what this process is doing and when it last made progress. Imports nothing heavy.

The main thread enters stages and beats while it makes progress; the supervisor reads this from its
own thread and publishes it to the other processes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

_now = time.monotonic


class State(NamedTuple):
    """The activity of a process; seconds count back from now."""

    stage: str
    step: int | None  # None before the first
    quiet: float  # seconds since the last beat
    waiting: bool  # for other processes
    inside: float  # seconds in this stage


START = "start"  # the stage before the first evaluation or step
START_TIMES = 4.0  # factor of the stall limit in that stage: it loads, builds, downloads

_stage = START
_detail = ""  # of the stage, such as 12/64
_step: int | None = None
_entered = _beaten = _now()
_spent: dict[str, float] = {}  # seconds in each stage that the main thread has left
_waits = 0  # open `waiting` blocks
on_stage: Callable[[], None] | None = None  # called when a stage begins
leave: Callable[[], bool] | None = None  # whether to interrupt now; set while that is possible
_calls = 0  # open `calling` blocks


class Interrupt(BaseException):
    """Raised to interrupt the present work, because the run has to end now."""


def at(stage: str, step: int | None = None) -> None:
    """Enters a stage, which is a beat. Without `step` the step stays the same."""
    global _stage, _detail, _step, _entered, _beaten
    _detail = ""
    if step is not None:
        _step = step
    now = _now()
    _spent[_stage] = _spent.get(_stage, 0.0) + now - _entered
    _stage = stage
    _entered = _beaten = now
    if on_stage is not None:
        on_stage()


def detail(text: str) -> None:
    """Notes what is done within the stage, or how much of it, until the next stage."""
    global _detail
    _detail = text


def activity() -> str:
    """Returns what this process does at the moment, such as `generate 12/64`."""
    return f"{_stage} {_detail}".strip()


def touch() -> None:
    """Records a beat and never raises: for threads, and where an interrupt is not possible."""
    global _beaten
    _beaten = _now()


def beat() -> None:
    """Records progress. Only the main thread calls it, which the stall detector watches.

    Raises:
        Interrupt: the run has to end, and the present work may be interrupted.
    """
    touch()
    if leave is not None and leave():
        raise Interrupt


def beat_of_main() -> None:
    """Records progress in the main thread and does nothing in another, for code that both run."""
    if threading.current_thread() is threading.main_thread():
        beat()


@contextlib.contextmanager
def inside(stage: str) -> Iterator[None]:
    """Enters a stage within another, which continues afterwards. An error keeps the inner stage."""
    outer = _stage
    at(stage)
    yield
    at(outer)


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Marks a block that waits for other processes, and so cannot be the cause of a stall.

    It is not interrupted: the others wait for this process as well.
    """
    global _waits
    touch()
    _waits += 1
    try:
        yield
    finally:
        _waits -= 1
        touch()


@contextlib.contextmanager
def calling() -> Iterator[None]:
    """Marks a call of a user's function in the main thread, which may never return or beat.

    `interrupt_call` raises Interrupt in it, as Ctrl-C raises KeyboardInterrupt.
    """
    global _calls
    _calls += 1
    try:
        yield
    finally:
        _calls -= 1


def is_calling() -> bool:
    """Whether the main thread is in a call of a user's function."""
    return _calls > 0


def interrupt_call(*_: object) -> None:
    """Raises Interrupt if the main thread is in a user's function; a signal handler.

    Raises:
        Interrupt: the run has to end.
    """
    if is_calling() and leave is not None and leave():
        raise Interrupt


def state() -> State:
    """Returns the present state of this process."""
    now = _now()
    return State(_stage, _step, now - _beaten, _waits > 0, now - _entered)


def seconds() -> dict[str, float]:
    """Returns the seconds that this process has spent in each stage, from its start until now."""
    spent = dict(_spent)  # at once: another thread may ask
    spent[_stage] = spent.get(_stage, 0.0) + _now() - _entered
    return spent


def node() -> str:
    """Returns this machine's name; under SLURM, SLURM's name for it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def where() -> str:
    """Returns `process 1 on n2, step 3, reward`; for a single process `step 3, reward`."""
    parts = [] if _step is None else [f"step {_step}"]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parts = [f"process {os.environ.get('RANK', '0')} on {node()}", *parts]
    return ", ".join([*parts, _stage])
