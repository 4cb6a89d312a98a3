"""Collects the facts about a run: its state, recipe, command lines, versions and machine."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_cli.config.compose import shipped
from grpo_cli.config.interpolation import publishable, publishable_command
from grpo_cli.config.keys import KNOBS
from grpo_cli.config.knob import as_written
from grpo_cli.config.saved_recipe import changes
from grpo_cli.files import read_json
from grpo_cli.reporting.run_folder import LOST_SECONDS, RunFolder
from grpo_cli.scoring.settings import Reward, function_of, own_first


def of_run(run: RunFolder, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the facts about a run, as the report's page reads them.

    Args:
        metrics: the lines of metrics.jsonl.
    """
    recipe, summary = publishable(run.recipe), run.summary()
    status = run.status() or {}
    base = shipped(str(recipe.get("recipe")))
    evaluated = [line for line in metrics if line.get("eval/accuracy") is not None]
    return {
        "name": run.path.resolve().name,
        "folder": publishable(str(run.path)),
        "recipe": recipe.get("recipe") or "",
        "description": recipe.get("description") or "",
        "steps": recipe.get("steps"),
        "state": state(summary, status),
        "message": publishable(status.get("message")) if summary is None else None,
        "device": (summary or status).get("device"),
        "processes": (summary or status).get("processes"),
        "commands": [" ".join(publishable_command(shlex_words(c))) for c in run.commands()],
        "summary": publishable(summary),
        "before": (summary or status).get("before"),
        "evaluations": [
            entry for path, step in run.evaluations().items() for entry in evaluation(path, step)
        ],
        "measure": "reward" if any("eval/graded" in line for line in evaluated) else "accuracy",
        "rewards": {n: (e or {}).get("weight", 1.0) for n, e in rewards(recipe).items()},
        "right": right(recipe),
        "changes": {
            "defaults": listed({}, recipe),
            "shipped": None if base is None else listed(base, recipe),
        },
    }


def state(summary: Mapping[str, Any] | None, status: Mapping[str, Any]) -> str:
    """Returns the state of the run.

    finished; running; stopped or failed, as its status says; ended: without a summary, for example
    after a kill.
    """
    if summary is not None:
        return "finished"
    if (noted := status.get("state")) in ("stopped", "failed"):
        return str(noted)
    return "running" if time.time() - status.get("time", 0.0) < LOST_SECONDS else "ended"


def evaluation(folder: Path, step: int) -> Iterator[dict[str, Any]]:
    """Yields the results of an evaluation by `grpo eval`, one for each benchmark and mode."""
    report = read_json(folder / "eval.json")
    for name, entry in report.get("benchmarks", {}).items():
        found = entry if isinstance(entry, Mapping) else {}
        for mode, numbers in found.get("by_mode", {"": found}).items():
            yield {
                "step": step,
                "name": f"{name} ({mode})" if mode else name,
                "n": numbers.get("n"),
                "accuracy": numbers.get("accuracy"),
                "interval": numbers.get("interval_95"),
                "reward": numbers.get("reward"),
            }


def rewards(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the reward functions of a stored recipe, by name."""
    found: Mapping[str, Any] = recipe.get("reward") or {}
    return found


def right(recipe: Mapping[str, Any]) -> str | None:
    """Returns the reward function whose value 1 counts as right."""
    named: str | None = (recipe.get("eval") or {}).get("accuracy")
    functions = {name: function_of(reward) for name, reward in rewards(recipe).items()}
    return named or next(iter(own_first(functions)), None)


def listed(old: dict[str, Any], new: dict[str, Any]) -> list[dict[str, str]]:
    """Returns the knobs that differ between two recipes, each with its help text."""
    docs = {key: field.metadata["doc"] for key, field in KNOBS.items()}
    of_rewards = {f.name: f.metadata["doc"] for f in dataclasses.fields(Reward)}
    return [
        {
            "key": key,
            "old": as_written(publishable(a, key)),
            "new": as_written(publishable(b, key)),
            "doc": (docs.get(key) or of_rewards.get(key.rpartition(".")[2], "")).replace("`", ""),
        }
        for key, (a, b) in changes(old, new).items()
        if key != "recipe"
    ]


def shlex_words(command: str) -> list[str]:
    """Returns the arguments of a command line, quoted as they were."""
    try:
        return [shlex.quote(word) for word in shlex.split(command)]
    except ValueError:  # a quote that is not closed
        return command.split()
