"""One torchrun at a time, also where pytest runs tests in several processes."""

from __future__ import annotations

import contextlib
import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Holds off others. Two launches at once have been seen to hang, where one by one do not."""
    with (Path(tempfile.gettempdir()) / "grpo-tests-torchrun.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
