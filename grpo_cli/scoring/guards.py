"""Guards the run against user functions that fork it, and describes their errors.

Worker processes import this module, so it imports almost nothing.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Awaitable, Iterator
from typing import Any


@contextlib.contextmanager
def no_second_run() -> Iterator[None]:
    """Ends a forked child of a user's function that would continue like its parent."""
    own = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != own:
            os._exit(1)


async def contained(awaitable: Awaitable[Any]) -> Any:
    """Awaits; converts a SystemExit, which would end the event loop, into a RuntimeError."""
    try:
        with no_second_run():
            return await awaitable
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        raise RuntimeError(described(error)) from error


def described(error: BaseException) -> str:
    """Formats an error as `ValueError: message`."""
    try:
        message = str(error)
    except Exception:  # its own __str__ raised
        message = "it cannot say what"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def blame(error: BaseException) -> str:
    """Formats an error with its location, as `ValueError: message at file.py:12`."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return described(error) + place
