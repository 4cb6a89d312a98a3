"""pass@k, maj@k and intervals: by hand, by brute force, and by simulated evaluations."""

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest

from grpo_cli.evaluation.estimates import (
    Estimate,
    estimate,
    maj_at_k,
    pass_at_k,
    quantile,
    student_95,
    wilson,
)

EVALUATIONS = 2000


def test_pass_at_k_of_many_completions_is_exact() -> None:
    assert pass_at_k(1, 10_000, 5_000) == 0.5
    assert pass_at_k(1, 3_000, 1) == 1 / 3_000
    # 1 - (1999 * 1998) / (3000 * 2999) of 1001 right ones among 3000
    assert pass_at_k(1001, 3000, 2) == 1 - 1999 * 1998 / (3000 * 2999)


def test_pass_at_k_is_the_share_of_all_draws() -> None:
    for n in range(1, 8):
        for right in range(n + 1):
            for k in range(1, n + 1):
                draws = [any(i < right for i in d) for d in itertools.combinations(range(n), k)]
                assert pass_at_k(right, n, k) == pytest.approx(sum(draws) / len(draws), abs=1e-15)


def by_all_draws(votes: list[int], right: set[int], abstained: int, k: int) -> float:
    ballots: list[int | None] = [i for i, count in enumerate(votes) for _ in range(count)]
    ballots += [None] * abstained
    shares = []
    for draw in itertools.combinations(ballots, k):
        counts = Counter(i for i in draw if i is not None)
        most = [i for i, count in counts.items() if count == max(counts.values())]
        shares.append(len(right.intersection(most)) / len(most) if most else 0.0)
    return math.fsum(shares) / len(shares)


def test_maj_at_k_is_the_mean_over_all_draws() -> None:
    rng = random.Random(7)
    for _ in range(150):
        votes = [rng.choice((0, 1, 1, 2, 3, 4)) for _ in range(rng.randint(0, 5))]
        abstained = rng.choice((0, 0, 1, 2, 3))
        while sum(votes) + abstained > 11:
            votes.pop()
        n = sum(votes) + abstained
        right = {i for i in range(len(votes)) if rng.random() < 0.4}
        for k in range(1, n + 1):
            expected = by_all_draws(votes, right, abstained, k)
            found = maj_at_k(votes, right, abstained, k)
            assert found == pytest.approx(expected, abs=1e-12), (votes, right, abstained, k)


