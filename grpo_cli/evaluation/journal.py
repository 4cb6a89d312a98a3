"""Stores the completions and scores of an evaluation as they arrive, so that it can be resumed.

Each process has a file, `partial/rank-N.jsonl` in the evaluation's folder. The first line is a key
that identifies all inputs of the completions. Each other line holds the completions of one problem
or the scores of several. A truncated last line is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import TrainingError
from grpo_cli.records import Group, Prompt, Rollout, from_state, to_state

FOLDER = "partial"
SCORES = ("reward_parts", "step_rewards", "reward", "outcome_reward", "extras")


class Journal:
    """The stored completions and scores of an evaluation."""

    def __init__(self, folder: Path, rank: int, key: str) -> None:
        """Reads the entries stored before a restart. Nothing is written before `begin`.

        Args:
            folder: the evaluation's folder.
            key: identifies all inputs of the completions; files with another key are not read.
        """
        self.folder, self.rank, self.key = folder / FOLDER, rank, key
        self.completions: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self.scores: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self.measured: dict[str, list[dict[str, Any]]] = {}  # counts and metrics by task
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
        """Copies the main process's journal to all processes, which divide the same problems."""
        mine = (self.completions, self.scores, self.measured) if workers.is_main else None
        found = workers.first(mine)
        assert found is not None, "the main process has read it"
        self.completions, self.scores, self.measured = found

    @property
    def found(self) -> int:
        """Number of problems whose completions are already stored."""
        return len(self.completions)

    def begin(self) -> None:
        """Opens this process's file; call it only after every process has read all files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank-{self.rank}.jsonl"
        own = list(_lines(path, self.key)) if path.exists() else []
        # Rewritten, since it may end with half a line, or belong to another evaluation.
        partial = path.with_suffix(".tmp")
        self.file = partial.open("w", encoding="utf-8")
        self._write({"key": self.key})
        for line in own:
            self._write(line)
        partial.replace(path)  # `partial` stays open for writing

    def group(self, task: str, prompt: Prompt) -> Group | None:
        """Returns the stored completions of a problem, with scores if stored; None without any."""
        known = self.completions.get((task, prompt.row))
        if known is None:
            return None
        scores = self.scores.get((task, prompt.row), [{}] * len(known))
        rollouts = [
            from_state(prompt, {**entry, **values})
            for entry, values in zip(known, scores, strict=True)
        ]
        return Group(prompt.row, prompt, rollouts)

    def is_scored(self, task: str, group: Group) -> bool:
        """Returns whether the scores of `group` are stored."""
        return (task, group.prompt.row) in self.scores

    def completed(self, task: str, rollouts: Sequence[Rollout]) -> None:
        """Stores the completions of a problem."""
        entries = [to_state(r) for r in rollouts]
        self._write({"task": task, "row": rollouts[0].prompt.row, "completions": entries})

    def scored(self, task: str, groups: Sequence[Group], measured: dict[str, Any]) -> None:
        """Stores the scores of several problems in one line, so that none is stored alone.

        Args:
            measured: counts and metrics logged during scoring.
        """
        scores = []
        for group in groups:
            entries = [{name: getattr(r, name) for name in SCORES} for r in group.rollouts]
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
        """Closes the file, which stays for a restart."""
        if self.file is not None:
            self.file.close()
            self.file = None


def _lines(path: Path, key: str) -> Iterator[dict[str, Any]]:
    """Yields the complete lines of a file written with `key`, without the first line."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file):
            try:
                line = json.loads(text)
            except json.JSONDecodeError:  # a line truncated when its writer ended
                return
            if number == 0:
                if line.get("key") != key:
                    return
            else:
                yield line
