"""Calls PyTorch's varlen flash attention: CUDA, half precision.

`torch.nn.attention.varlen.varlen_attn` calls the same two operators. They are called directly here,
because its backward always uses the output of its own forward (`base.ByParts`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_cli.models.kernels.plain import ByParts, merge
from grpo_cli.records import on_device

if TYPE_CHECKING:
    from grpo_cli.models.attention import Layout

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Ragged:
    """Ranges of queries that each attend to a range of keys, as offsets for varlen kernels."""

    queries: Tensor | slice  # [M] token indices; slice(None): all tokens
    keys: Tensor | slice  # [K]
    query_offsets: Tensor  # [ranges + 1] int32
    key_offsets: Tensor  # [ranges + 1] int32
    most_queries: int
    most_keys: int
    causal: bool

    @classmethod
    def of(
        cls,
        queries: Sequence[tuple[int, int]],
        keys: Sequence[tuple[int, int]],
        device: torch.device,
        *,
        causal: bool,
    ) -> Ragged:
        """Builds offsets from ranges [start, end); causal ranges must cover all tokens."""

        def tokens(ranges: Sequence[tuple[int, int]]) -> Tensor | slice:
            if causal:
                return slice(None)
            return on_device(torch.cat([torch.arange(*r) for r in ranges]), device)

        def offsets(lengths: Sequence[int]) -> Tensor:
            return on_device(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), device)

        m, n = [b - a for a, b in queries], [b - a for a, b in keys]
        return cls(tokens(queries), tokens(keys), offsets(m), offsets(n), max(m), max(n), causal)

    @property
    def ranges(self) -> tuple[Tensor, Tensor, int, int]:
        """The operator's arguments for the ranges: offsets and maximum lengths."""
        return self.query_offsets, self.key_offsets, self.most_queries, self.most_keys


class Varlen(ByParts):
    """Computes all segments in one call and all prefixes in another, without padding.

    The operator supports grouped key heads directly.
    """

    def __init__(
        self, forward: Callable[..., Any] | None = None, backward: Callable[..., Any] | None = None
    ) -> None:
        """forward, backward: replace torch's `_flash_attention_forward` and `_backward`."""
        self.run = forward or torch.ops.aten._flash_attention_forward
        self.run_backward = backward or torch.ops.aten._flash_attention_backward

    def forward(self, layout: Layout, scale: float, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (out, lse) of tensors (query, key, value)."""
        query, key, value = tensors
        segments, *prefixes = layout.ragged
        out, lse = self._part(segments, scale, query, key, value)
        for r in prefixes:
            part, part_lse = self._part(r, scale, query[r.queries], key[r.keys], value[r.keys])
            merged = merge(out[r.queries], lse[r.queries], part, part_lse)
            out[r.queries], lse[r.queries] = merged
        return out, lse

    def backward(self, layout: Layout, scale: float, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients of query, key, value from (grad, query, key, value, out, lse)."""
        grad, query, key, value, out, lse = tensors
        segments, *prefixes = layout.ragged
        grads = self._part_backward(segments, scale, *tensors)
        for r in prefixes:
            do, q, o, s = (t[r.queries] for t in (grad, query, out, lse))
            parts = self._part_backward(r, scale, do, q, key[r.keys], value[r.keys], o, s)
            for total, rows, part in zip(grads, (r.queries, r.keys, r.keys), parts, strict=True):
                total.index_add_(0, rows, part)  # type: ignore[arg-type]
        return grads

    def _part(
        self, r: Ragged, scale: float, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns (out [M, Hq, D], lse [M, Hq]) for queries [M, Hq, D] and their key ranges."""
        out, lse, *_ = self.run(query, key, value, *r.ranges, 0.0, r.causal, False, scale=scale)
        return out, lse.transpose(0, 1).contiguous()

    def _part_backward(self, r: Ragged, scale: float, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients of query, key, value from (grad, query, key, value, out, lse)."""
        grad, query, key, value, out, lse = tensors
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
        grads: tuple[Tensor, ...] = self.run_backward(
            grad.contiguous(), query, key, value, out, lse.transpose(0, 1).contiguous(), *r.ranges,
            0.0, r.causal, no_dropout, no_dropout, scale=scale,
        )  # fmt: skip
        return grads
