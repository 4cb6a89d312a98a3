"""What a model is given of rollouts, by hand, and how they are split into micro-batches."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_cli.models.packing import (
    length,
    pack,
    packed_micro_batches,
    pad,
    padded_micro_batches,
    trains,
    unique_tokens,
)
from grpo_cli.records import Prompt, Rollout
from tests.conftest import CPU, make_rollout


def of_prompt(prompt: Prompt, *completions: Sequence[int]) -> list[Rollout]:
    return [replace(make_rollout(completion_ids=ids), prompt=prompt) for ids in completions]


A, B = Prompt(0, [10, 11, 12], "", {}), Prompt(1, [20], "", {})


def test_pack_by_hand() -> None:
    a, b = of_prompt(A, [1, 2, 3, 4], [5, 6, 7])
    (c,) = of_prompt(B, [8, 9])
    inputs = pack([a, c, b], CPU)  # prompts need not lie together
    assert inputs.input_ids.tolist() == [[10, 11, 12, 1, 2, 3, 5, 6, 20, 8]]
    assert inputs.arguments["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 3, 4, 0, 1]]
    # In the order that was given: a is predicted by 12, 1, 2, 3; c by 20, 8; b by 12, 5, 6.
    assert inputs.predictors.tolist() == [2, 3, 4, 5, 8, 9, 2, 6, 7]
    assert inputs.targets.tolist() == [1, 2, 3, 4, 8, 9, 5, 6, 7]
    assert inputs.attention_mask is None
    assert inputs.layout.segments == [(0, 3), (3, 6), (6, 8), (8, 9), (9, 10)]
    prefixes = [(p.start, p.end, p.first, p.last) for p in inputs.layout.prefixes]
    assert prefixes == [(0, 3, 3, 8), (8, 9, 9, 10)]
    assert inputs.layout.longest == 6


def test_completions_of_one_token() -> None:
    inputs = pack(of_prompt(A, [1], [2]), CPU)
    assert inputs.input_ids.tolist() == [[10, 11, 12]]
    assert inputs.predictors.tolist() == [2, 2]
    assert inputs.targets.tolist() == [1, 2]
    assert inputs.layout.segments == [(0, 3)]
    assert inputs.layout.prefixes == []


def test_pad_by_hand() -> None:
    (a,), (c,) = of_prompt(A, [1, 2]), of_prompt(B, [8, 0])
    inputs = pad([a, c], CPU)
    assert inputs.input_ids.tolist() == [[10, 11, 12, 1, 2], [0, 0, 20, 8, 0]]
    assert inputs.attention_mask.tolist() == [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]
    assert inputs.arguments["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]]
    assert inputs.predictors.tolist() == [2, 3, 7, 8]
    assert inputs.targets.tolist() == [1, 2, 8, 0]


def test_tokens_of_a_tool_are_read_and_not_predicted() -> None:
    a, b = of_prompt(A, [1, 2, 3, 4], [5, 6, 7])
    sampled = replace(a.completion, is_sampled=[True, False, True, False])
    a = replace(a, completion=sampled, reward=math.nan)
    for inputs, predictors in (
        (pack([a, b], CPU), [2, 4, 2, 6, 7]),
        (pad([a, b], CPU), [2, 4, 10, 11, 12]),
    ):
        assert inputs.predictors.tolist() == predictors
        assert inputs.targets.tolist() == [1, 3, 5, 6, 7]
    assert pack([a, b], CPU).input_ids.tolist() == [[10, 11, 12, 1, 2, 3, 5, 6]]
    assert trains([a, b], CPU).tolist() == [0, 0, 1, 1, 1]


def test_unique_tokens_by_hand() -> None:
    # Prompt: 3 tokens, 6 pairs. Completions of 4 and 1, of which 3 and 0 are fed: 3·3 + 6 pairs.
    assert unique_tokens(of_prompt(A, [1, 2, 3, 4], [5])) == (6, 21)
    assert unique_tokens([]) == (0, 0)


def groups_of(n: int) -> list[Rollout]:
    random = torch.Generator().manual_seed(0)

    def size(most: int) -> int:
        return int(torch.randint(1, most, (), generator=random))

    prompts = [Prompt(i, [5] * size(40), "", {}) for i in range(n)]
    return [r for p in prompts for r in of_prompt(p, *[[7] * size(40) for _ in range(4)])]


def padded_size(rollouts: Sequence[Rollout]) -> int:
    return pad(rollouts, CPU).input_ids.numel()


@pytest.mark.parametrize(
    ("split", "build"), [(packed_micro_batches, pack), (padded_micro_batches, pad)]
)
@pytest.mark.parametrize("budget", [1, 78, 1000])
def test_micro_batches_respect_the_budget(split: Any, build: Any, budget: int) -> None:
    rollouts = groups_of(12)
    micros = list(split(rollouts, budget))
    assert sorted(id(r) for m in micros for r in m) == sorted(map(id, rollouts))
    assert all(len(m) == 1 or build(m, CPU).input_ids.numel() <= budget for m in micros)
    assert all(micros)


def test_packed_micro_batches_fill_the_budget() -> None:
    rollouts = [
        r for row in range(2) for r in of_prompt(Prompt(row, [1] * 5, "", {}), *[[7] * 3] * 3)
    ]
    # A prompt of 5 and two tokens of each completion: 7, 9, 11 for one, two and three of a group.
    sizes = {b: [len(m) for m in packed_micro_batches(rollouts, b)] for b in (7, 9, 10, 11, 18, 22)}
    assert sizes == {
        7: [1] * 6,
        9: [2, 1, 2, 1],  # one of the first group, and the second's prompt: 14
        10: [2, 1, 2, 1],
        11: [3, 3],
        18: [4, 2],  # the second group's prompt is paid for again
        22: [6],
    }


def test_padded_micro_batches_fill_the_budget() -> None:
    rollouts = [make_rollout([5] * 3, [7] * 2) for _ in range(7)]
    sizes = {b: [len(m) for m in padded_micro_batches(rollouts, b)] for b in (14, 15, 35)}
    assert sizes == {14: [2, 2, 2, 1], 15: [3, 3, 1], 35: [7]}


def test_padded_rows_are_sorted_by_length() -> None:
    rollouts = groups_of(50)
    micros = list(padded_micro_batches(rollouts, 800))
    unpadded = sum(map(length, rollouts))
    assert sum(map(padded_size, micros)) < 1.1 * unpadded
    assert padded_size(rollouts) > 1.8 * unpadded
