"""Work divided over processes: literal cases, and what has to hold of any."""

import dataclasses
import itertools
import random
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest

from grpo_cli.config.recipe import Recipe
from grpo_cli.distributed.balance import split_balanced
from grpo_cli.records import RolloutStats
from grpo_cli.training.rollouts.collect import UNEVEN, _work, moves
from tests.tables import table

CASES = [random.Random(seed) for seed in range(60)]


def sums_of(owners: Mapping[int, int], works: Mapping[int, float], size: int) -> list[float]:
    sums = [0.0] * size
    for position, rank in owners.items():
        sums[rank] += works[position]
    return sums


def best_possible(works: Sequence[float], size: int) -> float:
    """What the busiest process has in the best of all divisions."""
    every = itertools.product(range(size), repeat=len(works))
    return min(max(sums_of(dict(enumerate(o)), dict(enumerate(works)), size)) for o in every)


@pytest.mark.parametrize(
    ("works", "size", "expected"),
    [
        # 7 | 6; 5 to the second; 4 to the first; 3 to either, so to the first
        ([3, 4, 5, 6, 7], 2, [[0, 1, 4], [2, 3]]),
        ([5, 5, 5, 5], 2, [[0, 2], [1, 3]]),  # equals are dealt in turn
        ([1, 9, 1, 1], 2, [[1], [0, 2, 3]]),  # one takes longer than all the others
        ([9, 1, 1, 1, 1, 1, 1], 3, [[0], [1, 3, 5], [2, 4, 6]]),
    ],
)
def test_split_balanced(works: list[float], size: int, expected: list[list[int]]) -> None:
    assert split_balanced(works, size) == expected


@table("dice", CASES)
def test_split_is_complete_and_balanced(dice: random.Random) -> None:
    size = dice.randint(1, 3)
    works = [float(dice.randint(0, 20)) for _ in range(dice.randint(0, 7))]
    parts = split_balanced(works, size)
    assert len(parts) == size
    assert sorted(itertools.chain(*parts)) == list(range(len(works)))
    assert all(part == sorted(part) for part in parts)
    busiest = max(sum(works[i] for i in part) for part in parts)
    assert busiest <= best_possible(works, size) * (4 / 3 - 1 / (3 * size)) + 1e-9  # Graham 1969


@pytest.mark.parametrize(
    ("owners", "works", "size", "expected"),
    [
        # 12 | 2: the 5 brings it to 7 | 7
        ({0: 0, 1: 0, 2: 0, 3: 1}, {0: 4, 1: 5, 2: 3, 3: 2}, 2, {1: 1}),
        # 9 | 3: three at once or two and one; one move is enough
        ({0: 0, 1: 0, 2: 0, 3: 1}, {0: 3, 1: 3, 2: 3, 3: 3}, 2, {0: 1}),
        ({0: 0, 1: 0, 2: 1}, {0: 100, 1: 3, 2: 98}, 2, {}),  # 2.5 % over the mean is left
        # 4 % is not: the 4 halves the difference of 8, and ends it
        ({0: 0, 1: 0, 2: 1}, {0: 100, 1: 4, 2: 96}, 2, {1: 1}),
        # 13 | 13 | 6 -> 11 | 13 | 8 -> 11 | 9 | 12 -> 11 | 11 | 10: what has moved moves on
        ({0: 1, 1: 1, 2: 2, 3: 0, 4: 0}, {0: 9, 1: 4, 2: 6, 3: 2, 4: 11}, 3, {3: 1, 1: 2}),
        # of equals the first, whatever order they are in (a set has 8 before 0)
        ({8: 0, 0: 0}, {8: 2, 0: 2}, 2, {0: 1}),
    ],
)
def test_moves(
    owners: dict[int, int], works: dict[int, float], size: int, expected: dict[int, int]
) -> None:
    assert moves(owners, works, size) == expected


def some_step(dice: random.Random) -> tuple[dict[int, int], dict[int, float], int]:
    """Groups at positions that are not in order, some of which take nothing."""
    size, number = dice.randint(1, 5), dice.randint(0, 20)
    positions = dice.sample(range(100), number)
    owners = {p: dice.randrange(size) for p in positions}
    return owners, {p: dice.choice([0.0, dice.uniform(1, 100)]) for p in positions}, size


@table("dice", CASES)
def test_moves_make_it_better_until_no_single_one_would(dice: random.Random) -> None:
    owners, works, size = some_step(dice)
    found = moves(owners, works, size)
    before, after = sums_of(owners, works, size), sums_of(owners | found, works, size)
    assert max(after) <= max(before)
    assert not found or sum(s * s for s in after) < sum(s * s for s in before)
    assert all(owners[p] != rank for p, rank in found.items())
    assert all(works[p] > 0 for p in found), "a group that takes nothing is left where it is"
    assert set(found.values()) <= set(range(size))
    busiest, gap = after.index(max(after)), max(after) - min(after)
    if max(after) <= UNEVEN * sum(after) / size:
        return
    final = owners | found
    assert not [p for p, rank in final.items() if rank == busiest and 0 < works[p] < gap]


def test_every_process_finds_the_same_moves() -> None:
    dice, size = random.Random(1), 4
    owners = {p: dice.randrange(2) for p in dice.sample(range(100), 16)}  # the other two idle
    works = {p: float(dice.randint(1, 9)) for p in owners}  # some of them equal
    found = moves(owners, works, size)
    assert len(found) > 2, "or else there would be little to agree on"
    for seed in range(20):
        order = random.Random(seed).sample(list(owners), len(owners))
        again = moves({p: owners[p] for p in order}, {p: works[p] for p in sorted(works)}, size)
        assert again == found
    assert moves(owners | found, works, size) == {}, "nothing is left to move"


@pytest.mark.parametrize(
    ("changes", "entropy_coef", "works"),
    [
        ({}, 0.0, [0.0, 11.0]),  # 3 of the prompt, twice 4 of its completions
        ({"policy": "kl_cov"}, 0.0, [11.0, 11.0]),
        ({}, 0.01, [11.0, 11.0]),
    ],
)
def test_work_of_groups(changes: dict[str, str], entropy_coef: float, works: list[float]) -> None:
    recipe = Recipe()
    recipe.loss = dataclasses.replace(recipe.loss, **changes)  # type: ignore[arg-type]
    bonus = SimpleNamespace(value=lambda loss: entropy_coef)
    policy = SimpleNamespace(reference=None, router_coef=0.0)
    run = SimpleNamespace(recipe=recipe, policy=policy, state=SimpleNamespace(entropy_bonus=bonus))
    groups = [
        [RolloutStats(value, value, {}, {}, 3, 4, False, False, 4) for value in values]
        for values in ((1.0, 1.0), (1.0, 0.0))
    ]
    assert [_work(run, group) for group in groups] == works  # type: ignore[arg-type]
