"""Records this process's activity and its last progress. Imports nothing slow.

The main thread enters stages and beats while it makes progress. The supervisor's thread reads this
state and publishes it to the other processes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from grpo_cli.errors import SignalReceived

_now = time.monotonic


class Activity(NamedTuple):
    """The activity of a process, with durations up to now."""

    stage: str
    step: int | None  # None before the first step
    quiet: float  # seconds since the last beat
    waiting: bool  # whether it waits for other processes
    inside: float  # seconds in the current stage


START = "start"  # the stage before the first evaluation or step
START_TIMES = 4.0  # factor of the stall limit during START, which loads, builds and downloads

_stage = START
_detail = ""  # progress within the stage, such as 12/64
_step: int | None = None
_entered = _beaten = _now()
_spent: dict[str, float] = {}  # seconds in each stage that the main thread has left
_waits = 0  # open `waiting` blocks
on_stage: Callable[[], None] | None = None  # called when a stage begins
leave: Callable[[], bool] | None = None  # whether to interrupt now, if possible
_calls = 0  # open `calling` blocks


class WorkInterrupted(SignalReceived):
    """Raised to interrupt the current work because the run must end."""


def at(stage: str, step: int | None = None) -> None:
    """Enters a stage, and beats. Without `step` the step is unchanged."""
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
    """Records the progress within the stage, until the next stage."""
    global _detail
    _detail = text


def activity() -> str:
    """Returns this process's current activity, such as `generate 12/64`."""
    return f"{_stage} {_detail}".strip()


def touch() -> None:
    """Records a beat without ever raising, for threads and uninterruptible code."""
    global _beaten
    _beaten = _now()


def beat() -> None:
    """Records progress of the main thread, which the stall detector watches.

    Raises:
        WorkInterrupted: the run must end, and the current work may be interrupted.
    """
    touch()
    if leave is not None and leave():
        raise WorkInterrupted


def beat_of_main() -> None:
    """Beats if called in the main thread, for code that other threads also run."""
    if threading.current_thread() is threading.main_thread():
        beat()


@contextlib.contextmanager
def inside(stage: str) -> Iterator[None]:
    """Enters a nested stage; the outer one continues afterwards. An error keeps the inner stage."""
    outer = _stage
    at(stage)
    yield
    at(outer)


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Marks a block that waits for other processes and so cannot cause a stall.

    The block is not interrupted, since the others also wait for this process.
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
    """Marks a main-thread call of a user's function, which may never return or beat.

    `interrupt_call` raises WorkInterrupted inside the call, as Ctrl-C raises KeyboardInterrupt.
    """
    global _calls
    _calls += 1
    try:
        yield
    finally:
        _calls -= 1


def is_calling() -> bool:
    """Returns whether the main thread is in a user's function."""
    return _calls > 0


def interrupt_call(*_: object) -> None:
    """Signal handler that raises WorkInterrupted if the main thread is in a user's function.

    Raises:
        WorkInterrupted: the run must end.
    """
    if is_calling() and leave is not None and leave():
        raise WorkInterrupted


def state() -> Activity:
    """Returns the current state of this process."""
    now = _now()
    return Activity(_stage, _step, now - _beaten, _waits > 0, now - _entered)


def seconds() -> dict[str, float]:
    """Returns the seconds that this process has spent in each stage since its start."""
    spent = dict(_spent)  # copied, since the main thread may change it
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
