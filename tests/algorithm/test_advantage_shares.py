import math

import pytest
import torch
from torch import Tensor

from grpo_cli.algorithm.advantages import advantage_shares, group_relative, opo, pass_at_k, rloo
from tests.tables import table

NAN = math.nan


def shares(advantages: Tensor, parts: list[list[list[float]]], **given: Tensor) -> list[float]:
    """Shares of functions whose values are given as [P][R][G]."""
    values = torch.tensor(parts, dtype=torch.float64).transpose(1, 2)
    total = given.get("total", values.sum(-1))
    counted = given.get("counted", torch.ones_like(total, dtype=torch.bool))
    found: list[float] = advantage_shares(advantages, values, total, counted).tolist()
    return found


@table(
    "parts, expected",
    [
        ([[1, 0, 1, 0], [0, 0, 1, 1]], [0.5, 0.5]),
        ([[1, 0, 1, 0], [3, 3, 3, 3]], [1.0, 0.0]),  # the second is constant
        ([[3, 0, 3, 0], [0, 0, 1, 1]], [0.9, 0.1]),  # variances 9/4 and 1/4, uncorrelated
        ([[2, 0, 2, 0], [0, 1, 0, 1]], [2.0, -1.0]),  # the second pulls against the sum
        ([[1, 0], [1, 0]], [0.5, 0.5]),
    ],
)
def test_shares_by_hand(parts: list[list[float]], expected: list[float]) -> None:
    rewards = torch.tensor(parts, dtype=torch.float64).sum(0, keepdim=True)
    for advantages in (group_relative(rewards, scale="group"), rloo(rewards)):
        assert shares(advantages, [parts]) == pytest.approx(expected, abs=1e-6)


def test_a_group_counts_by_the_square_of_its_advantages() -> None:
    """Scaled by its group, each group has the same variance; unscaled, 4 times the second's."""
    parts = [[[2, 0], [0, 0]], [[0, 0], [1, 0]]]
    rewards = torch.tensor([[2.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    scaled = group_relative(rewards, scale="group")
    assert shares(scaled, parts) == pytest.approx([0.5, 0.5], abs=1e-3)
    assert shares(rloo(rewards), parts) == pytest.approx([0.8, 0.2])


def test_a_baseline_that_is_the_same_for_a_group_changes_nothing() -> None:
    parts = [[[1, 0, 1, 0], [0, 0, 1, 1]]]
    rewards = torch.tensor([[1.0, 0.0, 2.0, 1.0]], dtype=torch.float64)
    advantages = opo(rewards, torch.tensor([[9.0, 1.0, 1.0, 1.0]], dtype=torch.float64))
    assert shares(advantages, parts) == pytest.approx([0.5, 0.5])


def test_a_rule_that_is_not_linear_shares_what_varies_with_the_reward() -> None:
    """Only the best of the group gets an advantage that the others do not have."""
    parts = [[[1, 0, 0, 0], [0, 0.1, 0.2, 0]]]
    rewards = torch.tensor([[1.0, 0.1, 0.2, 0.0]], dtype=torch.float64)
    first, second = shares(pass_at_k(rewards, k=2), parts)
    assert first + second == pytest.approx(1.0)
    assert first > 0.95


def test_completions_without_a_reward_or_excluded_ones_have_no_share() -> None:
    parts = [[[1, 0, 7], [0, 0, 0]], [[0, 0, 0], [1, 0, 0]]]
    total = torch.tensor([[1.0, 0.0, NAN], [1.0, 0.0, NAN]], dtype=torch.float64)
    advantages = rloo(total)
    assert shares(advantages, parts, total=total) == pytest.approx([0.5, 0.5])
    counted = torch.tensor([[True, True, True], [False, True, True]])
    assert shares(advantages, parts, total=total, counted=counted) == pytest.approx([2 / 3, 1 / 3])


def test_the_rest_is_of_what_no_function_gave() -> None:
    """A KL of 0 and 1 in the reward that falls from 1 to -1."""
    total = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    assert shares(rloo(total), [[[1, 0]]], total=total) == pytest.approx([0.5])


@table("rewards", [[1.0, 1.0], [NAN, NAN], [NAN, 2.0]])
def test_there_are_no_shares_without_an_advantage(rewards: list[float]) -> None:
    total = torch.tensor([rewards], dtype=torch.float64)
    values = total.nan_to_num().tolist()
    assert shares(rloo(total), [values], total=total) == []
