"""The merge of two parts of an attention by their log-sum-exp."""

import math

import pytest
import torch

from grpo_cli.models.kernels.plain import merge


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
