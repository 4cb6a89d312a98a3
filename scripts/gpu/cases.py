"""Describes a case of check.py, and the setting that all cases share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

Figures = dict[str, Any]  # a case's results by name; `status` if it is not "ok"


@dataclass(frozen=True)
class Setting:
    """Holds the place and the size at which the cases run."""

    dry: bool  # tiny shapes on the CPU
    out: Path  # folder of the results
    scratch: Path  # folder of the runs, which is deleted at the end

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    def run_program(self, command: Sequence[str]) -> tuple[int, str]:
        """Runs a program; returns its exit code and what it has printed.

        The output goes into the log at once, so that it is there if the case is cut off.
        """
        log = self.out / "log"
        with log.open("ab") as file:
            start = file.tell()
            done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        return done.returncode, log.read_bytes()[start:].decode(errors="replace")


@dataclass(frozen=True)
class Case:
    """Describes one row of the results."""

    stage: str
    name: str
    run: Callable[[], Figures]
