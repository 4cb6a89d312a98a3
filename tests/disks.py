"""A disk that is soon full, for tests of what is written to it."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own in a new folder. The test is skipped where nobody may mount one.

    Args:
        size: as mount takes it, such as 200k or 2m.
    """
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
