"""When a run has to end before its last step, and whether it can finish the step it is in.

Ctrl-C (SIGINT) leaves it all the time it needs. SIGTERM and SIGUSR1, as SLURM sends them before a
time limit or a preemption, leave it `checkpoint.grace` seconds, and a job whose end is known
($GRPO_END_TIME, $SLURM_JOB_END_TIME) acts as if it were told so many seconds before that.

Under torchrun a Ctrl-C leaves `checkpoint.grace` seconds too: torchrun passes it on, and kills its
processes when its --shutdown-timeout is over.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable
from types import FrameType

from grpo_cli.errors import UserError

HASTE = 1.5  # a step, and saving, are taken to last so much longer than the last ones did
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
TORCHRUN_SECONDS = 30.0  # torchrun's --shutdown-timeout, unless it is given


class Interrupted(Exception):  # noqa: N818 - no error either
    """All processes have broken off the step they are in."""


class StoppedWhileStarting(BaseException):
    """A run was told to end before its first step."""

    def __init__(self, number: int) -> None:
        super().__init__("stopped before the first step; there is nothing new to save")
        self.signal = number


def end_of_job() -> float | None:
    """Unix time at which the batch system ends the job, where it says so."""
    for name in ("GRPO_END_TIME", "SLURM_JOB_END_TIME"):
        given = os.environ.get(name, "")
        if given.isdecimal():
            return float(given)
    return None


def is_under_torchrun() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_started_again() -> bool:
    """Whether torchrun starts all processes again if one ends with another exit code than 0."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0


def is_passed_on(number: int) -> bool:
    """Whether torchrun passes this signal on, and kills its processes a little later."""
    handled = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "").split(",")
    return is_under_torchrun() and signal.Signals(number).name in handled


def given_grace(usual: float) -> float:
    """Seconds between a signal and the end: $GRPO_GRACE, or the recipe's."""
    given = os.environ.get("GRPO_GRACE")
    if not given:
        return usual
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise UserError(f"GRPO_GRACE = {given}: has to be a number of seconds, 0 or more.")
    return seconds


class Stop:
    """What this process knows of the run's end. Ctrl-C, once it is told, ends it at once."""

    def __init__(
        self,
        say: Callable[[str], None],
        grace: float = 30.0,
        end: float | None = None,
        tell: Callable[[int], None] = lambda number: None,
        told: Callable[[], int | None] = lambda: None,
        is_aftermath: Callable[[], bool] = lambda: False,
    ) -> None:
        """Listens from now on; until `started` a signal raises StoppedWhileStarting.

        Args:
            grace: seconds between a signal and the end. end: unix time of the job's, if known.
            tell: makes a signal known to the other processes; called from a signal's handler.
            told: the signal that one of them got, if any.
            is_aftermath: whether a SIGTERM is only torchrun's, after another process has failed.

        Raises:
            UserError: $GRPO_GRACE is no number of seconds.
        """
        self.say, self.end, self.tell, self.told = say, end, tell, told
        self.is_aftermath = is_aftermath
        self.grace = given_grace(grace)
        self.signal: int | None = None  # what told it to end; SIGALRM: the job's time is up
        self.ends_at: float | None = None  # unix time by which it has to be gone
        self.started = False
        self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and self.is_aftermath():
            return
        if not self.started:
            self.release()
            self.tell(number)
            raise StoppedWhileStarting(number)
        if self.signal is not None and number == signal.SIGINT:
            self.release()
            raise KeyboardInterrupt
        if self.signal is None:
            self.hear(number)
            self.tell(number)
        elif self.signal == signal.SIGINT:  # what gave it time comes to an end after all
            self._set_end()

    def hear(self, number: int) -> None:
        """Remembers what this process, or another, was told; the first of all signals counts."""
        if self.signal is not None:
            return
        self.signal, self.ends_at = number, self.end
        if number != signal.SIGINT or is_under_torchrun():
            self._set_end()
        with contextlib.suppress(RuntimeError):  # the signal may come while a line is being written
            self.say(f"stopping: {self._what_next(number)}")

    def _set_end(self) -> None:
        """The run has to be gone in `grace` seconds, if it has not before."""
        ends = (time.time() + self.grace, self.end, self.ends_at)
        self.ends_at = min(end for end in ends if end is not None)

    def _what_next(self, number: int) -> str:
        if number == signal.SIGINT and not is_under_torchrun():
            return "this step is finished and saved first; once more to stop at once"
        text = (
            f"this step is finished and saved if that takes less than {self.grace:g} s, and else "
            "saved as far as it is"
        )
        if is_passed_on(number) and self.grace > TORCHRUN_SECONDS:
            text += (
                f"; torchrun kills it {TORCHRUN_SECONDS:g} s after the signal, or as "
                "--shutdown-timeout of torchrun says"
            )
        return text

    @property
    def is_told(self) -> bool:
        """Whether the run is to end at the next step's boundary."""
        if self.signal is None:
            elsewhere = self.told()
            if elsewhere is not None:
                self.hear(elsewhere)
            elif self.end is not None and time.time() > self.end - self.grace:
                self.hear(signal.SIGALRM)
        return self.signal is not None

    def is_too_late(self, step_seconds: float, save_seconds: float) -> bool:
        """Whether the run is to end and cannot finish its step first.

        Args:
            step_seconds: that the rest of the step takes. save_seconds: that saving takes.
        """
        if not self.is_told or self.ends_at is None:
            return False
        return time.time() + HASTE * (step_seconds + save_seconds) + 1.0 > self.ends_at

    def release(self) -> None:
        """Puts back the handlers that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
