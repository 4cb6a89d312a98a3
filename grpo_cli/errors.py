"""The kinds of failure that a user reads as one message and not as a traceback."""

import difflib
from collections.abc import Iterable


class _Told(Exception):  # noqa: N818 - its kinds are errors
    """An exception that ends a command with a message."""

    def __init__(self, message: str, *, alone: bool = False) -> None:
        """alone: raised by this process and by no other, so that none but it can tell."""
        super().__init__(message)
        self.alone = alone
        self.where: str | None = None  # process, step and stage, where others raise it too


class UserError(_Told):
    """A mistake in what was asked for. Raised before any model is loaded; exit code 2."""


class TrainingError(_Told):
    """An error that stops a running command, such as a gradient of NaN. Exit code 1."""


class CannotLearn(_Told):
    """A probe found that the run cannot learn as it stands. Exit code 3."""


class Stopped(Exception):  # noqa: N818 - not an error
    """The command was asked to stop by a signal, and did."""

    def __init__(self, signal: int, message: str, *, requeued: bool = False) -> None:
        """requeued: whether a batch system starts the command again."""
        super().__init__(message)
        self.signal, self.requeued = signal, requeued


NO_READER = "its output has no reader any more: the pipe was closed"


def lost_reader(error: BaseException) -> bool:
    """Whether nobody reads a command's output, as with `grpo ... | head`."""
    if isinstance(error, SystemExit):  # rich's, in place of a BrokenPipeError
        return isinstance(error.__context__, BrokenPipeError)
    return isinstance(error, BrokenPipeError)


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that offers the name meant, or "" when nothing known is near `name`."""
    close = difflib.get_close_matches(name, sorted(set(known)), n=2, cutoff=0.7)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def listed(names: Iterable[str]) -> str:
    """`a, b, c`, or `none`."""
    return ", ".join(sorted(map(str, names))) or "none"
