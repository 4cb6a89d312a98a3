"""Reads the last lines of the log of a `grpo serve` server.

It imports neither torch nor vLLM: a trainer that lacks vLLM reads the log here when a server fails.
"""

from __future__ import annotations

import os
import socket
import textwrap
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from grpo_cli.config.cache import cache_dir

TAIL = 40  # lines of a log that a failed start shows: vLLM reports a cause before its wrappers


def log_path(port: int) -> Path:
    """Returns the path of the log for a port; it has the host's name, as folders may be shared."""
    return cache_dir() / "serve" / f"{socket.gethostname()}-{port}.log"


def tail_of(url: str, lines: int = 8) -> str | None:
    """Returns the last log lines of a server that `grpo serve` started on this machine, else None.

    Args:
        url: the server's address, such as http://127.0.0.1:8000.
    """
    parts, own = urlsplit(url), socket.gethostname().lower()
    here = ("127.0.0.1", "localhost", "0.0.0.0", "::1", "::", own, own.partition(".")[0])
    if (parts.hostname or "").lower() not in here:
        return None
    log = log_path(parts.port or 80)
    return last_lines(text_of(log), lines) if log.is_file() else None


def text_of(log: Path) -> str:
    """Returns the last 64 KiB of a log; "" if it cannot be read."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2**16))
        return file.read().decode("utf-8", "replace")
    return ""


def last_lines(text: str, lines: int) -> str:
    """Returns the last non-empty lines of a string."""
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])


def failure(what: str, log: Path) -> str:
    """Returns an error message: `what`, and the log's last lines."""
    tail = textwrap.indent(last_lines(text_of(log), TAIL), "  ")
    return f"{what}\nThe last lines of {log}:\n{tail}"
