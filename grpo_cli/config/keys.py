"""Answers questions about the keys of a recipe: which knob one means, and which have a flag."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from functools import partial
from typing import Any

from grpo_cli.config import knob
from grpo_cli.config.recipe import Recipe
from grpo_cli.data.settings import HeldOut, MixturePart
from grpo_cli.evaluation.settings import Benchmark
from grpo_cli.scoring.settings import Reward
from grpo_cli.training.settings import Callback

KNOBS = dict(knob.knobs_of(Recipe))  # every knob by its full key, sections before their knobs
flagged = partial(knob.flagged, Recipe)  # keys of knobs and sections by a flag and its values
# Mappings whose keys the user chooses, and the class of their entries.
ENTRIES: dict[str, type] = {
    "reward": Reward,
    "benchmark": Benchmark,
    "callbacks": Callback,
    "dataset.held_out": HeldOut,
    "dataset.mixture": MixturePart,
}


def entry_field(key: str) -> tuple[dataclasses.Field[Any], list[str]] | None:
    """Finds the field of a key below an entry, such as `reward.NAME.weight`.

    Returns:
        (the field, the key's parts below it), or None for other keys.
    """
    for mapping, kind in ENTRIES.items():
        _, is_below, rest = key.partition(f"{mapping}.")
        if not key.startswith(f"{mapping}.") or not is_below:
            continue
        fields = {f.name: f for f in dataclasses.fields(kind)}
        parts = rest.split(".")
        if len(parts) > 1 and parts[1] in fields:
            return fields[parts[1]], parts[2:]
    return None


def is_among(key: str, known: Collection[str]) -> bool:
    """Returns whether a key is in `known`, or in one of its sections."""
    return f"{key}.".startswith(tuple(f"{one}." for one in known))


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens {"loss": {"beta": 0.0}, …} to {"loss.beta": 0.0, …}; drops empty mappings."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out
