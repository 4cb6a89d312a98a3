"""The share of groups with a signal: by hand, by all draws, and by simulated probes."""

import itertools
import math
import random
from collections.abc import Callable

import pytest

from grpo_cli.evaluation.probe.signal import (
    over_prompts,
    signal_share,
    without_signal,
)

PROBES = 200
PROMPTS, SAMPLES = 32, 16  # the defaults of `grpo probe`

# The rate of right completions of a prompt.
RATES: dict[str, Callable[[random.Random], float]] = {
    "0": lambda rng: 0.0,
    "1": lambda rng: 1.0,
    "0.5": lambda rng: 0.5,
    "a mixture of 0 and 0.05": lambda rng: rng.choice([0.0, 0.05]),
    "Beta(0.05, 0.5): few prompts decide": lambda rng: rng.betavariate(0.05, 0.5),
}
# Mean over prompts of the rate, and of p^G + (1 - p)^G.
MEANS = {"0": 0.0, "1": 1.0, "0.5": 0.5, "a mixture of 0 and 0.05": 0.025,
         "Beta(0.05, 0.5): few prompts decide": 0.05 / 0.55}  # fmt: skip
EQUAL: dict[str, Callable[[int], float]] = {
    "0": lambda size: 1.0,
    "1": lambda size: 1.0,
    "0.5": lambda size: 2 * 0.5**size,
    "a mixture of 0 and 0.05": lambda size: (1 + 0.05**size + 0.95**size) / 2,
    "Beta(0.05, 0.5): few prompts decide": lambda size: (
        beta_moment(0.05, size) + beta_moment(0.5, size)
    ),
}


def beta_moment(a: float, size: int) -> float:
    """The mean of p^G of a Beta(a, 0.55 - a)."""
    return math.prod((a + i) / (0.55 + i) for i in range(size))


def share(rewards: list[float | None], size: int) -> float:
    """`without_signal` where no completion is excluded."""
    return without_signal(rewards, [False] * len(rewards), size)


def test_by_hand() -> None:
    assert share([1, 0, 0, 0], 2) == 0.5  # 3 of the 6 pairs hold the right one
    assert share([1, 0, 0, 0], 4) == 0.0
    assert share([0, 0, 0, 0], 2) == 1.0
    none = [False] * 4
    assert signal_share([([1, 0, 0, 0], none), ([0, 0, 0, 0], none)], 2).value == 0.25
    # Two of each of three values: of the 15 pairs 3 are equal.
    assert share([0, 0, 0.5, 0.5, 1, 1], 2) == pytest.approx(3 / 15)
    # Without a reward: of the pairs of (1, 0, none) only the first has a signal.
    assert share([1, 0, None], 2) == pytest.approx(2 / 3)
    # Truncated and left out: 1 0 | 0 0, of which the pair of excluded ones does not train.
    out = without_signal([1, 0, 1, 0], [False, False, True, True], 2)
    assert out == pytest.approx((2 + 1) / 6)


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


def simulated(name: str, seed: int) -> list[list[int]]:
    rng = random.Random(f"{name}/{seed}")
    rates = [RATES[name](rng) for _ in range(PROMPTS)]
    return [[int(rng.random() < rate) for _ in range(SAMPLES)] for rate in rates]


@pytest.mark.parametrize("name", RATES)
def test_the_intervals_cover_the_truth(name: str) -> None:
    covered = dict.fromkeys(("rate", 2, 8, 16), 0)
    total = dict.fromkeys((2, 8, 16), 0.0)
    for seed in range(PROBES):
        rewards = simulated(name, seed)
        rate = over_prompts([sum(own) / SAMPLES for own in rewards], PROMPTS * SAMPLES)
        covered["rate"] += rate.low <= MEANS[name] + 1e-9 and MEANS[name] <= rate.high + 1e-9
        prompts = [(own, [False] * SAMPLES) for own in rewards]
        for size in (2, 8, 16):
            found, truth = signal_share(prompts, size), 1 - EQUAL[name](size)
            covered[size] += found.low <= truth + 1e-9 and truth <= found.high + 1e-9
            total[size] += found.value / PROBES
    # Of 200 intervals that hold the truth with a probability of 0.95, fewer than 185 (0.925) do
    # in 4 % of all cases.
    assert min(covered.values()) >= 0.925 * PROBES, covered
    for size, mean in total.items():  # unbiased: within 4 standard errors of at most 0.09 each
        assert mean == pytest.approx(1 - EQUAL[name](size), abs=4 * 0.09 / math.sqrt(PROBES))
