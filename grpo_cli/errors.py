"""Exceptions that the command prints as one message, without a traceback."""

import difflib
from collections.abc import Iterable, Sequence


class _Told(Exception):  # noqa: N818 - its subclasses are errors
    """An exception that ends a command with a message."""

    def __init__(self, message: str, *, alone: bool = False) -> None:
        """alone: only this process raises it, so this process must print it."""
        super().__init__(message)
        self.alone = alone
        self.where: str | None = None  # process, step and stage, if other processes raise it too


class UserError(_Told):
    """A mistake in the recipe or on the command line, found before a model loads. Exit code 2."""


class TrainingError(_Told):
    """An error that stops a running command, such as a gradient of NaN. Exit code 1."""


class CannotLearn(_Told):
    """A probe found that the run cannot learn as it stands. Exit code 3."""


class SignalReceived(BaseException):
    """Raised by a signal handler in the main thread; passes through calls of user functions."""


class Stopped(Exception):  # noqa: N818 - not an error
    """A signal has stopped the command."""

    def __init__(self, signal: int, message: str, *, requeued: bool = False) -> None:
        """requeued: whether a batch system starts the command again."""
        super().__init__(message)
        self.signal, self.requeued = signal, requeued


NO_READER = "its output has no reader any more: the pipe was closed"


def lost_reader(error: BaseException) -> bool:
    """Returns whether the reader of the output has exited, as with `grpo ... | head`."""
    cause = error.__context__ if isinstance(error, SystemExit) else error  # SystemExit: by rich
    return isinstance(cause, BrokenPipeError)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type if it has none."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if lines[0].endswith(":") and len(lines) > 1:  # Hydra's; line 2 has the reason
        lines[0] += f" {lines[1].strip()}"
    return lines[0].strip().rstrip(".")


def typed_line(error: BaseException) -> str:
    """Returns an error's type and the first line of its message."""
    name = type(error).__name__
    return f"{name}: {first_line(error)}" if str(error).strip() else name


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a sentence that suggests the known names closest to `name`; "" if none is close."""
    close = difflib.get_close_matches(name, sorted(set(known)), n=2, cutoff=0.7)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def counted(number: int, word: str) -> str:
    """Returns `1 step` or `2 steps`."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def first_three(mistakes: Sequence[str]) -> str:
    """Joins the first three mistakes, and counts the others."""
    rest = f"; and {len(mistakes) - 3:,} more" if len(mistakes) > 3 else ""
    return "; ".join(mistakes[:3]) + rest


def listed(names: Iterable[str]) -> str:
    """Returns the sorted names as `a, b, c`, or `none`."""
    return ", ".join(sorted(map(str, names))) or "none"
