"""One program of a completion: finds its source, runs it in the sandbox, returns its output.

execute(["x = 6", "print(x * 7)"], tools).text  # -> "42"
"""

from __future__ import annotations

import functools
import json
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_cli import sandbox
from grpo_cli.environments import program_runner
from grpo_cli.environments.functions import shortened
from grpo_cli.errors import UserError
from grpo_cli.generation.settings import Tools
from grpo_cli.rewards.code import PYTHON, fenced

OUTPUT_CHARACTERS = 1000  # that the model sees of a program's output


def describe(tools: Tools) -> str:
    """Tests the guards of the sandbox once; returns a log line that names them.

    Raises:
        UserError: fewer guards work here than `tools.guards` requires.
    """
    try:
        return sandbox.describe(tools.guards, site_packages=True)
    except sandbox.SandboxError as error:
        raise UserError(f"tools: {error}") from error


@dataclass(frozen=True)
class Answer:
    """Holds the result of a call."""

    text: str  # the output, followed by the error
    status: str = "ok"  # or "error", "timeout", "memory", "output", ...: see `sandbox.Finished`
    keeps: bool = True  # whether later calls run the block again; False if it was stopped


def execute(blocks: Sequence[str], tools: Tools) -> Answer:
    """Runs the blocks of a solution; returns the result of the last one.

    Raises:
        SandboxError: the sandbox itself failed, not the program.
    """
    token = os.urandom(16).hex()  # secret, so that a program cannot forge the runner's status
    given = json.dumps({"token": token, "blocks": list(blocks)})
    limits = sandbox.Limits(seconds=tools.seconds)
    finished = sandbox.run(_runner(), given, limits=limits, guards=tools.guards, site_packages=True)
    parts, status, keeps = finished.stdout.split(token), finished.status, False
    if len(parts) == 3:
        status, _, error = parts[1].partition("\n")
        keeps = status != "memory"
    elif status in ("ok", "error"):
        code, status = finished.returncode, "error"
        error = f"RuntimeError: the program ended Python itself (exit code {code})"
    else:
        said = {
            "timeout": f"TimeoutError: ran longer than {tools.seconds:g} s",
            "memory": f"MemoryError: used more than {limits.memory_mb} MiB",
            "disk": f"OSError: wrote more than {limits.file_mb} MiB, or too many files",
            "output": f"RuntimeError: printed more than {limits.output_kb} KiB",
        }
        error = said.get(status, f"RuntimeError: {finished.reason}")
    # The partial output of a program stopped for time or memory depends on the machine.
    output = parts[0].rstrip("\n") if status in ("ok", "error", "output") else ""
    shown = [shortened(part, OUTPUT_CHARACTERS) for part in (output, error) if part]
    return Answer("\n".join(shown), status, keeps)


@functools.cache
def _runner() -> str:
    return Path(program_runner.__file__).read_text(encoding="utf-8")


def closed_program(text: str, at_end: bool = False) -> str | None:
    """Returns the source of the first closed Python block in a text; None if there is none.

    The source lacks the common indentation of its lines.
    A line with only the fence closes a block. The last line counts only with its newline, since it
    may still grow.

    Args:
        at_end: whether the text is complete, so that the last line counts without a newline.
    """
    for mark, source, is_closed in fenced(text if at_end else text[: text.rfind("\n") + 1]):
        if is_closed and mark.lower() in PYTHON:
            first = next((line for line in source.split("\n") if line.strip()), "")
            return textwrap.dedent(source) if first[:1] in (" ", "\t") else source
    return None
