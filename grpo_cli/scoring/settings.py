"""Declares the knobs of rewards and of the processes that compute them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_cli.config.knob import above_0, at_least_0, at_least_1, knob, text
from grpo_cli.rewards import shipped_name


@dataclass
class Reward:
    """One reward function of a recipe."""

    function: str = knob(
        "",
        "Reward function: a short name (see `grpo rewards`) or my_package.my_module:name.",
        decides="rewards",
        trusted="reward",
    )
    weight: float = knob(
        1.0, "Weight of this function in the reward, which is a weighted sum.", decides="rewards"
    )
    args: dict[str, Any] = knob({}, "Keyword arguments of the reward function.", decides="rewards")
    datasets: list[str] = text(
        [],
        "Names of data sets of dataset.mixture (values of the column `dataset`) to whose rows the "
        "function applies; empty: all rows.",
        decides="rewards",
    )
    timeout: float | None = at_least_0(
        None,
        "Seconds per completion, in a worker process that is killed on timeout; null: the "
        "function's own setting; 0: no limit, in the trainer's process.",
    )
    on_error: str = knob(
        "stop",
        "Reaction when the function raises or returns no number: stop the run, or count the "
        "failure and treat the reward as not applicable.",
        choices=("stop", "count"),
    )
    concurrency: int | None = at_least_1(
        None, "Completions that an async function scores at the same time; null: 16."
    )


def function_of(stored: object) -> str:
    """Returns the function of a reward that a recipe or an evaluation has stored, or ""."""
    return str(stored.get("function", "")) if isinstance(stored, dict) else ""


def own_first(functions: Mapping[str, str]) -> list[str]:
    """Returns the names of rewards with the user's own rewards first.

    The first one is the accuracy, unless eval.accuracy names another.

    Args:
        functions: the function of each reward, by name.
    """
    return sorted(functions, key=lambda name: shipped_name(functions[name] or name) is not None)


@dataclass
class Scoring:
    """Settings of the worker processes that score completions."""

    workers: int | None = at_least_1(
        None,
        "Worker processes for rewards with a timeout; null: this process's share of the cores.",
    )
    worker_memory_gb: float | None = above_0(
        4.0,
        "Address space of one worker process of rewards, tools or environments, in GiB; null: no "
        "limit.",
    )
