"""Defines the base class of the kernels that compute attention by parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from grpo_cli.models.attention import Layout


class ByParts:
    """Computes segments and prefixes separately, and merges them by their log-sum-exp.

    The backward passes the merged output and log-sum-exp to each part, which returns that part's
    share of the gradient. The public functions of flash attention do not support this: their
    backward uses the output of their own forward.
    """

    reads_groups = True  # whether it supports grouped queries; False: key heads are repeated

    def attend(
        self, layout: Layout, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """Returns the outputs [N, Hq, D] of a packed row, differentiable once.

        Args:
            query: [N, Hq, D]. key, value: [N, Hkv, D], Hq a multiple of Hkv.
            scale: factor for the scores.
        """
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1 and not self.reads_groups:  # autograd sums over the repeats
            key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
        out: Tensor = _Attention.apply(query, key, value, layout, scale, self)  # type: ignore[no-untyped-call]
        return out

    def forward(self, layout: Layout, scale: float, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (out [N, Hq, D], lse [N, Hq]) of tensors (query, key, value)."""
        raise NotImplementedError

    def backward(self, layout: Layout, scale: float, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients of query, key, value from (grad, query, key, value, out, lse)."""
        raise NotImplementedError


class _Attention(torch.autograd.Function):
    """Maps queries, keys and values to outputs [N, Hq, D] by a layout."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: Layout,
        scale: float,
        kernel: ByParts,
    ) -> Tensor:
        out, lse = kernel.forward(layout, scale, query, key, value)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scale, ctx.kernel = layout, scale, kernel
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.kernel.backward(ctx.layout, ctx.scale, grad, *ctx.saved_tensors)
        return (*grads, None, None, None)
