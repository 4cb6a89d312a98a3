"""Defines the setting that all cases of check.py share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

Figures = dict[str, Any]  # a case's results by name; `status` if it is not "ok"
Cases = dict[str, Callable[[], Figures]]  # the cases of a stage by name, in order


@dataclass(frozen=True)
class Setting:
    """Holds the place and the size at which the cases run."""

    dry: bool  # tiny shapes on the CPU
    out: Path  # folder of the results
    scratch: Path  # folder of the runs, which is deleted at the end

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    def run_program(self, command: Sequence[str]) -> str:
        """Runs a program; returns its output.

        The output goes into the log at once, so that it is there if the case is cut off.

        Raises:
            RuntimeError: it fails.
        """
        log = self.out / "log"
        with log.open("ab") as file:
            start = file.tell()
            done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        printed = log.read_bytes()[start:].decode(errors="replace")
        if done.returncode:
            last = printed.strip().splitlines()[-1:] or [""]
            raise RuntimeError(f"{command[1:4]} ended with {done.returncode}: {last[0]}")
        return printed
