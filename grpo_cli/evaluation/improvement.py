"""Decides by a 95 % interval whether an evaluation improves on an earlier one. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_cli.evaluation.estimates import Z_95
from grpo_cli.evaluation.paired import difference_interval
from grpo_cli.evaluation.tasks import TaskResult


@dataclass(frozen=True)
class Measured:
    """The value of the metric `eval.best` in one evaluation."""

    value: float
    low: float | None = None  # lower end of the 95 % interval
    high: float | None = None
    by_problem: list[float] | None = None  # values whose mean is `value`; None if unknown

    @classmethod
    def of(
        cls, name: str, metrics: Mapping[str, float], results: Sequence[TaskResult]
    ) -> Measured | None:
        """Reads the metric `name` of an evaluation; None if it has no interval."""
        key, _, metric = name.rpartition("/")
        of_task = [r for r in results if r.task.key == key and (key or len(results) == 1)]
        by_problem = of_task[0].by_problem.get(metric) if of_task else None
        value, low, high = (metrics.get(f"eval/{name}{end}") for end in ("", "_low", "_high"))
        if value is None or (by_problem is None and low is None):
            return None
        return cls(value, low, high, by_problem)


def has_improved(new: Measured, old: Measured) -> bool:
    """Returns whether the 95 % interval of new - old lies above 0."""
    return improvement_interval(new, old)[0] > 0


def improvement_interval(new: Measured, old: Measured) -> tuple[float, float]:
    """Returns the 95 % interval of new - old.

    For the same problems it is the interval of paired differences: Bonett and Price's for shares of
    right completions (`paired.py`), Wald's for other values. Otherwise the two intervals are
    combined (MOVER: Zou and Donner 2008, Stat. Med. 27:1693). Without intervals it is infinite.
    """
    if new.by_problem and old.by_problem and len(new.by_problem) == len(old.by_problem):
        differences = np.subtract(new.by_problem, old.by_problem)
        return paired_interval(differences[~np.isnan(differences)].tolist(), new, old)
    ends = (new.low, new.high, old.low, old.high)
    if any(end is None for end in ends):
        return -math.inf, math.inf
    new_low, new_high, old_low, old_high = (end for end in ends if end is not None)
    difference = new.value - old.value
    return (
        difference - math.hypot(new.value - new_low, old_high - old.value),
        difference + math.hypot(new_high - new.value, old.value - old_low),
    )


def paired_interval(
    differences: Sequence[float], new: Measured, old: Measured
) -> tuple[float, float]:
    """Returns the 95 % interval of the mean difference over problems."""
    n = len(differences)
    if n < 2:
        return -math.inf, math.inf
    values = [*(new.by_problem or ()), *(old.by_problem or ())]
    if all(0 <= v <= 1 for v in values):
        return difference_interval(differences)
    mean = math.fsum(differences) / n
    variance = math.fsum((d - mean) ** 2 for d in differences) / (n - 1)
    half = Z_95 * math.sqrt(variance / n)
    return mean - half, mean + half
