"""Calls PyTorch's flash attention for rows of unequal length: CUDA, half precision.

`torch.nn.attention.varlen.varlen_attn` calls the same two operators. They are called directly here,
because its backward takes the output of its own forward and no other (`base.ByParts`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_cli.models.kernels.ragged import Ragged, RaggedKernel

HALVES = (torch.float16, torch.bfloat16)


class Varlen(RaggedKernel):
    """Computes each part with an operator of torch, which reads grouped key heads as they are."""

    def __init__(
        self,
        forward: Callable[..., Any] | None = None,
        backward: Callable[..., Any] | None = None,
    ) -> None:
        """forward, backward: in place of torch's `_flash_attention_forward` and `_backward`."""
        self.run = forward or torch.ops.aten._flash_attention_forward
        self.run_backward = backward or torch.ops.aten._flash_attention_backward

    def part(
        self, r: Ragged, scale: float, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns (out [M, Hq, D], lse [M, Hq]); see `RaggedKernel`."""
        out, lse, *_ = self.run(query, key, value, *r.ranges, 0.0, r.causal, False, scale=scale)
        return out, lse.transpose(0, 1).contiguous()

    def part_backward(self, r: Ragged, scale: float, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients of queries, keys and values; see `RaggedKernel`."""
        grad, query, key, value, out, lse = tensors
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
        grads: tuple[Tensor, ...] = self.run_backward(
            grad.contiguous(), query, key, value, out, lse.transpose(0, 1).contiguous(), *r.ranges,
            0.0, r.causal, no_dropout, no_dropout, scale=scale,
        )  # fmt: skip
        return grads


class RepeatedVarlen(Varlen):
    """Computes the same with key heads repeated, where the operator refuses grouped ones."""

    reads_groups = False
