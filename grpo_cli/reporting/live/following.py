"""Follows the files of a run that another process writes. Imports nothing heavy.

Each `poll` reads the lines added since the last one. While it is followed, a run may be resumed
(metrics.jsonl is then cut back) or restarted with overwrite=true.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_cli.checkpoints.paths import steps_saved
from grpo_cli.data.stored_completions import Sample
from grpo_cli.errors import UserError
from grpo_cli.reporting.live.completions import best_and_worst
from grpo_cli.reporting.metric_names import measure_of
from grpo_cli.reporting.run_folder import ALARMS, METRICS, RunFolder

HEAD = 512  # bytes at the start of a file, by which a new file of the same name is noticed
EVALUATION = "evaluation"  # the series of the evaluations' measure: accuracy, or reward
SERIES = ("reward", "completions/mean_length", "entropy", "kl", "grad_norm", "step_time")


class LinesFollower:
    """Reads the complete lines that are added to a JSON lines file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode, self._offset, self._head = 0, 0, b""

    def poll(self) -> tuple[bool, list[dict[str, Any]]]:
        """Returns (whether the file was replaced or cut back, its new lines).

        If it was, all of its lines are new.
        """
        try:
            with self.path.open("rb") as file:
                return self._read(file)
        except OSError:  # not there yet, or removed
            was_there, self._offset = self._offset > 0, 0
            return was_there, []

    def _read(self, file: Any) -> tuple[bool, list[dict[str, Any]]]:
        found = os.fstat(file.fileno())
        is_new = found.st_ino != self._inode or found.st_size < self._offset
        if not is_new and found.st_size == self._offset:
            return False, []
        head = file.read(HEAD)
        is_new = is_new or not head.startswith(self._head)
        had_lines = self._offset > 0
        if is_new:
            self._inode, self._offset = found.st_ino, 0
        file.seek(self._offset)
        added, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(added) + len(newline)
        self._head = head[: min(HEAD, self._offset)]
        return is_new and had_lines, list(_objects(added))


def _objects(text: bytes) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        with contextlib.suppress(ValueError):  # a disk that was full has left half a line
            found = json.loads(line)
            if isinstance(found, dict):
                yield found


@dataclass
class Series:
    """The values of one metric, at the steps that have it."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass
class Followed:
    """The known figures of a run. `poll` brings them up to date."""

    folder: RunFolder
    series: dict[str, Series] = field(default_factory=dict)
    newest: dict[str, Any] = field(default_factory=dict)  # the last line of metrics.jsonl
    evaluation: dict[str, Any] = field(default_factory=dict)  # the last line with an evaluation
    alarms: list[dict[str, Any]] = field(default_factory=list)
    status: dict[str, Any] | None = None
    summary: dict[str, Any] | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    checkpoints: list[int] = field(default_factory=list)  # their steps
    samples: list[Sample] = field(default_factory=list)  # `best_and_worst` of the newest step
    holds_lock: bool | None = None  # `RunFolder.is_running`
    age: float | None = None  # seconds since the status was written

    def __post_init__(self) -> None:
        self._metrics = LinesFollower(self.folder.path / METRICS)
        self._alarms = LinesFollower(self.folder.path / ALARMS)
        self._stamps: dict[str, tuple[int, ...] | None] = {}
        self._seen: tuple[float, float] | None = None  # time in the status, and when it changed
        self._clear()

    @property
    def step(self) -> int:
        """The number of complete steps."""
        return int(self.newest.get("step", 0))

    @property
    def steps(self) -> int | None:
        """The number of steps of the run."""
        steps = (self.status or {}).get("steps") or self.recipe.get("steps")
        return steps if isinstance(steps, int) and steps > 0 else None

    def poll(self, now: float | None = None) -> None:
        """Reads the files that have changed.

        Args:
            now: a monotonic time in seconds.
        """
        is_new, lines = self._metrics.poll()
        if is_new:
            self._clear()
        for line in lines:
            self._add(line)
        is_new, lines = self._alarms.poll()
        self.alarms = lines if is_new else self.alarms + lines
        if self._has_changed("recipe.yaml"):
            self.folder = RunFolder(self.folder.path)  # it reads its recipe only once
            with contextlib.suppress(UserError):  # not written yet
                self.recipe = self.folder.recipe
        if self._has_changed("summary.json"):
            with contextlib.suppress(OSError, UserError):
                self.summary = self.folder.summary()
        if self._has_changed("checkpoints"):
            self.checkpoints = steps_saved(self.folder.path)
        if self._has_changed("completions"):
            self._read_completions()
        self.holds_lock = self.folder.is_running
        self._read_status(time.monotonic() if now is None else now)

    def _read_completions(self) -> None:
        self.samples = []
        if stored := [step for step in self.folder.steps_with_completions() if step >= 0]:
            with contextlib.suppress(OSError, ValueError, UserError):
                self.samples = best_and_worst(self.folder.completions(stored[-1]))

    def _read_status(self, now: float) -> None:
        """Reads the status and its age.

        Once it has been seen to change, its age is counted by this machine's clock, since clocks of
        two nodes may differ.
        """
        with contextlib.suppress(OSError, UserError):
            self.status = self.folder.status()
        written = (self.status or {}).get("time")
        if written is None:
            self.age = self._seen = None
            return
        if self._seen is None:
            self._seen = (written, now - max(0.0, time.time() - written))
        elif self._seen[0] != written:
            self._seen = (written, now)
        self.age = now - self._seen[1]

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

    def _clear(self) -> None:
        self.series = {name: Series() for name in (*SERIES, EVALUATION)}
        self.newest, self.evaluation = {}, {}

    def _add(self, line: dict[str, Any]) -> None:
        step = line.get("step")
        if not isinstance(step, int):
            return
        if step <= self.step:  # the run was resumed before this step
            self._forget(step)
        self.newest = line
        found = {name: line.get(name) for name in SERIES}
        if "eval/accuracy" in line:
            self.evaluation = line
            found[EVALUATION] = line.get(f"eval/{measure_of(line)}")
        for name, value in found.items():
            if isinstance(value, (int, float)):
                self.series[name].steps.append(step)
                self.series[name].values.append(value)

    def _forget(self, step: int) -> None:
        """Removes the values of a step and of the steps after it."""
        for series in self.series.values():
            while series.steps and series.steps[-1] >= step:
                series.steps.pop()
                series.values.pop()
