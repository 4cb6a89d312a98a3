"""Reads the folder of a run, also while the run writes to it; replaces files of it at once.

Imports nothing heavy.

For example, with `run = RunFolder.open("outputs/demo")`:

    run.recipe["loss"]["beta"]              # the stored recipe, as a plain dict
    run.metrics()[-1]["reward"]             # the newest complete line of metrics.jsonl
    run.completions(20)                     # the file of step 20's completions
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

from grpo_cli.checkpoints import provenance
from grpo_cli.checkpoints.paths import step_of
from grpo_cli.data.stored_completions import steps_stored
from grpo_cli.errors import UserError
from grpo_cli.files import LONGEST, json_object, read_json, read_text, read_yaml

METRICS = "metrics.jsonl"
ALARMS = "alarms.jsonl"
STATUS = "status.json"
LOST_SECONDS = 90.0  # without news a run is gone; on a network disk news may be a minute late


@dataclass(frozen=True)
class RunFolder:
    """Reads the files of a run. Each call reads the file again."""

    path: Path

    @classmethod
    def open(cls, given: str | Path, key: str = "RUN", *, starting: bool = False) -> RunFolder:
        """Returns the run in a folder, or the run that a checkpoint belongs to.

        Args:
            key: the name of the folder in messages.
            starting: whether to accept a run that still loads its model and has no recipe yet.

        Raises:
            UserError: there is no run, or it is another user's and has a link that leads out of it.
        """
        path = Path(given).expanduser()
        if not path.exists():
            raise UserError(f"{key} = {given}: there is no such folder.")
        folder = path.parent.parent if path.parent.name == "checkpoints" else path
        needed = ("recipe.yaml", STATUS) if starting else ("recipe.yaml",)
        if not any((folder / name).is_file() for name in needed):
            raise UserError(
                f"{key} = {given}: this is not a folder of a run, which has a recipe.yaml; give "
                "one such as outputs/NAME."
            )
        provenance.check_links(folder, key)
        return cls(folder)

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The stored recipe as nested dicts.

        Raises:
            UserError: the file is damaged.
        """
        return read_yaml(self.path / "recipe.yaml")

    def commands(self) -> list[str]:
        """Returns the command line of each start of the run, the first one first."""
        path = self.path / "command.txt"
        return read_text(path, LONGEST).splitlines() if os.path.lexists(path) else []

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the lines of metrics.jsonl; [] before the first step is done."""
        return read_lines(self.path / METRICS)

    def alarms(self) -> list[dict[str, Any]]:
        """Returns the lines of alarms.jsonl; [] without alarms."""
        return read_lines(self.path / ALARMS)

    def summary(self) -> dict[str, Any] | None:
        """Returns summary.json; None before the last step is done."""
        return self._object("summary.json")

    def status(self) -> dict[str, Any] | None:
        """Returns status.json; None before the run has written it."""
        return self._object(STATUS)

    def plan(self) -> dict[str, Any] | None:
        """Returns plan.json; None before the run has written it."""
        return self._object("plan.json")

    def _object(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        return read_json(path) if os.path.lexists(path) else None

    def steps_with_completions(self) -> list[int]:
        """Returns the steps whose completions are stored, in order."""
        return steps_stored(self.path)

    def completions(self, step: int) -> Path:
        """Returns the path of the file of a step's completions."""
        return self.path / "completions" / f"step-{step}.parquet"

    def evaluations(self) -> dict[Path, int]:
        """Returns the folders that `grpo eval` has written, in order, each with its step.

        A folder of an earlier evaluation that was moved aside, such as step-3_1, is left out.
        """
        found = sorted(path.parent for path in self.path.glob("eval/step-*/**/eval.json"))
        new = [p for p in found if p.with_name(re.sub(r"_\d+$", "", p.name)) not in {*found} - {p}]
        steps = {p: step_of(Path(p.relative_to(self.path).parts[1])) for p in new}
        return dict(sorted(steps.items(), key=itemgetter(1)))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the complete lines of metrics.jsonl or alarms.jsonl; [] if there is no such file.

    A last line that is still being written is left out.

    Raises:
        UserError: another line is damaged.
    """
    lines = read_text(path).splitlines(keepends=True) if os.path.lexists(path) else []
    if lines and not lines[-1].endswith("\n"):
        del lines[-1]
    return [json_object(s, f"{path}, line {i}", "step") for i, s in enumerate(lines, start=1)]
