"""The share of groups with a signal: by hand, and by all draws."""

import itertools
import random

import pytest

from grpo_cli.evaluation.estimates import estimate, student_95
from grpo_cli.evaluation.probe.signal import (
    LEAST_DEGREES,
    degrees_of_freedom,
    signal_share,
    without_signal,
)


def trains(rewards: list[int | None], excluded: list[bool]) -> bool:
    there = {r for r in rewards if r is not None}
    left = [not e for r, e in zip(rewards, excluded, strict=True) if r is not None]
    return len(there) > 1 and any(left)


def test_it_is_the_share_of_all_draws() -> None:
    rng = random.Random(0)
    for _ in range(60):
        n = rng.randint(2, 7)
        rewards: list[int | None] = [rng.choice([0, 0, 1, 2, None]) for _ in range(n)]
        excluded = [rng.random() < 0.3 for _ in range(n)]
        for size in range(1, n + 1):
            draws = [*itertools.combinations(range(n), size)]
            silent = [not trains([rewards[i] for i in d], [excluded[i] for i in d]) for d in draws]
            assert without_signal(rewards, excluded, size) == pytest.approx(
                sum(silent) / len(draws)
            )


def test_degrees_of_freedom_by_hand() -> None:
    # Of shares of 0 and 1 with the mean p the kurtosis is 1 / (p(1 - p)) - 3.
    assert degrees_of_freedom([0.5] * 9) == 8
    assert degrees_of_freedom([0.0, 1.0] * 16) == 31  # it is 1
    assert degrees_of_freedom([1.0] * 4 + [0.0] * 28) == pytest.approx(64 * 7 / 36)  # 43 / 7
    assert degrees_of_freedom([1.0] + [0.0] * 31) == LEAST_DEGREES == 4  # 30, which would leave 2.2


def test_the_interval_is_one_of_few_prompts() -> None:
    prompts = [([1, 0, 0, 0], [False] * 4), ([0, 0, 0, 0], [False] * 4)]
    assert signal_share(prompts, 2) == estimate([0.5, 0.0], 8, student_95(4))
