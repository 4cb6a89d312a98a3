"""A polite end: Ctrl-C and SIGTERM are remembered, and the loop leaves at a step's boundary."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from types import FrameType


class Stop:
    """Remembers that the user (Ctrl-C) or the system (SIGTERM) wants the run to end.

    The loop looks at step boundaries, saves and leaves; a second signal ends the run at once.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.signal: int | None = None
        self._previous = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGINT, signal.SIGTERM)
        }

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            self.release()
            raise KeyboardInterrupt
        self.signal = number
        with contextlib.suppress(RuntimeError):  # the signal may come while a line is being written
            self.say("stopping: this step is finished and saved first; once more to stop at once")

    def release(self) -> None:
        """Puts back the handlers that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
