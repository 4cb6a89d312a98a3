"""Decides whether a run must end early, and whether it can finish its current step.

Ctrl-C (SIGINT) sets no time limit. SIGTERM, SIGHUP of a closed terminal, and SIGUSR1, which SLURM
sends before a time limit or a preemption, allow `checkpoint.grace` seconds. A job with a known end
($GRPO_END_TIME, $SLURM_JOB_END_TIME) acts as if it received a signal `checkpoint.grace` seconds
before its end.

Under torchrun Ctrl-C also allows only `checkpoint.grace` seconds: torchrun forwards the signal, and
kills its processes after its --shutdown-timeout.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from grpo_cli.distributed import heartbeat
from grpo_cli.errors import SignalReceived, UserError

if TYPE_CHECKING:
    from grpo_cli.distributed.workers import Workers

SAFETY_FACTOR = 1.5  # bound on the next duration of a step or save, relative to the last one
SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1
WAKE = signal.SIGUSR2  # the supervisor's signal to a main thread in a user's function


class Interrupted(Exception):  # noqa: N818 - not an error
    """Raised when all processes have interrupted their current step."""


class StoppedWhileStarting(SignalReceived):
    """Raised when a run receives a signal before its first step."""

    def __init__(self, number: int) -> None:
        super().__init__("stopped before the first step; there is nothing new to save")
        self.signal = number


def end_of_job() -> float | None:
    """Returns the unix time at which the batch system ends the job, or None if unknown."""
    for name in ("GRPO_END_TIME", "SLURM_JOB_END_TIME"):
        value = os.environ.get(name, "")
        if value.isdecimal():
            return float(value)
    return None


def is_under_torchrun() -> bool:
    """Returns whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def die_with_torchrun() -> None:
    """Makes the kernel kill this process when the torchrun that started it ends.

    It would otherwise survive, wait for torchrun's store, and join the next torchrun at the port.
    """
    if sys.platform == "linux" and is_under_torchrun():
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def is_started_again() -> bool:
    """Returns whether torchrun restarts all processes if one ends with a nonzero exit code."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0


def given_grace(usual: float) -> float:
    """Returns the seconds between a signal and the end: $GRPO_GRACE, or the recipe's `usual`.

    Raises:
        UserError: $GRPO_GRACE is not a number of seconds.
    """
    value = os.environ.get("GRPO_GRACE")
    if not value:
        return usual
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise UserError(f"GRPO_GRACE = {value}: has to be a number of seconds, 0 or more.")
    return seconds


def leave_closed_terminal(descriptors: Sequence[int] = (1, 2)) -> None:
    """Redirects output of a closed terminal to /dev/null, where printing would raise."""
    for descriptor in descriptors:
        try:
            os.get_terminal_size(descriptor)
        except OSError as error:
            if error.errno == errno.EIO:
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), descriptor)


class StopSignal:
    """Receives the signals that end a run. A second Ctrl-C ends it immediately."""

    def __init__(
        self,
        say: Callable[[str], None],
        grace: float = 30.0,
        end: float | None = None,
        send: Callable[[int], None] = lambda number: None,
        received: Callable[[], int | None] = lambda: None,
        is_aftermath: Callable[[], bool] = lambda: False,
    ) -> None:
        """Installs signal handlers. A signal raises StoppedWhileStarting until `started` is set.

        Args:
            say: prints a line.
            grace: seconds between a signal and the end.
            end: unix time of the job's end, if known.
            send: sends a signal's number to the other processes; called in a signal handler.
            received: returns the number of a signal that another process received, if any.
            is_aftermath: returns whether a SIGTERM follows from the failure of another process.

        Raises:
            UserError: $GRPO_GRACE is not a number of seconds.
        """
        self.say, self.end, self.send, self.received = say, end, send, received
        self.is_aftermath = is_aftermath
        self.grace = given_grace(grace)
        self.signal: int | None = None  # signal that ends the run; SIGALRM: the job's time is up
        self.ends_at: float | None = None  # unix time by which the run must have ended
        self.started = False
        self._process = os.getpid()
        under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        numbers = [n for n in SIGNALS if not (n == signal.SIGHUP and under_nohup)]
        self._previous = {number: signal.signal(number, self._handle) for number in numbers}
        self._previous[WAKE] = signal.signal(WAKE, heartbeat.interrupt_call)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # forked by a user's function, as by multiprocessing.Pool
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        if number == signal.SIGTERM and self.is_aftermath():
            return
        if number == signal.SIGHUP:
            leave_closed_terminal()
        if not self.started:
            self.release()
            self.send(number)
            raise StoppedWhileStarting(number)
        if self.signal is not None and number == signal.SIGINT:
            self.release()
            raise KeyboardInterrupt
        if self.signal is None:
            self.record(number)
            self.send(number)
        elif self.signal == signal.SIGINT:  # the second signal sets a limit
            self._set_end()

    def record(self, number: int) -> None:
        """Records a signal that this or another process received; only the first one counts."""
        if self.signal is not None:
            return
        self.signal, self.ends_at = number, self.end
        if number == signal.SIGINT and not is_under_torchrun():
            what_next = "this step is finished and saved first; once more to stop at once"
        else:
            self._set_end()
            what_next = (
                f"this step is finished and saved if that takes less than {self.grace:g} s, and "
                "else saved as far as it is"
            )
        with contextlib.suppress(RuntimeError):  # the signal may come during a write
            self.say(f"stopping: {what_next}")

    def _set_end(self) -> None:
        """Limits the run to `grace` more seconds, or to an earlier known end."""
        ends = (time.time() + self.grace, self.end, self.ends_at)
        self.ends_at = min(end for end in ends if end is not None)

    @property
    def is_requested(self) -> bool:
        """Whether the run must end after the current step."""
        if self.signal is None:
            elsewhere = self.received()
            if elsewhere is not None:
                self.record(elsewhere)
            elif self.end is not None and time.time() > self.end - self.grace:
                self.record(signal.SIGALRM)
        return self.signal is not None

    def is_too_late(self, step_seconds: float, save_seconds: float) -> bool:
        """Returns whether the run must end and cannot finish its step first.

        Args:
            step_seconds: expected seconds for the rest of the step.
            save_seconds: expected seconds for saving.
        """
        if not self.is_requested or self.ends_at is None:
            return False
        return time.time() + SAFETY_FACTOR * (step_seconds + save_seconds) + 1.0 > self.ends_at

    def release(self) -> None:
        """Restores the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class Interrupts:
    """Compares the time left with the time that the step and its checkpoint still need.

    A run that must end (`StopSignal`) finishes its step if time allows. Otherwise every process
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
        except heartbeat.WorkInterrupted:
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
