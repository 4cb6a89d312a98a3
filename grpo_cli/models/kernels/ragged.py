"""Describes rows of unequal length by offsets, and computes attention by parts from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_cli.models.kernels.arithmetic import merge
from grpo_cli.models.kernels.base import ByParts
from grpo_cli.records import on_device

if TYPE_CHECKING:
    from grpo_cli.models.attention import Layout


@dataclass(frozen=True)
class Ragged:
    """Ranges of queries that each see a range of keys, as offsets: the form that kernels take."""

    queries: Tensor | slice  # [M] indices of the tokens; a slice: all of them
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
        """Builds the offsets of ranges [start, end); causal: of segments, which are all tokens."""

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
        """The arguments of a kernel that say which rows belong together."""
        return self.query_offsets, self.key_offsets, self.most_queries, self.most_keys


class RaggedKernel(ByParts):
    """Computes all segments in one call, and all prefixes in another, without padding."""

    def part(
        self, r: Ragged, scale: float, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns (out [M, Hq, D], lse [M, Hq]) of queries [M, Hq, D] that see ranges of keys."""
        raise NotImplementedError

    def part_backward(self, r: Ragged, scale: float, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients of tensors (grad, query, key, value, out, lse) 1 to 3."""
        raise NotImplementedError

    def forward(self, layout: Layout, scale: float, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (out, lse) of tensors (query, key, value)."""
        query, key, value = tensors
        segments, *prefixes = layout.ragged
        out, lse = self.part(segments, scale, query, key, value)
        for r in prefixes:
            part, part_lse = self.part(r, scale, query[r.queries], key[r.keys], value[r.keys])
            merged = merge(out[r.queries], lse[r.queries], part, part_lse)
            out[r.queries], lse[r.queries] = merged
        return out, lse

    def backward(self, layout: Layout, scale: float, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients of tensors (grad, query, key, value, out, lse) 1 to 3."""
        grad, query, key, value, out, lse = tensors
        segments, *prefixes = layout.ragged
        grads = self.part_backward(segments, scale, *tensors)
        for r in prefixes:
            do, q, o, s = (t[r.queries] for t in (grad, query, out, lse))
            parts = self.part_backward(r, scale, do, q, key[r.keys], value[r.keys], o, s)
            for total, rows, part in zip(grads, (r.queries, r.keys, r.keys), parts, strict=True):
                total.index_add_(0, rows, part)  # type: ignore[arg-type]
        return grads
