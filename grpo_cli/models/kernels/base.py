"""Defines what kernels share: attention with its log-sum-exp, merging, and their base class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from grpo_cli.models.attention import Layout

inf = float("inf")


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a log-sum-exp: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def by_head(flat: Tensor) -> Tensor:
    """Reshapes [M, H, D] -> [1, H, M, D]."""
    return flat.transpose(0, 1)[None]


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merges attention to two sets of keys into attention to both.

    Args:
        out, other: outputs [..., D]. lse, other_lse: their log-sum-exps [...].

    Returns:
        (output [..., D], log-sum-exp [...]).
    """
    both = torch.logaddexp(lse, other_lse)
    share, other_share = (lse - both).exp()[..., None], (other_lse - both).exp()[..., None]
    return (out * share + other * other_share).to(out.dtype), both


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes attention and its log-sum-exp.

    Args:
        query: [n, H, M, D]. key, value: [n, H, K, D].
        mask: [n, 1, 1, K], added to the scores.

    Returns:
        (output [n, H, M, D], log-sum-exp [n, H, M]).
    """
    if query.device.type == "cpu":
        pair: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
        return pair
    scores = _scores(query, key, causal, scale)
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(value.dtype) @ value, lse


def flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of queries [n, H, M, D], keys and values [n, H, K, D].

    `grad`, `out` [n, H, M, D] and `lse` [n, H, M] may come from attention over more keys than
    these. The result is then these keys' share of the gradients.
    """
    grad, out, q, k, v = (t.to(lse.dtype) for t in (grad, out, query, key, value))
    if query.device.type == "cpu":  # in 16 bit, PyTorch's kernel takes up to 9 times as long
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    else:
        p = (_scores(query, key, causal, scale) - lse[..., None]).exp()  # [n, H, M, K]
        ds = p * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scale
        parts = ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad
    dq, dk, dv = (part.to(query.dtype) for part in parts)
    return dq, dk, dv


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    """Returns scores [n, H, M, K], −inf where a query does not attend to a key."""
    scores = (query @ key.transpose(-1, -2)).to(wide(query.dtype)) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -inf)
    return scores


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
