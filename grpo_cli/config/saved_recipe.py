"""Stores a recipe beside a run, and compares it with a later one."""

from __future__ import annotations

import dataclasses
from typing import Any

import yaml

from grpo_cli.config.compose import groups
from grpo_cli.config.interpolation import as_text
from grpo_cli.config.keys import flagged, flat
from grpo_cli.config.recipe import Recipe
from grpo_cli.evaluation.settings import Benchmark
from grpo_cli.scoring.settings import Reward


def as_yaml(recipe: Recipe) -> str:
    """Formats a recipe with every knob as YAML that `recipe=FILE` reads."""
    # Groups come after the values, so that a choice on the command line overrides stored values.
    defaults: list[Any] = ["schema", "_self_", *({group: None} for group in groups())]
    values = as_text(dataclasses.asdict(recipe))
    # A new run must not inherit the stored run's folder.
    for own in flagged("of_start"):
        del values[own]
    text: str = yaml.safe_dump(
        {"defaults": defaults, **values}, sort_keys=False, allow_unicode=True
    )
    return text


def differences(stored: dict[str, Any], recipe: Recipe) -> list[str]:
    """Lists the knobs that differ between a stored recipe and this one, as `key: old -> new`."""
    changed = changes(stored, as_text(dataclasses.asdict(recipe)))
    return [f"{key}: {old} -> {new}" for key, (old, new) in changed.items()]


def changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the knobs that differ between two recipes: full key -> (old, new).

    A missing knob counts as its default. The run's folder, its start options and the description
    are skipped.
    """
    defaults = flat(as_text(dataclasses.asdict(Recipe())))
    both = [defaults | flat(_completed(tree, other)) for tree, other in ((old, new), (new, old))]
    skip = [*flagged("of_start"), "defaults", "description"]
    values = {key: (both[0].get(key), both[1].get(key)) for key in sorted({*both[0], *both[1]})}
    return {k: (a, b) for k, (a, b) in values.items() if k not in skip and a != b}


def _completed(tree: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Adds the missing knobs to all rewards and benchmarks that either recipe has."""
    out = dict(tree)
    for section, kind in (("reward", Reward), ("benchmark", Benchmark)):
        entries = [one.get(section) or {} for one in (other, tree)]
        defaults = dataclasses.asdict(kind())
        names = {**entries[0], **entries[1]}
        out[section] = {name: defaults | dict(entries[1].get(name) or {}) for name in names}
    return out
