"""Reads the log of a `grpo serve` server: its last lines, and the reason of a failure.

Importing this file is cheap, since the trainer also uses it when a server fails.
"""

from __future__ import annotations

import os
import re
import socket
import textwrap
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from grpo_cli.config.cache import cache_dir

KILLED = "killed by "  # `launch.keep` logs it before the name of the signal
# The prefix of each line of a traceback in vLLM's processes.
PREFIX = re.compile(r"^(\([\w ]+ pid=\d+\) ?)?((ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^\]]*\] ?)?")
# A line with the reason why a process ended: an exception, argparse's message, or `KILLED`.
REASON = re.compile(rf"^([\w.]*(Error|Exception)(: .*)?$|\S+: error: |{KILLED})")
# Exceptions that only report another exception.
WRAPPERS = re.compile(
    r"root cause|Engine ?[Cc]ore (initialization failed|encountered|process)|EngineDeadError|"
    r"WorkerProc initialization failed|CancelledError|BrokenPipeError|ConnectionResetError"
)


def log_path(port: int) -> Path:
    """Returns the path of the log for a port; it has the host's name, as folders may be shared."""
    return cache_dir() / "serve" / f"{socket.gethostname()}-{port}.log"


def tail_of(url: str, lines: int = 8) -> str | None:
    """Returns the last log lines of a server that `grpo serve` started on this machine, else None.

    Args:
        url: the server's address, such as http://127.0.0.1:8000.
    """
    parts = urlsplit(url)
    if not _is_this_machine(parts.hostname or ""):
        return None
    log = log_path(parts.port or 80)
    return last_lines(text_of(log), lines) if log.is_file() else None


def _is_this_machine(host: str) -> bool:
    own = socket.gethostname().lower()
    return host.lower() in {
        "127.0.0.1", "localhost", "0.0.0.0", "::1", "::", own, own.partition(".")[0]
    }  # fmt: skip


def text_of(log: Path) -> str:
    """Returns the end of a log, long enough for every traceback of a failed start."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2**20))
        return file.read().decode("utf-8", "replace")
    return ""


def last_lines(text: str, lines: int) -> str:
    """Returns the last non-empty lines of a string."""
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])


def failure(what: str, log: Path) -> str:
    """Returns an error message: `what`, the reason found in the log, and the log's last lines."""
    text = text_of(log)
    tail = textwrap.indent(last_lines(text, 8), "  ")
    reason = reason_in(text)
    return f"{what}{f': {reason}' if reason else ''}\nThe last lines of {log}:\n{tail}"


def reason_in(text: str) -> str:
    """Returns the last exception in a log, preferably not a wrapper; "" if there is none.

    vLLM's messages about memory name its own flags, so the settings of `grpo serve` are added.
    """
    lines = [PREFIX.sub("", line, count=1) for line in text.splitlines()]
    found = [number for number, line in enumerate(lines) if REASON.match(line)]
    causes = [number for number in found if not WRAPPERS.search(lines[number])]
    if not found:
        return ""
    first = (causes or found)[-1]
    end = first + (3 if "validation error" in lines[first] else 1)  # pydantic's reason follows
    reason = " ".join(line.strip() for line in lines[first:end]).partition(" [type=")[0]
    if re.search(r"KV cache|cache blocks|kv cache|on device|out of memory", reason):
        reason += " (grpo serve: memory, kv_cache_gb, max_model_len, tensor_parallel)"
    return reason
