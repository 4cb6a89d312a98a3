import math
from dataclasses import replace

import pytest
import torch

from grpo_cli.algorithm.batch import collate
from grpo_cli.environments.episode import counts_by_tool
from grpo_cli.environments.protocol import ToolCall
from grpo_cli.models.micro_batches import dummy_sample
from grpo_cli.random_streams import derive_seed
from grpo_cli.records import Prompt
from tests.conftest import CPU, make_rollout


def test_collate_by_hand() -> None:
    a = make_rollout([5], [7, 8, 2], logprobs=[-0.5, -0.25, -1.0], advantage=1.5, weight=0.25)
    b = make_rollout([3, 4, 6], [9], logprobs=[-2.0], advantage=-0.5, weight=0.125)
    batch = collate([a, b], CPU)
    assert batch.loss_mask.tolist() == [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
    assert batch.weights.tolist() == [[0.25, 0.25, 0.25], [0.125, 0.0, 0.0]]
    assert batch.advantages.tolist() == [[1.5, 1.5, 1.5], [-0.5, 0.0, 0.0]]
    assert batch.sampling_logprobs.tolist() == [[-0.5, -0.25, -1.0], [-2.0, 0.0, 0.0]]
    assert batch.old_logprobs is None
    assert batch.ref_logprobs is None
    assert batch.high_entropy is None
    assert batch.cov_selected is None
    assert batch.loss_mask.dtype == batch.advantages.dtype == torch.float32


@pytest.mark.parametrize("name", ["old_logprobs", "ref_logprobs", "high_entropy", "cov_selected"])
def test_collate_pads_what_some_rows_have_and_says_nan_where_one_has_not(name: str) -> None:
    a, b = make_rollout([5], [7, 8], reward=1.0), make_rollout([5], [7], reward=1.0)
    assert getattr(collate([a, b], CPU), name) is None
    a = replace(a, **{name: torch.tensor([-1.0, -2.0])})
    found = getattr(collate([a, b], CPU), name)
    assert found[0].tolist() == [-1.0, -2.0]
    assert found[1, 0].isnan()
    assert found[1, 1] == 0, "padding"
    b = replace(b, **{name: torch.tensor([-6.0], dtype=torch.float64)})
    found = getattr(collate([a, b], CPU), name)
    assert found.tolist() == [[-1.0, -2.0], [-6.0, 0.0]]
    assert found.dtype == torch.float32


def test_advantages_of_a_completion_are_those_of_its_tokens_if_steps_were_rewarded() -> None:
    a, b = make_rollout([5], [7, 8, 9], advantage=0.5), make_rollout([5], [7, 8], advantage=2.0)
    assert a.advantages.tolist() == [0.5, 0.5, 0.5]
    a = replace(a, token_advantages=torch.tensor([3.0, 2.0, 1.0]))
    assert a.advantages.tolist() == [3.0, 2.0, 1.0], "the completion's own is part of them"
    assert collate([a, b], CPU).advantages.tolist() == [[3.0, 2.0, 1.0], [2.0, 2.0, 0.0]]


def test_tokens_that_a_tool_wrote_do_not_train() -> None:
    sampled = [True, False, False, True]
    a = make_rollout([5], [7, 8, 9, 2], reward=1.0, weight=0.5, is_sampled=sampled)
    b = make_rollout([5], [7, 8], reward=1.0, weight=0.25)
    assert (a.loss_tokens, b.loss_tokens) == (2, 2)
    batch = collate([a, b], CPU)
    assert batch.loss_mask.tolist() == [[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0]]
    assert batch.weights.tolist() == [[0.5, 0.0, 0.0, 0.5], [0.25, 0.25, 0.0, 0.0]]
    assert collate([b, a], CPU).loss_mask.tolist() == batch.loss_mask.flip(0).tolist()
    a = replace(a, excluded=True)
    assert a.loss_tokens == 0
    assert collate([a, b], CPU).loss_mask[0].tolist() == [0.0] * 4
    b = replace(b, completion=replace(b.completion, is_sampled=[False, False]))
    assert b.loss_tokens == 0
    assert collate([b], CPU).loss_mask.tolist() == [[0.0, 0.0]]


def test_a_sampled_pad_token_is_a_token_like_any_other() -> None:
    # 0 is what rows are padded with, and the tokenizer's pad id as well.
    batch = collate([make_rollout([0, 5], [7, 0, 0]), make_rollout([5], [0])], CPU)
    assert batch.loss_mask.tolist() == [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]


def test_a_rollout_without_a_reward_trains_on_nothing() -> None:
    nothing = make_rollout([5], [7, 8, 9], reward=math.nan)
    assert nothing.loss_tokens == 0
    batch = collate([nothing, make_rollout([5], [7, 8])], CPU)
    assert batch.loss_mask.tolist() == [[0.0, 0.0, 0.0], [1.0, 1.0, 0.0]]


@pytest.mark.parametrize("reference", [False, True])
def test_a_placeholder_trains_on_nothing_and_fits_what_is_computed(reference: bool) -> None:
    nothing = dummy_sample(Prompt.from_ids([0]), reference=reference)
    assert nothing.loss_tokens == 0
    batch = collate([nothing], CPU)
    assert batch.loss_mask.tolist() == [[0.0]]
    assert batch.weights.tolist() == [[0.0]]
    assert (batch.ref_logprobs is not None) == reference


def test_derive_seed_is_the_same_for_ever() -> None:
    assert derive_seed(0) == 4246866556266386882
    assert derive_seed(0, 1, 2) == 3662037204992188296


def test_derive_seed_tells_paths_apart() -> None:
    paths = [(a, b, c) for a in range(12) for b in range(12) for c in range(12)]
    seeds = {derive_seed(*path) for path in paths} | {derive_seed(1), derive_seed(1, 1)}
    assert len(seeds) == 12**3 + 2
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert all(0 <= s < 2**63 for s in seeds)
    assert max(seeds) > 2**62


def test_calls_are_counted_by_tool() -> None:
    calls = [ToolCall("add"), ToolCall("add", failed=True), ToolCall("sub", True, timed_out=True)]
    assert counts_by_tool(calls) == {"add": [2, 1, 0], "sub": [1, 1, 1]}
    assert counts_by_tool([]) == {}
