"""Computes attention by parts with PyTorch operations, on any device and in any dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_cli.models.kernels.base import ByParts, by_head, flash, flash_backward, inf, merge, wide
from grpo_cli.records import on_device

if TYPE_CHECKING:
    from grpo_cli.models.attention import Layout


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
