"""Stores the completions of an evaluation as they arrive, so that it can be resumed.

Each process appends to a file of its own, `partial/rank-N.jsonl` in the evaluation's folder. A line
holds the completions of one problem, and a key that identifies all their inputs. A line that was
truncated when its writer ended is ignored.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.files import json_object, open_file, reading
from grpo_cli.records import Group, Prompt, Rollout, from_state, to_state

FOLDER = "partial"


class Journal:
    """The stored completions of an evaluation."""

    def __init__(self, folder: Path, workers: Workers, key: str) -> None:
        """Reads the completions stored before a restart, on the main process; collective.

        Args:
            folder: the evaluation's folder.
            key: identifies all inputs of the completions; lines with another key are not read.
        """
        self.folder, self.rank, self.key = folder / FOLDER, workers.rank, key
        self.completions: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self.file: TextIO | None = None
        if workers.is_main:
            for path in sorted(self.folder.glob("rank-*.jsonl")):
                self._read(path)
        # All processes divide the same problems.
        self.completions = workers.first(self.completions) or {}

    def _read(self, path: Path) -> None:
        with reading(path), open_file(path) as file:
            for text in file:
                with contextlib.suppress(UserError):  # a torn line
                    line = json_object(text.decode(errors="replace"), path, "task")
                    if line.get("key") == self.key:
                        self.completions[line["task"], line["row"]] = line["completions"]

    @property
    def found(self) -> int:
        """Number of problems whose completions are already stored."""
        return len(self.completions)

    def group(self, task: str, prompt: Prompt) -> Group | None:
        """Returns the stored completions of a problem; None without any."""
        known = self.completions.get((task, prompt.row))
        if known is None:
            return None
        return Group(prompt.row, prompt, [from_state(prompt, entry) for entry in known])

    def completed(self, task: str, rollouts: Sequence[Rollout]) -> None:
        """Stores the completions of a problem."""
        row, entries = rollouts[0].prompt.row, [to_state(r) for r in rollouts]
        line = {"key": self.key, "task": task, "row": row, "completions": entries}
        try:
            if self.file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                self.file = (self.folder / f"rank-{self.rank}.jsonl").open("a", encoding="utf-8")
                self.file.write("\n")  # ends a line that a killed process truncated
            self.file.write(json.dumps(line, default=str) + "\n")
            self.file.flush()
        except OSError as error:
            raise TrainingError(f"{self.folder}: cannot be written: {error.strerror}.") from error

    def close(self) -> None:
        """Closes the file, which stays for a restart."""
        if self.file is not None:
            self.file.close()
