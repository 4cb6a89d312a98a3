"""What a stored recipe says beside the present one."""

from __future__ import annotations

from typing import Any

import yaml

from grpo_cli.config.recipe import Recipe
from grpo_cli.config.saved_recipe import as_yaml, differences
from grpo_cli.models.settings import Optimizer


def stored(recipe: Recipe, *without: str) -> dict[str, Any]:
    """As a version has stored it that did not have some knobs."""
    tree: dict[str, Any] = yaml.safe_load(as_yaml(recipe))
    for key in without:
        section, _, name = key.partition(".")
        del tree[section][name]
    return tree


def test_a_knob_that_is_new_was_as_its_default() -> None:
    before = stored(Recipe(), "optimizer.algorithm", "optimizer.warmup_steps")
    assert differences(before, Recipe()) == []
    now = Recipe(optimizer=Optimizer(algorithm="muon", warmup_steps=3))
    assert differences(before, now) == [
        "optimizer.algorithm: adamw -> muon",
        "optimizer.warmup_steps: 0 -> 3",
    ]
