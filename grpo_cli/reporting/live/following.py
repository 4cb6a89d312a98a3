"""Follows the files of a run that another process writes. Imports nothing heavy.

Each `poll` reads the files that have changed since the last one. While it is followed, a run may
be resumed (metrics.jsonl is then cut back) or restarted with overwrite=true.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_cli.checkpoints.paths import steps_saved
from grpo_cli.data.sample import Sample
from grpo_cli.data.stored_completions import read_texts, sample_of
from grpo_cli.errors import UserError
from grpo_cli.files import open_file, reading
from grpo_cli.reporting.run_folder import ALARMS, METRICS, RunFolder


@dataclass
class Followed:
    """The known state of a run. `poll` brings it up to date."""

    folder: RunFolder
    metrics: list[dict[str, Any]] = field(default_factory=list)  # lines of metrics.jsonl
    alarms: list[dict[str, Any]] = field(default_factory=list)
    status: dict[str, Any] | None = None
    summary: dict[str, Any] | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    checkpoints: list[int] = field(default_factory=list)  # their steps
    samples: list[Sample] = field(default_factory=list)  # `best_and_worst` of the newest step
    age: float | None = None  # seconds since the status was written

    def __post_init__(self) -> None:
        self._stamps: dict[str, tuple[int, ...] | None] = {}

    @property
    def newest(self) -> dict[str, Any]:
        """The last line of metrics.jsonl; {} before the first step is done."""
        return self.metrics[-1] if self.metrics else {}

    @property
    def step(self) -> int:
        """The number of complete steps."""
        return int(self.newest.get("step", 0))

    @property
    def steps(self) -> int | None:
        """The number of steps of the run."""
        steps = (self.status or {}).get("steps") or self.recipe.get("steps")
        return steps if isinstance(steps, int) and steps > 0 else None

    @property
    def before(self) -> dict[str, Any]:
        """The evaluation before the first step; {} without one."""
        return (self.status or {}).get("before") or (self.summary or {}).get("before") or {}

    def values(self, name: str) -> list[float]:
        """Returns the values of a metric, at the steps that have it."""
        values = (line.get(name) for line in self.metrics)
        return [value for value in values if isinstance(value, (int, float))]

    def poll(self) -> None:
        """Reads the files that have changed, and the status."""
        try:
            if self._has_changed(METRICS):
                self.metrics = self.folder.metrics()
            if self._has_changed(ALARMS):
                self.alarms = self.folder.alarms()
            if self._has_changed("recipe.yaml"):
                self.folder = RunFolder(self.folder.path)  # it reads its recipe only once
                with contextlib.suppress(UserError):  # not written yet
                    self.recipe = self.folder.recipe
            if self._has_changed("summary.json"):
                self.summary = self.folder.summary()
            if self._has_changed("checkpoints"):
                self.checkpoints = steps_saved(self.folder.path)
            if self._has_changed("completions"):
                self.samples = []
                if stored := [step for step in self.folder.steps_with_completions() if step >= 0]:
                    with contextlib.suppress(ValueError, UserError):
                        self.samples = best_and_worst(self.folder.completions(stored[-1]))
        except (OSError, UserError):  # replaced meanwhile on a network disk, or damaged
            self._stamps.clear()
        with contextlib.suppress(OSError, UserError):
            self.status = self.folder.status()
        written = (self.status or {}).get("time")
        self.age = None if written is None else max(0.0, time.time() - written)

    def _has_changed(self, name: str) -> bool:
        """Returns whether a file or folder has changed since the last poll."""
        try:
            found = (self.folder.path / name).stat()
        except OSError:
            stamp = None
        else:
            stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
        has_changed = self._stamps.get(name, ()) != stamp
        self._stamps[name] = stamp
        return has_changed


def best_and_worst(path: Path) -> list[Sample]:
    """Returns the completions of a step with the highest and the lowest reward.

    Returns one completion if all rewards are equal, or if no completion has a reward.

    Raises:
        ValueError, UserError: the file is gone, or holds no completions.
    """
    import pyarrow.parquet

    with reading(path), open_file(path) as opened, pyarrow.parquet.ParquetFile(opened) as file:
        table = read_texts(file)
    rewards = [-math.inf if r is None else r for r in table["reward"].to_pylist()]
    known = [i for i, reward in enumerate(rewards) if math.isfinite(reward)] or [0]
    best, worst = max(known, key=rewards.__getitem__), min(known, key=rewards.__getitem__)
    cells = {i: table.slice(i, 1).to_pylist()[0] for i in (best, worst)}
    return [sample_of(one, i, f"{path}, row {i}") for i, one in cells.items()]
