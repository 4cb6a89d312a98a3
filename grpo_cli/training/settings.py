"""Declares the knobs of updates, stop rules and callbacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_cli.config.knob import above_0, at_least_0, at_least_1, knob


@dataclass
class Callback:
    """A class of the user's own whose methods are called during the run."""

    path: str = knob("", "Class with methods such as on_step or on_end, as my_module:MyCallback.")
    args: dict[str, Any] = knob({}, "Keyword arguments of the callback's class.")


@dataclass
class Update:
    """The update on one step's batch of completions."""

    num_iterations: int = at_least_1(1, "Passes over the completions of one step.")
    minibatches: int = at_least_1(1, "Optimizer steps in one pass, each on complete groups.")
    tokens_per_micro_batch: int | None = at_least_1(
        None,
        "Tokens in one backward; null: by free memory. Halved when memory runs out; changes "
        "memory use, never the gradient.",
    )


@dataclass
class Stop:
    """Rules that end a run before its last step, as completely as that step would end it."""

    zero_gradient: int = at_least_0(
        0,
        "Steps in a row in which no completion has an advantage, after which the run ends; 0: "
        "never.",
    )
    hours: float | None = above_0(
        None,
        "Hours of training, evaluating and saving, over all starts of the run, after which it "
        "ends; null: no limit.",
    )
    max_kl: float | None = above_0(
        None, "Largest KL to the reference, in nats a token; null: no limit."
    )
    accuracy: float | None = knob(
        None,
        "Held-out accuracy, or value of the metric that eval.best names, at which the run ends; "
        "null: no limit.",
        read_if=("eval.every",),
    )
