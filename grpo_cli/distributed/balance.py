"""Splits work of different sizes into parts of about the same size."""

from __future__ import annotations

from collections.abc import Sequence


def split_balanced(sizes: Sequence[float], parts: int) -> list[list[int]]:
    """Returns each part's indices into `sizes`, with about equal sums over the parts.

    Sizes are assigned in descending order, each to the part with the smallest sum (Graham 1969: at
    most 4/3 of the best division). Ties go to the part with the fewest members, then to the first.
    `split_balanced([3, 4, 5, 6, 7], 2)` is `[[0, 1, 4], [2, 3]]`.
    """
    members: list[list[int]] = [[] for _ in range(parts)]
    sums = [0.0] * parts
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        least = min(range(parts), key=lambda part: (sums[part], len(members[part]), part))
        members[least].append(i)
        sums[least] += sizes[i]
    return [sorted(part) for part in members]
