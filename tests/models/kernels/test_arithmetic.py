"""Attention with its log-sum-exp, and the merge of two."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_cli.models.kernels import arithmetic
from grpo_cli.models.kernels.arithmetic import merge
from tests.models.kernels.layouts import DTYPES, KERNELS


def test_merge_by_hand() -> None:
    # One key of weight 1 and value 1; keys of weight 3 together and value 5: (1 + 15) / 4.
    out, lse = merge(
        torch.tensor([[1.0]]), torch.zeros(1), torch.tensor([[5.0]]), torch.tensor([math.log(3)])
    )
    assert out.tolist() == [[pytest.approx(4.0)]]
    assert lse.tolist() == [pytest.approx(math.log(4))]


def test_merge_with_nothing_seen_leaves_the_other() -> None:
    out, lse = merge(
        torch.tensor([[2.0]]), torch.tensor([7.0]), torch.zeros(1, 1), torch.tensor([-torch.inf])
    )
    assert (out.tolist(), lse.tolist()) == ([[2.0]], [7.0])


@KERNELS
@DTYPES
def test_flash_with_a_mask(dtype: torch.dtype, tolerance: float) -> None:
    random = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 3, n, 8, generator=random).to(dtype) for n in (4, 6, 6))
    mask = torch.zeros(2, 1, 1, 6, dtype=dtype)
    mask[1, ..., 4:] = -torch.inf
    out, lse = arithmetic.flash(q, k, v, mask=mask, scale=0.3)
    scores = q.double() @ k.double().transpose(-1, -2) * 0.3 + mask.double()
    assert (out - scores.softmax(-1) @ v.double()).abs().max() < tolerance
    assert (lse - scores.logsumexp(-1)).abs().max() < tolerance
