"""Describes a case of check.py, and the setting that all cases share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figures = dict[str, Any]  # a case's results by name; `status` if it is not "ok"


@dataclass(frozen=True)
class Setting:
    """Holds the place and the size at which the cases run."""

    dry: bool  # tiny shapes on the CPU
    out: Path

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"


@dataclass(frozen=True)
class Case:
    """Describes one row of the results."""

    stage: str
    name: str
    run: Callable[[], Figures]
