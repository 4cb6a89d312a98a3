"""What an evaluation has done so far, on disk: what was killed goes on where it was.

One file a process, `partial/rank-N.jsonl` in the evaluation's folder. Its first line says what the
completions depend on; each other line holds one problem's completions, or what those of some are
worth. A line that was cut off by the end of its writer counts for nothing.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from grpo_cli.distributed import Workers
from grpo_cli.errors import TrainingError
from grpo_cli.rollouts import Completion, Group, Prompt, Rollout

FOLDER = "partial"
SCORES = ("reward_parts", "step_rewards", "reward", "outcome", "extras")


class Journal:
    """The completions and scores of an evaluation, as they come."""

    def __init__(self, folder: Path, rank: int, key: str) -> None:
        """Reads what earlier sittings have left. Nothing is written before `begin`.

        Args:
            folder: the evaluation's. key: says what its completions depend on; what was written
                under another one is not read.
        """
        self.folder, self.rank, self.key = folder / FOLDER, rank, key
        self.completions: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self.scores: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self.measured: dict[str, list[dict[str, Any]]] = {}  # by task, what its sheets have counted
        self.file: TextIO | None = None
        for path in sorted(self.folder.glob("rank-*.jsonl")):
            for line in _lines(path, key):
                task = line["task"]
                if "completions" in line:
                    self.completions[task, line["row"]] = line["completions"]
                else:
                    self.measured.setdefault(task, []).append(line["measured"])
                    self.scores |= {(task, row): entries for row, entries in line["scores"]}

    def agree(self, workers: Workers) -> None:
        """Every process takes what the main one has found, so that all divide the same problems."""
        mine = (self.completions, self.scores, self.measured) if workers.is_main else None
        found = workers.first(mine)
        assert found is not None, "the main process has read it"
        self.completions, self.scores, self.measured = found

    @property
    def found(self) -> int:
        """Problems whose completions were there already."""
        return len(self.completions)

    def begin(self) -> None:
        """Opens this process's file, once every process has read the files of all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank-{self.rank}.jsonl"
        own = list(_lines(path, self.key)) if path.exists() else []
        # Anew, for its last line may be half of one, or all of it another evaluation's.
        partial = path.with_suffix(".tmp")
        self.file = partial.open("w", encoding="utf-8")
        self._write({"key": self.key})
        for line in own:
            self._write(line)
        partial.replace(path)  # and is written on

    def group(self, task: str, prompt: Prompt) -> Group | None:
        """The completions of a problem, with their scores where these were there already."""
        known = self.completions.get((task, prompt.row))
        if known is None:
            return None
        rollouts = []
        for entry in known:
            values = dict(entry)
            text = values.pop("text")
            rollouts.append(Rollout(prompt, Completion(**values), text))
        scores = self.scores.get((task, prompt.row))
        if scores is not None:
            for rollout, values in zip(rollouts, scores, strict=True):
                for name, value in values.items():
                    setattr(rollout, name, math.nan if value is None else value)
        return Group(prompt.row, prompt, rollouts)

    def is_scored(self, task: str, group: Group) -> bool:
        """Whether `group` came with its scores."""
        return (task, group.prompt.row) in self.scores

    def completed(self, task: str, rollouts: Sequence[Rollout]) -> None:
        """Keeps a problem's completions."""
        entries = [{**_fields(r.completion), "text": r.text} for r in rollouts]
        self._write({"task": task, "row": rollouts[0].prompt.row, "completions": entries})

    def scored(self, task: str, groups: Sequence[Group], measured: dict[str, Any]) -> None:
        """Keeps what some problems' completions are worth, in one line: all of it or nothing.

        Args:
            measured: what was counted and logged while they were scored.
        """
        scores = []
        for group in groups:
            entries = [{name: getattr(r, name) for name in SCORES} for r in group.rollouts]
            for entry in entries:
                for name in ("reward", "outcome"):  # JSON has no NaN
                    entry[name] = None if math.isnan(entry[name]) else entry[name]
            scores.append([group.prompt.row, entries])
        self._write({"task": task, "scores": scores, "measured": measured})

    def _write(self, line: dict[str, Any]) -> None:
        assert self.file is not None, "begun"
        try:
            self.file.write(json.dumps(line, default=str) + "\n")
            self.file.flush()
        except OSError as error:
            raise TrainingError(f"{self.folder}: cannot be written: {error.strerror}.") from error

    def close(self) -> None:
        """Leaves the files where they are, for the next sitting."""
        if self.file is not None:
            self.file.close()
            self.file = None


def _fields(completion: Completion) -> dict[str, Any]:
    """A completion's fields, without those that have their default."""
    return {
        f.name: value
        for f in dataclasses.fields(completion)
        if (value := getattr(completion, f.name)) != f.default
    }


def _lines(path: Path, key: str) -> Iterator[dict[str, Any]]:
    """Whole lines of a file that was written under `key`, without its first."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file):
            try:
                line = json.loads(text)
            except json.JSONDecodeError:  # the writer ended here
                return
            if number == 0:
                if line.get("key") != key:
                    return
            else:
                yield line
