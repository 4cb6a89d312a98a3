"""The recipe of a command line, composed and checked as the verbs do it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from grpo_cli.config.compose import compose_and_call, given_keys
from grpo_cli.config.recipe import Recipe
from grpo_cli.training import prepare

# A run of seconds on rows of sums; the caller names its rows, its steps and its reward.
SMALL = [
    "device=cpu",
    "prompts_per_step=5",  # not a multiple of 2 or 3
    "model.build.hidden_size=32",
    "model.build.intermediate_size=64",
    "model.build.num_layers=2",
    "model.build.warmup_steps=5",
    "dataset.solution='{answer}'",
    "generation.num_generations=4",
    "generation.max_completion_tokens=6",
    "update.tokens_per_micro_batch=40",
    "optimizer.learning_rate=1e-3",
    "log.report=false",
    "reward=[]",
]


def with_recipe(words: Sequence[str]) -> list[str]:
    """Returns a command line that names a recipe: arithmetic_tiny, unless it has one."""
    named = re.search(r"\brecipe[= ]|\bresume=|\.yaml\b", " ".join(words))
    return [*words[:1], *([] if named else ["recipe=arithmetic_tiny"]), *words[1:]]


def composed(*words: str, parse: Callable[..., Recipe] = prepare.parse) -> Recipe:
    """Returns the first of a sweep.

    Args:
        parse: what checks the composed recipe; that of `grpo train` unless given.
    """
    found: list[Recipe] = []

    def task(cfg: Any) -> None:
        found.append(parse(cfg, given_keys(cfg)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYDRA_FULL_ERROR", "1")
        patch.setattr(sys, "argv", ["grpo"])
        compose_and_call(with_recipe(["train", *words])[1:], task)
    return found[0]
