"""Work divided over processes: whole groups, by what each is expected to take. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

UNEVEN = 1.03  # of the mean: below that the busiest process is left as it is


def minibatch_of(positions: Iterable[int], minibatches: int) -> dict[int, int]:
    """The minibatch of each group: stretches of about the same number, in the order of positions.

    So what is trained on together does not depend on the number of processes.
    """
    in_order = sorted(positions)
    return {p: place * minibatches // len(in_order) for place, p in enumerate(in_order)}


def moves(owners: Mapping[int, int], works: Mapping[int, float], size: int) -> dict[int, int]:
    """Returns the groups to move so that no process has much more work than the others.

    Args:
        owners: the process of each group, by its position. works: what each group takes.

    Returns:
        The new process of each group that moves: as few as it takes.
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
        # What is smaller than the gap brings the larger of the two down; half of it the most.
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
