"""Computes scalars as pure functions of the step, so that no scheduler state is saved."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_cli.config.knob import at_least_0, at_least_1, knob

if TYPE_CHECKING:
    from grpo_cli.config.recipe import Recipe


@dataclass
class Schedule:
    """The change of a scalar knob with the step."""

    to: float = knob(0.0, "Final value of the scheduled knob.")
    shape: str = knob(
        "linear",
        "Course of the change; jump: all at once at `begin`.",
        choices=("linear", "cosine", "jump"),
    )
    begin: int = at_least_0(0, "Step, counted from 0, until which the knob keeps its own value.")
    end: int | None = at_least_1(
        None,
        "Step, counted from 0, from which the knob has its final value; null: the run's last step.",
    )


def between(first: float, last: float, done: float, shape: str) -> float:
    """Interpolates between `first` and `last` at `done` in [0, 1], linearly or by a cosine."""
    left = 1 - done if shape == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return last + (first - last) * left


def scheduled_value(first: float, schedule: Schedule, step: int, steps: int) -> float:
    """Returns a scheduled knob's value at a step: `first` until `begin`, `to` from `end`.

    Args:
        first: the knob's unscheduled value. step: counted from 0. steps: the run's number of steps.
    """
    end = steps - 1 if schedule.end is None else schedule.end
    if step < schedule.begin:
        return first
    if schedule.shape == "jump" or step >= end:
        return schedule.to
    done = (step - schedule.begin) / (end - schedule.begin)
    return between(first, schedule.to, done, schedule.shape)


def at_step(recipe: Recipe, step: int) -> tuple[Recipe, dict[str, float]]:
    """Returns the recipe with the scheduled knobs' values at a step, counted from 0.

    Returns:
        (recipe, the scheduled values as metrics, `schedule/KEY`).
    """
    sections: dict[str, dict[str, Any]] = {}
    metrics: dict[str, float] = {}
    for key, schedule in recipe.schedules.items():
        section, _, name = key.partition(".")
        config = getattr(recipe, section)
        args, _, arg = name.rpartition(".")  # loss.args.slope: an entry of the mapping `args`
        first = getattr(config, args)[arg] if args else getattr(config, name)
        value = scheduled_value(first, schedule, step, recipe.steps)
        if isinstance(first, int):
            value = round(value)
        values = sections.setdefault(section, {})
        if args:
            values[args] = {**values.get(args, getattr(config, args)), arg: value}
        else:
            values[name] = value
        metrics[f"schedule/{key}"] = float(value)
    changed: dict[str, Any] = {
        section: dataclasses.replace(getattr(recipe, section), **values)
        for section, values in sections.items()
    }
    return dataclasses.replace(recipe, **changed), metrics


def steps_to_check(recipe: Recipe) -> list[int]:
    """Returns the steps at which scheduled scalars are checked: of a long run, 500 to 1,000."""
    if not recipe.schedules:
        return [0]
    some = set(range(0, recipe.steps, max(1, recipe.steps // 500))) | {recipe.steps - 1}
    return sorted(some | {s.begin for s in recipe.schedules.values()})
