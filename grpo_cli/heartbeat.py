"""What this process is doing, and when it last got on. Imports nothing heavy.

The main thread says which stage of which step it is in and beats while it gets on; `watch.Watch`
reads it from a thread of its own and tells the other processes.
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
    """What a process does. Seconds are from this moment back."""

    stage: str
    step: int | None  # None before the first
    quiet: float  # seconds since the last beat
    waiting: bool  # for other processes
    inside: float  # seconds in this stage


START = "start"  # the stage before the first evaluation or step
START_TIMES = 4.0  # longer may a run be silent there: it loads, builds, downloads

_stage = START
_step: int | None = None
_entered = _beaten = _now()
_waits = 0  # open `waiting` blocks
on_stage: Callable[[], None] | None = None  # is called when a stage begins
leave: Callable[[], bool] | None = None  # while work may be broken off: whether it is to be


class Leave(BaseException):
    """This process breaks off what it does: the run has to end now."""


def at(stage: str, step: int | None = None) -> None:
    """Enters a stage, which is a beat. The step stays what it was unless one is given."""
    global _stage, _step, _entered, _beaten
    if step is not None:
        _step = step
    _stage = stage
    _entered = _beaten = _now()
    if on_stage is not None:
        on_stage()


def touch() -> None:
    """Sets the time of the last beat, and never raises: for threads, and where none may leave."""
    global _beaten
    _beaten = _now()


def beat() -> None:
    """Gets on inside a stage. Of the thread whose silence is a stall, and of no other.

    Raises:
        Leave: the run has to end, and what is being done may be broken off.
    """
    touch()
    if leave is not None and leave():
        raise Leave


def beat_of_main() -> None:
    """`beat` of the main thread; of another nothing, for code that both of them run."""
    if threading.current_thread() is threading.main_thread():
        beat()


@contextlib.contextmanager
def inside(stage: str) -> Iterator[None]:
    """A stage within another, which goes on after it. An error leaves the inner one standing."""
    outer = _stage
    at(stage)
    yield
    at(outer)


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Around what waits for other processes: whoever waits is not to blame for a stall.

    Nobody leaves here: the others wait for this process as well.
    """
    global _waits
    touch()
    _waits += 1
    try:
        yield
    finally:
        _waits -= 1
        touch()


def state() -> State:
    """What this process does now."""
    now = _now()
    return State(_stage, _step, now - _beaten, _waits > 0, now - _entered)


def node() -> str:
    """This machine's name, as SLURM calls it if SLURM started this."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def where() -> str:
    """`process 1 on n2, step 3, reward`; of a single process `step 3, reward`."""
    parts = [] if _step is None else [f"step {_step}"]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parts = [f"process {os.environ.get('RANK', '0')} on {node()}", *parts]
    return ", ".join([*parts, _stage])
