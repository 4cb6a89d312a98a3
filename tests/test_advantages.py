import math

import pytest
import torch
from torch import Tensor

from grpo_cli.advantages import all_equal, group_relative, group_std

NAN = math.nan


def advantages(rewards: list[float], scale: str = "group") -> list[float]:
    out: list[float] = group_relative(torch.tensor([rewards]), scale=scale)[0].tolist()
    return out


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        # std = sqrt(4 · 0.25 / 3) = 0.57735027; 0.5 / (std + 0.0001) = 0.86587550
        ([1.0, 0.0, 0.0, 1.0], [0.8658755, -0.8658755, -0.8658755, 0.8658755]),
        # mean 0.25, std = sqrt((0.5625 + 3 · 0.0625) / 3) = 0.5
        ([1.0, 0.0, 0.0, 0.0], [1.4997001, -0.4999000, -0.4999000, -0.4999000]),
        # mean 2, std = sqrt(2): 1 / 1.41431356
        ([3.0, 1.0], [0.7070568, -0.7070568]),
        # a spread as small as eps: mean 1e-4, std = sqrt(2) · 1e-4, 1 / (1.41421356 + 1)
        ([2e-4, 0.0], [0.4142136, -0.4142136]),
    ],
)
def test_group_relative_by_hand(rewards: list[float], expected: list[float]) -> None:
    assert advantages(rewards) == pytest.approx(expected, abs=1e-6)


def test_scale_none_only_subtracts_the_mean() -> None:
    assert advantages([1.0, 0.0, 0.0, 0.0], "none") == [0.75, -0.25, -0.25, -0.25]
    assert advantages([5.0, -1.0, NAN], "none") == [3.0, -3.0, 0.0]


def test_unknown_scale_is_refused() -> None:
    with pytest.raises(AssertionError, match="batch"):
        group_relative(torch.zeros(1, 2), scale="batch")


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 0.1, 0.3, 1 / 3, 1e6 + 0.1])
def test_equal_rewards_get_exactly_zero(value: float, scale: str) -> None:
    for size in range(2, 40):
        rewards = torch.full((1, size), value, dtype=torch.float64)
        assert group_relative(rewards, scale=scale).eq(0).all()


def test_a_mean_of_equal_rewards_can_be_off_by_an_ulp() -> None:
    # Without this the test above could not fail.
    means = [torch.full((n,), 0.1, dtype=torch.float64).mean().item() for n in range(2, 40)]
    assert set(means) > {0.1}


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        # mean 0.5 and std sqrt(0.5) over the two that are there: 0.5 / 0.70720678
        ([1.0, NAN, 0.0, NAN], [0.7070068, 0.0, -0.7070068, 0.0]),
        ([NAN, 2.0, NAN], [0.0, 0.0, 0.0]),
        ([0.1, NAN, 0.1], [0.0, 0.0, 0.0]),
        ([NAN, NAN, NAN], [0.0, 0.0, 0.0]),
    ],
)
def test_nan_rewards_get_zero_and_do_not_count(rewards: list[float], expected: list[float]) -> None:
    assert advantages(rewards) == pytest.approx(expected, abs=1e-6)


@pytest.fixture
def rewards() -> Tensor:
    random = torch.Generator().manual_seed(0)
    out = torch.rand(5, 8, dtype=torch.float64, generator=random)
    out[1, 2] = NAN
    return out


def test_a_shift_of_a_groups_rewards_changes_nothing(rewards: Tensor) -> None:
    shift = torch.tensor([[3.0], [-7.0], [0.5], [100.0], [0.0]])
    torch.testing.assert_close(group_relative(rewards + shift), group_relative(rewards))


def test_groups_and_order_within_them_do_not_matter(rewards: Tensor) -> None:
    whole = group_relative(rewards)
    alone = torch.cat([group_relative(row[None]) for row in rewards])
    assert torch.equal(whole, alone)
    torch.testing.assert_close(group_relative(rewards.flip(-1)), whole.flip(-1))


def test_advantages_of_a_group_are_float32_and_add_up_to_zero(rewards: Tensor) -> None:
    out = group_relative(rewards)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.sum(-1), torch.zeros(5), atol=1e-5, rtol=0)


def test_group_std_by_hand() -> None:
    rows = [[1.0, 0.0, 0.0, 0.0], [2.0, 4.0, NAN, NAN], [7.0, NAN, NAN, NAN], [NAN] * 4]
    expected = [0.5, math.sqrt(2), 0.0, 0.0]
    assert group_std(torch.tensor(rows)).tolist() == pytest.approx(expected)


def test_all_equal_by_hand() -> None:
    rows = [[1.0, 1.0], [1.0, 1.0 + 1e-6], [1.0, NAN], [NAN, NAN], [-1.0, 1.0]]
    assert all_equal(torch.tensor(rows)).tolist() == [True, False, True, True, False]
