"""Calls users' functions, and guards the run against those that fork it, end it or close its files.

It also describes their errors. Worker processes import this module, so it imports almost nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_cli.errors import SignalReceived
from grpo_cli.images import StoredImage

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


@dataclass(frozen=True)
class CallResult:
    """The result of a call. Failures are not raised: `error` describes them."""

    values: Any = None  # return value of the function
    metrics: Sequence[tuple[str, float]] = ()  # calls of log_metric
    extras: Sequence[tuple[str, list[Any]]] = ()  # calls of log_extra
    seconds: float = 0.0
    error: str | None = None
    timed_out: bool = False


def answer(function: Callable[..., Any], arguments: dict[str, Any]) -> CallResult:
    """Calls a function with keyword arguments; exceptions become `CallResult.error`."""
    metrics, extras = recorders(arguments)
    start = time.perf_counter()
    try:
        with no_second_run():
            values, error = with_opened(function, arguments), None
    except (KeyboardInterrupt, SignalReceived):
        raise
    except BaseException as raised:  # user functions may raise anything
        values, error = None, blame(raised)
    return CallResult(values, metrics, extras, time.perf_counter() - start, error)


def with_opened(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Calls a function with its images opened; they are sent encoded, for it alone to decode."""
    return function(**opened(arguments))


def opened(value: Any) -> Any:
    """Returns a value with its stored images opened as PIL images, also inside lists and dicts."""
    if isinstance(value, StoredImage):
        return value.open()
    if not _holds_images(value):
        return value
    if isinstance(value, dict):
        return {key: opened(of_key) for key, of_key in value.items()}
    return [opened(one) for one in value]


def _holds_images(value: Any) -> bool:
    if isinstance(value, dict):
        value = [*value.values()]
    return isinstance(value, list) and any(
        isinstance(one, StoredImage) or _holds_images(one) for one in value
    )


def recorders(
    arguments: dict[str, Any],
) -> tuple[list[tuple[str, float]], list[tuple[str, list[Any]]]]:
    """Sets the arguments log_metric and log_extra; returns the lists that they append to."""
    metrics: list[tuple[str, float]] = []
    extras: list[tuple[str, list[Any]]] = []
    if "log_metric" in arguments:
        arguments["log_metric"] = lambda name, value: metrics.append((str(name), float(value)))
    if "log_extra" in arguments:
        arguments["log_extra"] = lambda column, values: extras.append(
            (str(column), [to_builtin(value) for value in values])
        )
    return metrics, extras


def to_builtin(value: Any) -> Any:
    """Converts a value to JSON types: tensors, arrays and sets to lists, other objects to str.

    Objects are not stored or sent, since they may hold GPU memory or fail to pickle.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=str)
    if isinstance(value, (list, tuple)):
        return [to_builtin(inner) for inner in value]
    if isinstance(value, Mapping):
        return {str(key): to_builtin(inner) for key, inner in value.items()}
    if value is None or type(value) in (bool, int, float, str):
        return value
    return str(value)
