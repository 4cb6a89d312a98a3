import math

import pytest
import torch
from torch import Tensor

from grpo_cli.algorithm.token_selection import clip_cov, covariance, entropy_threshold, top_share


def noise_for(number: int, seed: int = 0) -> Tensor:
    return torch.rand(number, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.05, 1 / 3, 0.999])
def test_threshold_is_the_quantile_of_torch(share: float, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    for size in [1, 2, 3, 4, 5, 10, 11, 100, 101, 1000, 4097, 30001]:
        values = torch.rand(size, generator=random, dtype=dtype)
        threshold = entropy_threshold(values, share)
        assert threshold == torch.quantile(values, 1 - share).item(), size


def test_threshold_keeps_all_that_tie() -> None:
    values = torch.tensor([1.0, 5.0, 5.0, 5.0, 5.0])
    assert (values >= entropy_threshold(values, 0.2)).tolist() == [False] + [True] * 4
    assert (torch.ones(7) >= entropy_threshold(torch.ones(7), 0.2)).all()


def test_threshold_of_no_value_keeps_none() -> None:
    assert entropy_threshold(torch.zeros(0), 0.2) == math.inf


def test_covariance_by_hand() -> None:
    logprobs = torch.tensor([-1.0, -3.0, -2.0])  # mean −2
    advantages = torch.tensor([2.0, -1.0, -1.0])  # mean 0
    assert covariance(logprobs, advantages).tolist() == [2.0, 1.0, 0.0]
    shifted = covariance(logprobs - 5, advantages + 3)
    assert shifted.tolist() == [2.0, 1.0, 0.0]


@pytest.mark.parametrize(("share", "number"), [(0.1, 10), (0.255, 25), (1e-6, 1), (0.5, 50)])
def test_clip_cov_takes_exactly_its_share_of_all_tokens(share: float, number: int) -> None:
    cov = torch.cat([torch.full((60,), 2.0), torch.zeros(40)])  # 60 of 100 within the bounds
    chosen = clip_cov(cov, noise_for(100), cov_share=share, cov_low=1.0, cov_high=5.0)
    assert chosen.sum() == number


def test_clip_cov_takes_only_what_lies_strictly_within_the_bounds() -> None:
    cov = torch.tensor([1.0, 5.0, -2.0, 7.0, 1.1, 4.9])
    chosen = clip_cov(cov, noise_for(6), cov_share=1.0, cov_low=1.0, cov_high=5.0)
    assert chosen.tolist() == [False, False, False, False, True, True]


def test_clip_cov_of_nothing_takes_nothing() -> None:
    none = clip_cov(torch.zeros(3), noise_for(3), cov_share=0.5, cov_low=1.0, cov_high=5.0)
    assert none.tolist() == [False] * 3
    assert none.dtype == torch.bool
    assert clip_cov(
        torch.zeros(0), torch.zeros(0), cov_share=0.5, cov_low=1.0, cov_high=5.0
    ).shape == (0,)


def test_clip_cov_does_not_depend_on_the_tokens_order() -> None:
    cov, noise = noise_for(50, seed=1) * 4, noise_for(50)
    chosen = clip_cov(cov, noise, cov_share=0.2, cov_low=1.0, cov_high=3.0)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(2))
    shuffled = clip_cov(cov[order], noise[order], cov_share=0.2, cov_low=1.0, cov_high=3.0)
    assert chosen.sum() == 10
    assert shuffled.tolist() == chosen[order].tolist()


def test_clip_cov_draws_by_the_noise_and_not_by_the_covariance() -> None:
    """Over many draws each token within the bounds is as likely as any other."""
    cov = torch.tensor([1.5, 2.0, 3.0, 4.5, 0.0])
    taken = sum(
        clip_cov(cov, noise_for(5, seed), cov_share=0.2, cov_low=1.0, cov_high=5.0).long()
        for seed in range(2000)
    )
    assert taken[:4].min() > 420  # 500 each, with a standard deviation of 19
    assert taken.sum() == 2000


def test_top_share_by_hand() -> None:
    cov, noise = torch.tensor([0.5, -9.0, 3.0, 1.0, 2.0]), torch.rand(5)
    assert top_share(cov, noise, cov_share=0.4).tolist() == [False, False, True, False, True]
    assert top_share(cov, noise, cov_share=0.59).sum() == 2  # 2.95 is rounded down
    assert top_share(cov, noise, cov_share=1.0).all()
    assert top_share(cov, noise, cov_share=1e-6).tolist() == [False, False, True, False, False]
    assert top_share(torch.zeros(0), torch.zeros(0), cov_share=0.5).shape == (0,)
    assert top_share(torch.zeros(1), torch.zeros(1), cov_share=0.5).tolist() == [True]


def test_top_share_takes_no_more_than_its_share_where_tokens_tie() -> None:
    cov = torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0])
    noise = torch.tensor([0.9, 0.5, 0.1, 0.3, 0.0])
    assert top_share(cov, noise, cov_share=0.6).tolist() == [False, True, True, True, False]


@pytest.mark.parametrize("size", [1, 2, 10, 999, 5000])
@pytest.mark.parametrize("share", [2e-3, 0.1, 0.5])
def test_top_share_is_the_share_that_topk_finds(size: int, share: float) -> None:
    cov = torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    number = max(1, int(share * size))
    expected = torch.zeros(size, dtype=torch.bool)
    expected[cov.topk(number).indices] = True
    assert top_share(cov, torch.rand(size), cov_share=share).tolist() == expected.tolist()