def test_someone_wins_unless_all_abstain() -> None:
    """The chances of all classes add up to that of a vote, for counts that no brute force does."""
    rng = random.Random(1)
    for n, classes, k in [(64, 64, 33), (64, 9, 16), (256, 40, 64), (256, 3, 255), (3000, 2, 8)]:
        votes = [0] * (classes + 1)
        for _ in range(n):
            votes[min(int(rng.expovariate(3 / classes)), classes)] += 1
        *votes, abstained = votes
        chances = [maj_at_k(votes, {i}, abstained, k) for i in range(classes)]
        assert math.fsum(chances) == pytest.approx(pass_at_k(n - abstained, n, k), abs=1e-10)
        together = maj_at_k(votes, set(range(classes // 2)), abstained, k)
        assert together == pytest.approx(math.fsum(chances[: classes // 2]), abs=1e-10)


def test_one_completion_a_problem_is_wilson_s_interval() -> None:
    # 8 of 10 (Wilson 1927): (0.8 + 0.192073 ± 1.959964 * sqrt(0.016 + 0.0096036)) / 1.384146
    found = estimate([1.0] * 8 + [0.0] * 2, 10)
    assert found.value == 0.8
    assert found.low == pytest.approx(0.490162, abs=1e-6)
    assert found.high == pytest.approx(0.943318, abs=1e-6)
    assert found == Estimate(0.8, *wilson(0.8, 10))


def test_all_wrong_and_all_right() -> None:
    # z² / (n + z²) = 3.841459 / 13.841459 of ten problems, however many completions each.
    for completions in (10, 640):
        none, every = estimate([0.0] * 10, completions), estimate([1.0] * 10, completions)
        assert (none.value, none.low) == (0.0, 0.0)
        assert none.high == pytest.approx(0.277533, abs=1e-6)
        assert (every.value, every.high) == (1.0, 1.0)
        assert every.low == pytest.approx(0.722467, abs=1e-6)


def test_values_that_lie_closer_give_a_narrower_interval() -> None:
    # Σ(x - p)² = 4 * 0.25 = 1 and n p (1 - p) = 4: D = 1.05 / 4.05, so n_eff = 16 * 4.05 / 1.05.
    found = estimate([0.25, 0.75] * 8, 64)
    assert (found.low, found.high) == pytest.approx(wilson(0.5, 16 * 4.05 / 1.05), abs=1e-12)
    # Values that are all alike are worth no more than their completions.
    assert estimate([0.5] * 100, 200) == Estimate(0.5, *wilson(0.5, 200))


# Where all problems together miss, or reach, less than about two whole ones, the interval is wider
# than it need be.
HOLDS, CAUTIOUS = (0.93, 0.97), (0.93, 0.99)


@pytest.mark.parametrize(
    ("problems", "beta", "completions", "of_pass"),
    [
        (100, (1.0, 1.0), 1, HOLDS),
        (100, (0.3, 0.3), 4, HOLDS),
        (250, (8.0, 2.0), 4, HOLDS),
        (250, (1.0, 1.0), 16, HOLDS),
        pytest.param(1319, (0.3, 0.3), 16, HOLDS, marks=pytest.mark.slow),
        (250, (8.0, 2.0), 16, CAUTIOUS),  # pass@4 misses 1.7 problems
        (100, (8.0, 2.0), 16, CAUTIOUS),  # 0.7
        # Thirty problems, as AIME has, and a model that solves nearly all or hardly any.
        (30, (1.0, 1.0), 64, HOLDS),
        (30, (0.3, 0.3), 16, HOLDS),
        (250, (0.2, 2.0), 16, HOLDS),
        (250, (2.0, 0.1), 16, HOLDS),  # without PRIOR 0.86 of pass@4
    ],
)
def test_the_interval_holds_the_truth(
    problems: int, beta: tuple[float, float], completions: int, of_pass: tuple[float, float]
) -> None:
    """Of 2,000 evaluations, each of other problems. What is found varies by 0.005."""
    (a, b), n = beta, completions
    rng = np.random.default_rng([problems, n, int(10 * a), int(10 * b)])
    right = rng.binomial(n, rng.beta(a, b, (EVALUATIONS, problems)))
    # How many completions of a problem are right is beta-binomial.
    chances = [math.lgamma(c + a) + math.lgamma(n - c + b) for c in range(n + 1)]
    weights = np.array([math.comb(n, c) * math.exp(chances[c]) for c in range(n + 1)])
    # Values by the number of right completions.
    kinds = {"mean": ([c / n for c in range(n + 1)], HOLDS)}
    if n > 1:
        kinds["pass"] = ([pass_at_k(c, n, 4) for c in range(n + 1)], of_pass)
        kinds["maj"] = ([maj_at_k([c, n - c], {0}, 0, n) for c in range(n + 1)], HOLDS)
    for kind, (of_count, (lowest, highest)) in kinds.items():
        truth = float(np.array(of_count) @ weights / weights.sum())
        if kind == "mean":
            assert truth == pytest.approx(a / (a + b))
        values = np.array(of_count)[right].tolist()
        found = [estimate(row, problems * n) for row in values]
        share = sum(e.low <= truth <= e.high for e in found) / EVALUATIONS
        assert lowest <= share <= highest, f"{kind}: {share}"


def test_quantiles() -> None:
    shares = {0.5: 2.0, 0.99: 4.0, 0.25: 1.0, 0.26: 2.0, 1.0: 4.0}
    assert {share: quantile([1.0, 2.0, 3.0, 4.0], share) for share in shares} == shares
    assert quantile([7.0], 0.3) == 7.0
    of_tables = {4: 2.776, 9: 2.262, 31: 2.040, 1000: 1.962}  # Student's t
    found = {degrees: student_95(degrees) for degrees in of_tables}
    assert found == pytest.approx(of_tables, rel=0.005)
