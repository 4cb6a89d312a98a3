"""Decides for all processes together whether to interrupt the current work."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator

from grpo_cli.distributed import heartbeat
from grpo_cli.distributed.heartbeat import WorkInterrupted
from grpo_cli.distributed.stop_signal import Interrupted, StopSignal
from grpo_cli.distributed.workers import Workers


class Interrupts:
    """Compares the time left with the time that the step and its checkpoint still need.

    A run that must end (`stop_signal.py`) finishes its step if time allows. Otherwise every process
    interrupts its current work, and all raise Interrupted.
    """

    def __init__(
        self,
        workers: Workers,
        stop: StopSignal,
        seconds_to_write: Callable[[float], float],
        save_seconds: float,
    ) -> None:
        """Initializes the timing before the first step.

        Args:
            seconds_to_write: returns the expected seconds until the checkpoint being written is
                complete, given the usual duration; 0 if there is none.
            save_seconds: expected seconds of the first checkpoint.
        """
        self.workers = workers
        self.stop = stop
        self.seconds_to_write = seconds_to_write
        self.save_seconds = save_seconds  # duration of the newest checkpoint
        self.signal: int | None = None  # signal that ended the run, known to all processes
        self._step_began = math.inf
        self._step_seconds: deque[float] = deque(maxlen=3)  # durations of the last steps

    def begin_step(self) -> None:
        """Starts timing a step, and records the duration of the previous one."""
        now = time.monotonic()
        if self._step_began < now:
            self._step_seconds.append(now - self._step_began)
        self._step_began = now

    @contextlib.contextmanager
    def interruptible(self, episodes: bool = False) -> Iterator[None]:
        """Marks work that each process does on its own and can interrupt.

        Every process enters the block; if one interrupts its work, all do.

        Args:
            episodes: the work samples episodes. In lockstep this is done in rounds and is not
                interrupted: a process that left early would block the others.

        Raises:
            Interrupted: the run must end, and the work is incomplete.
        """
        if episodes and self.workers.runs_in_lockstep:
            yield
            return
        is_interrupted = False
        heartbeat.leave = self.is_due
        try:
            yield
        except WorkInterrupted:
            is_interrupted = True
        finally:
            heartbeat.leave = None
        self.interrupt_together(is_interrupted)

    def interrupt_together(self, is_interrupted: bool = False) -> None:
        """Raises Interrupted on every process if any process is, or must be, interrupted."""
        if self.workers.max(float(is_interrupted or self.is_due())):
            raise Interrupted

    def is_due(self) -> bool:
        """Returns whether the run must end before the current step could be finished and saved."""
        if not self.stop.is_requested:
            return False
        usual = max(self._step_seconds, default=math.inf)
        left = max(usual - (time.monotonic() - self._step_began), 0.0)
        # The next save starts after the previous one is written, which happens during the step.
        left = max(left, self.seconds_to_write(self.save_seconds))
        return self.stop.is_too_late(left, self.save_seconds)

    def find_signal(self) -> int | None:
        """Returns the signal that any process received, the same on every process."""
        number = self.stop.signal if self.stop.is_requested else None
        self.signal = int(self.workers.max(float(number or 0))) or None
        return self.signal
