"""Divides complete groups over processes by their expected work. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

UNEVEN = 1.03  # times the mean: below it, the busiest process keeps its groups


def minibatch_of(positions: Iterable[int], minibatches: int) -> dict[int, int]:
    """Returns the minibatch of each group: stretches of about equal size, in order of position.

    The minibatches therefore do not depend on the number of processes.
    """
    in_order = sorted(positions)
    return {p: place * minibatches // len(in_order) for place, p in enumerate(in_order)}


def moves(owners: Mapping[int, int], works: Mapping[int, float], size: int) -> dict[int, int]:
    """Returns the groups to move so that no process has much more work than the others.

    Args:
        owners: the process of each group, by its position. works: the work of each group.

    Returns:
        The new process of each group that moves; as few as needed.
    """
    sums = [0.0] * size
    own: list[set[int]] = [set() for _ in range(size)]
    for position, rank in owners.items():
        sums[rank] += works[position]
        own[rank].add(position)
    mean, moved = sum(sums) / size, dict[int, int]()
    for _ in range(len(owners)):
        most = max(range(size), key=lambda r: (sums[r], -r))
        least = min(range(size), key=lambda r: (sums[r], r))
        gap = sums[most] - sums[least]
        # A group smaller than the gap lowers the larger sum; one of half the gap lowers it most.
        fitting = [p for p in own[most] if 0 < works[p] < gap]
        if sums[most] <= UNEVEN * mean or not fitting:
            break
        best = min(fitting, key=lambda p: (abs(works[p] - gap / 2), p))
        own[most].remove(best)
        own[least].add(best)
        sums[most] -= works[best]
        sums[least] += works[best]
        moved[best] = least
    return {p: rank for p, rank in moved.items() if owners[p] != rank}
