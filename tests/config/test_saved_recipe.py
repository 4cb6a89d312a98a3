"""What a stored recipe says beside the present one."""

from __future__ import annotations

from typing import Any

import yaml

from grpo_cli.config.recipe import Recipe
from grpo_cli.config.saved_recipe import as_yaml, differences
from grpo_cli.models.settings import Optimizer


def test_a_knob_that_is_new_was_as_its_default() -> None:
    before: dict[str, Any] = yaml.safe_load(as_yaml(Recipe()))
    for name in ("algorithm", "warmup_steps"):  # a version that did not have them stored it
        del before["optimizer"][name]
    assert differences(before, Recipe()) == []
    now = Recipe(optimizer=Optimizer(algorithm="muon", warmup_steps=3))
    assert differences(before, now) == [
        "optimizer.algorithm: adamw -> muon",
        "optimizer.warmup_steps: 0 -> 3",
    ]
