import math
from typing import Any

import pytest

from grpo_cli.evaluation.improvement import Measured, has_improved, improvement_interval
from grpo_cli.evaluation.tasks import TaskResult
from tests.tables import table

NAN = math.nan


def of_problems(*values: float) -> Measured:
    return Measured(sum(values) / len(values), by_problem=list(values))


@table(
    "old, new, expected",
    [
        # Of 40 problems 10 more are right, and none is wrong that was right: ±0.13 around 0.24.
        ([0.0] * 20 + [1.0] * 20, [0.0] * 10 + [1.0] * 30, True),
        ([0.0] * 10 + [1.0] * 30, [0.0] * 20 + [1.0] * 20, False),
        # 2 more: not beyond the interval.
        ([0.0] * 20 + [1.0] * 20, [0.0] * 18 + [1.0] * 22, False),
        # 13 more, and 7 that were right are wrong.
        ([0.0] * 20 + [1.0] * 20, [1.0] * 13 + [0.0] * 14 + [1.0] * 13, False),
        # Values beyond 0 to 1: Wald's interval of paired differences.
        ([2.0, 3.0, 4.0, 5.0], [2.5, 3.6, 4.4, 5.5], True),
        ([2.0, 3.0, 4.0, 5.0], [1.0, 5.0, 4.5, 4.5], False),
        ([2.0, NAN, 4.0, 5.0], [2.5, 9.0, 4.4, 5.5], True),
        ([NAN, 2.0], [NAN, 9.0], False),  # one problem has no interval
    ],
)
def test_improvements(old: list[float], new: list[float], expected: bool) -> None:
    assert has_improved(of_problems(*new), of_problems(*old)) is expected


def test_without_common_problems_the_intervals_are_combined() -> None:
    """The arms 0.03 and 0.04 give 0.05: 0.2 ± 0.05."""
    old, new = Measured(0.5, 0.46, 0.54), Measured(0.7, 0.67, 0.73)
    assert improvement_interval(new, old) == pytest.approx((0.15, 0.25))
    assert improvement_interval(Measured(0.7), old) == (-math.inf, math.inf)
    other = Measured(0.5, 0.46, 0.54, [0.5])  # another number of problems
    assert improvement_interval(Measured(0.7, 0.67, 0.73, [0.7] * 9), other)[0] > 0


def result(key: str, accuracy: float) -> TaskResult:
    task: Any = type("Task", (), {"key": key})()
    return TaskResult(task, {}, [], {"accuracy": [accuracy], "reward": [2.0]})


def test_the_metric_of_an_evaluation() -> None:
    metrics = {"eval/accuracy": 0.5, "eval/accuracy_low": 0.4, "eval/accuracy_high": 0.6}
    one = Measured.of("accuracy", metrics, [result("", 0.5)])
    assert one == Measured(0.5, 0.4, 0.6, [0.5])
    both = [result("a", 0.4), result("b", 0.6)]
    assert Measured.of("accuracy", metrics, both) == Measured(0.5, 0.4, 0.6), "a mean of two"
    assert Measured.of("b/reward", {"eval/b/reward": 2.0}, both) == Measured(2.0, by_problem=[2.0])
    assert Measured.of("reward", {"eval/reward": 2.0}, both) is None, "it has no interval"
    assert Measured.of("kl", {"eval/kl": 2.0}, [result("", 0.5)]) is None
