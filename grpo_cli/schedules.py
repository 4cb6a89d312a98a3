"""Scalars as pure functions of the step, so that there is no scheduler state to save."""

import math

from grpo_cli.config import Optimizer


def learning_rate(config: Optimizer, step: int, steps: int) -> float:
    """Learning rate of a step: a linear rise over `warmup_steps`, then the schedule to the end.

    Args:
        step: counted from 0. steps: the run's number of steps.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)  # in [0, 1)
    left = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.min_learning_rate + (config.learning_rate - config.min_learning_rate) * left
