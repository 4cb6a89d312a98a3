"""Statistics of paired evaluations: flips, the interval of a difference, p-values. Pure.

The value of a problem is the share of its completions that are right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_cli.evaluation.estimates import Z_95

MOST_EXACT = 16  # number of differing problems up to which all sign combinations are tried
DRAWS = 100_000  # random sign vectors beyond that
DRAWS_AT_ONCE = 2_000
SEED = 0


def paired(
    first: Mapping[int, tuple[int, int]], second: Mapping[int, tuple[int, int]]
) -> dict[str, Any]:
    """Compares one benchmark: accuracies, difference, interval, p-value and flipped rows.

    A row flips if its share of right completions is below one half in one evaluation and above it
    in the other; exactly one half is not a flip. With one completion a row, a flip is a change from
    wrong to right or from right to wrong.

    Args:
        first, second: (right completions, completions) of the same rows, at least one.
    """
    rows = list(first)
    a = np.array([first[row][0] / first[row][1] for row in rows])
    b = np.array([second[row][0] / second[row][1] for row in rows])
    differences = b - a
    single = all(side[row][1] == 1 for side in (first, second) for row in rows)
    to_right, to_wrong = (a < 0.5) & (b > 0.5), (a > 0.5) & (b < 0.5)
    if single:
        p_value = mcnemar(int(to_right.sum()), int(to_wrong.sum()))
    else:
        p_value = sign_flip(differences.tolist())
    return {
        "n": len(rows),
        "accuracy_first": math.fsum(a) / len(rows),
        "accuracy_second": math.fsum(b) / len(rows),
        "difference": math.fsum(differences) / len(rows),
        "interval_95": list(difference_interval(differences.tolist())),
        "p_value": p_value,
        "test": "mcnemar" if single else "sign_flip",
        "flipped_to_right": [row for row, flipped in zip(rows, to_right, strict=True) if flipped],
        "flipped_to_wrong": [row for row, flipped in zip(rows, to_wrong, strict=True) if flipped],
    }


def difference_interval(differences: Sequence[float]) -> tuple[float, float]:
    """Returns the 95% interval of the mean difference over problems.

    The adjusted Wald interval of paired shares (Bonett and Price 2012, J. Educ. Behav. Stat.
    37(4):479) adds two problems, with the differences +1 and -1. It stays valid with few or no
    differing problems, where Wald's collapses to a point. With several completions a problem, the
    added differences are ±s: s² is the mean square of the nonzero differences (1 without any).

    In simulations (see the tests) it covers the true difference in 93 to 97% of evaluations if
    about 7 problems or more differ, and in more if fewer do.

    Args:
        differences: each problem's difference in its share of right completions, in [-1, 1].
    """
    n = len(differences)
    squares = math.fsum(d * d for d in differences)
    differing = sum(d != 0 for d in differences)
    of_two = 2 * (squares / differing if differing else 1.0)
    centre = math.fsum(differences) / (n + 2)
    variance = (squares + of_two) / (n + 2) - centre**2
    half = Z_95 * math.sqrt(variance / (n + 2))
    return max(-1.0, centre - half), min(1.0, centre + half)


def mcnemar(to_right: int, to_wrong: int) -> float:
    """Returns the two-sided p-value of flips: the exact binomial test with probability 1/2.

    McNemar 1947, Psychometrika 12:153. Null hypothesis: both directions are equally likely.
    """
    flips = to_right + to_wrong
    tail = sum(math.comb(flips, i) for i in range(min(to_right, to_wrong) + 1))
    return min(1.0, 2 * tail / (1 << flips))


def sign_flip(differences: Sequence[float]) -> float:
    """Returns the two-sided p-value of the mean difference under random signs.

    Fisher's permutation test of pairs (Fisher 1935, The Design of Experiments, sec. 21): over all
    signs if at most `MOST_EXACT` problems differ, else over `DRAWS` seeded draws. b of m draws give
    (b + 1) / (m + 1), never 0 (Phipson and Smyth 2010, arXiv 1603.05766).
    """
    differing = np.array([d for d in differences if d != 0])  # [D]
    count = len(differing)
    # Sums of the same differences in another order differ by rounding only.
    least = abs(math.fsum(differing)) - 1e-9
    if count <= MOST_EXACT:
        numbers = np.arange(2**count, dtype=np.uint32)
        bits = (numbers[:, None] >> np.arange(count, dtype=np.uint32)) & 1  # [2^D, D]
        return int(_at_least(bits, differing, least).sum()) / (1 << count)
    rng = np.random.default_rng(SEED)
    as_large = 0
    for _ in range(DRAWS // DRAWS_AT_ONCE):
        drawn = rng.integers(0, 256, (DRAWS_AT_ONCE, -(-count // 8)), dtype=np.uint8)
        signs = np.unpackbits(drawn, axis=1)[:, :count]  # [draws, D]
        as_large += int(_at_least(signs, differing, least).sum())
    return (as_large + 1) / (DRAWS + 1)


def _at_least(
    bits: NDArray[Any], differing: NDArray[np.float64], least: float
) -> NDArray[np.bool_]:
    """Marks the rows of `bits` [M, D] (1: minus sign) whose absolute sum is at least `least`."""
    sums = (1.0 - 2.0 * bits) @ differing
    found: NDArray[np.bool_] = np.abs(sums) >= least
    return found
