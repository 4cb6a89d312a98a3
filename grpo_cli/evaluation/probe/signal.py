"""Estimates the share of groups whose rewards differ, for group sizes up to the samples. Pure.

A group of G completions trains only if its rewards are not all equal. Its share is estimated
without bias from n completions of each prompt: as the share of all draws of G of the n completions
whose rewards differ.

Two prompts with n = 4 completions, rewards 1 0 0 0 and 0 0 0 0: of the 6 pairs of the first prompt
3 differ, and none of the second, so that the share for G = 2 is (3/6 + 0) / 2 = 0.25.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from grpo_cli.evaluation.estimates import Estimate, estimate, student_95

SIZES = (2, 4, 8, 16, 32, 64)
Completions = tuple[Sequence[Hashable | None], Sequence[bool]]  # (rewards, excluded) of a prompt
LEAST_DEGREES = 4.0  # degrees of freedom; the quantile is then at most 2.78


def without_signal(
    rewards: Sequence[Hashable | None], excluded: Sequence[bool], size: int
) -> float:
    """Returns the probability that `size` completions, drawn without replacement, do not train.

    All existing rewards are equal, or all completions are excluded:

        P(equal) + P(excluded) - P(equal and excluded),   P(equal) = Σ_v C(c_v, G) / C(n, G)

    for counts c_v of the distinct rewards. The m completions without a reward may join any value,
    hence C(c_v + m, G) - C(m, G), and C(m, G) once. In integers up to the one division.

    Args:
        rewards: the reward of each completion; None: no reward function applied.
        excluded: whether loss.mask_truncated excludes it.
    """
    assert 1 <= size <= len(rewards), f"draws {size} of {len(rewards)} completions"
    pairs = [p for p in zip(rewards, excluded, strict=True) if p[0] is not None]
    none = len(rewards) - len(pairs)
    every = Counter(reward for reward, _ in pairs)
    out = Counter(reward for reward, is_out in pairs if is_out)
    ways = _equal(every.values(), none, size)
    ways += math.comb(out.total() + none, size) - _equal(out.values(), none, size)
    return ways / math.comb(len(rewards), size)


def _equal(counts: Iterable[int], none: int, size: int) -> int:
    """Returns the number of draws of `size` completions whose rewards are equal or missing."""
    joined = math.comb(none, size)
    return sum(math.comb(c + none, size) - joined for c in counts) + joined


def signal_share(prompts: Sequence[Completions], size: int) -> Estimate:
    """Estimates the share of groups of `size` completions whose rewards differ, without bias.

    Args:
        prompts: rewards and excluded completions of each prompt, as in `without_signal`.
    """
    shares = [1 - without_signal(*completions, size) for completions in prompts]
    return over_prompts(shares, sum(len(rewards) for rewards, _ in prompts))


def over_prompts(values: Sequence[float], completions: int) -> Estimate:
    """Returns the mean of the prompts' values with a 95% interval that suits few prompts.

    The variance is estimated from few values, hence the quantile of Student's t.
    """
    return estimate(values, completions, student_95(degrees_of_freedom(values)))


def degrees_of_freedom(values: Sequence[float]) -> float:
    """Returns the degrees of freedom of the values' variance, at least LEAST_DEGREES.

    The variance of n values with kurtosis κ has the relative error (κ - 1) / n, that of a χ² with
    2n / (κ - 1) degrees of freedom (Satterthwaite 1946, Biometrics Bulletin 2:110). Normal values
    have κ = 3. If a few prompts dominate, κ is larger: one 1 among 32 values has κ = 30.
    """
    n = len(values)
    mean = math.fsum(values) / n
    squares = [(value - mean) ** 2 for value in values]
    variance = math.fsum(squares) / n
    degrees = float(n - 1)
    if variance > 0:
        kurtosis = math.fsum(square**2 for square in squares) / n / variance**2
        if kurtosis > 1:
            degrees = min(degrees, 2 * n / (kurtosis - 1))
    return max(degrees, LEAST_DEGREES)
