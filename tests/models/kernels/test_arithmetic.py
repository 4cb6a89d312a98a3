"""The merge of two parts of an attention by their log-sum-exp."""

from __future__ import annotations

import torch

from grpo_cli.models.kernels.arithmetic import merge


def test_merge_with_nothing_seen_leaves_the_other() -> None:
    out, lse = merge(
        torch.tensor([[2.0]]), torch.tensor([7.0]), torch.zeros(1, 1), torch.tensor([-torch.inf])
    )
    assert (out.tolist(), lse.tolist()) == ([[2.0]], [7.0])
