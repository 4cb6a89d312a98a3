"""Guards the run against user functions that fork it, end it or close its files.

It also describes their errors. Worker processes import this module, so it imports almost nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections.abc import Awaitable, Iterator
from typing import Any

_guarded = threading.local()  # .pid: process id, while this thread calls a user's function
_exit = os._exit


def _exit_if_allowed(status: int) -> None:
    if getattr(_guarded, "pid", None) == os.getpid():  # forked children may exit
        raise SystemExit(f"os._exit({status}), which would have ended the run")
    _exit(status)


@contextlib.contextmanager
def no_exit() -> Iterator[None]:
    """Makes os._exit, which would end the run silently, raise a SystemExit in this thread."""
    os._exit = _exit_if_allowed  # type: ignore[assignment]
    before, _guarded.pid = getattr(_guarded, "pid", None), os.getpid()
    try:
        yield
    finally:
        _guarded.pid = before


@contextlib.contextmanager
def no_second_run() -> Iterator[None]:
    """Ends a forked child of a user's function that would continue like its parent."""
    own = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != own:
            _exit(1)


@contextlib.contextmanager
def keeps_files_open(name: str) -> Iterator[None]:
    """Ends this process with a message if a reward function closes its file descriptors.

    It checks the outputs, and a descriptor of its own as a sample of the others. Without them the
    process cannot shut down cleanly.
    """
    outputs = [fd for fd in (1, 2) if _is_open(fd)]
    own = os.open(os.devnull, os.O_RDONLY)
    try:
        yield
    finally:
        if not all(map(_is_open, (*outputs, own))):
            text = (
                f"grpo: reward {name!r} has closed file descriptors of the run; a function may "
                "close only those that it has opened. The run ends; resume=auto continues it.\n"
            )
            with contextlib.suppress(OSError):
                os.write(2, text.encode())
            _exit(1)
        os.close(own)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


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
