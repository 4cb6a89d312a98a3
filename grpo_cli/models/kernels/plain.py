"""Computes attention by parts with PyTorch operations, on any device and in any dtype.

The other kernels share its arithmetic: attention with its log-sum-exp, its gradients, the merge of
two attentions, and the base class `ByParts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_cli.records import on_device

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


@dataclass(frozen=True)
class Bucket:
    """n segments as rows of W columns, right-padded, so that causality hides the padding."""

    index: Tensor  # [n, W] index of each token in the row of N; padding: the segment's first token
    padding: Tensor | None  # [n, W] True on padding; None without padding
    places: Tensor | None  # indices of real tokens in [n · W]; None without padding

    @classmethod
    def of(cls, segments: Sequence[tuple[int, int]], device: torch.device) -> Bucket:
        """Builds the bucket of n segments [start, end)."""
        lengths = [end - start for start, end in segments]
        width = max(lengths)
        columns = torch.arange(width)
        padding = columns >= torch.tensor(lengths)[:, None]
        index = torch.tensor([[start] for start, _ in segments]) + columns.masked_fill(padding, 0)
        index = on_device(index, device)
        if min(lengths) == width:
            return cls(index, None, None)
        real = [torch.arange(n * width, n * width + length) for n, length in enumerate(lengths)]
        return cls(index, on_device(padding, device), on_device(torch.cat(real), device))

    def take(self, flat: Tensor) -> Tensor:
        """Gathers [N, H, ...] -> [n, H, W, ...]."""
        return flat[self.index].transpose(1, 2)

    def put(self, flat: Tensor, rows: Tensor) -> None:
        """Writes rows [n, H, W, ...] into flat [N, H, ...], except padding."""
        index, rows = self.index.flatten(), rows.transpose(1, 2).flatten(0, 1)
        if self.places is not None:
            index, rows = index[self.places], rows[self.places]
        flat[index] = rows

    def blank(self, rows: Tensor, value: float) -> Tensor:
        """Returns rows [n, H, W, ...] with `value` on the padding."""
        if self.padding is None:
            return rows
        mask = self.padding[:, None].reshape(len(rows), 1, -1, *[1] * (rows.ndim - 3))
        return rows.masked_fill(mask, value)


class Plain(ByParts):
    """Computes segments in padded buckets and prefixes one by one."""

    reads_groups = False

    def forward(self, layout: Layout, scale: float, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (out, lse) of tensors (query, key, value)."""
        query, key, value = tensors
        out = torch.empty_like(query)  # [N, H, D]
        lse = query.new_empty(query.shape[:2], dtype=wide(query.dtype))  # [N, H]
        for bucket in layout.buckets:
            rows = (bucket.take(t) for t in (query, key, value))
            part, part_lse = flash(*rows, causal=True, scale=scale)
            bucket.put(out, part)
            bucket.put(lse, part_lse)
        for p in layout.prefixes:
            queries = slice(p.first, p.last)
            k, v = (by_head(t[p.start : p.end]) for t in (key, value))
            part, part_lse = flash(by_head(query[queries]), k, v, scale=scale)
            out[queries], lse[queries] = merge(
                out[queries], lse[queries], part[0].transpose(0, 1), part_lse[0].transpose(0, 1)
            )
        return out, lse

    def backward(self, layout: Layout, scale: float, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients of query, key and value; see `ByParts.backward`."""
        grad, query, key, value, out, lse = tensors
        grads = [torch.empty_like(t) for t in (query, key, value)]
        for bucket in layout.buckets:
            q, k, v, o = (bucket.take(t) for t in (query, key, value, out))
            # On padding, the gradient is 0, and so is exp(score − inf).
            do, part_lse = bucket.blank(bucket.take(grad), 0), bucket.blank(bucket.take(lse), inf)
            parts = flash_backward(do, q, k, v, o, part_lse, causal=True, scale=scale)
            for total, part in zip(grads, parts, strict=True):
                bucket.put(total, part)
        for p in layout.prefixes:
            keys, queries = slice(p.start, p.end), slice(p.first, p.last)
            q, o, do = (by_head(t[queries]) for t in (query, out, grad))
            k, v = (by_head(t[keys]) for t in (key, value))
            part_lse = lse[queries].transpose(0, 1)[None]
            parts = flash_backward(do, q, k, v, o, part_lse, causal=False, scale=scale)
            for total, rows, part in zip(grads, (queries, keys, keys), parts, strict=True):
                total[rows] += part[0].transpose(0, 1)
        return tuple(grads)
