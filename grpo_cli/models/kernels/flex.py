"""Computes attention of a complete row with FlexAttention and a block mask.

PyTorch compiles a kernel for the mask, in any precision on CUDA (arXiv 2412.05496). On the CPU,
torch 2.13 supports only the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from grpo_cli.models.kernels.plain import by_head
from grpo_cli.records import on_device

if TYPE_CHECKING:
    from grpo_cli.models.attention import Layout

BLOCK = 128  # tokens along each side of a block


@cache
def compiled() -> Callable[..., Any]:
    """Returns FlexAttention compiled for rows of any length."""
    return torch.compile(flex_attention, dynamic=True)


class Flex:
    """Computes segments and prefixes in one call, and skips blocks that are completely masked."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        """function: replaces the compiled `flex_attention`."""
        self.function = function or compiled()

    def attend(
        self, layout: Layout, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """Returns the outputs [N, Hq, D]; see `ByParts.attend`."""
        out: Tensor = self.function(
            *(by_head(t) for t in (query, key, value)),
            block_mask=layout.block_mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out[0].transpose(0, 1)


def block_mask(layout: Layout, size: int = BLOCK) -> BlockMask:
    """Builds the mask of a row of N tokens from its ranges; no tensor of N x N exists.

    Token q attends to token k if both are in one segment and k is not after q, or if k is in the
    prefix of q's segment. A token has at most one prefix.
    """
    count = max(end for _, end in layout.segments)
    blocks = -(-count // size)
    number, first, last = (torch.zeros(count, dtype=torch.int32) for _ in range(3))
    touched = torch.zeros(blocks, blocks, dtype=torch.bool)  # blocks that are not fully masked
    whole = torch.zeros(blocks, blocks, dtype=torch.bool)  # blocks without any mask
    for n, (start, end) in enumerate(layout.segments):
        number[start:end] = n
        inner = slice(-(-start // size), end // size)  # blocks completely inside
        outer = slice(start // size, -(-end // size))
        touched[outer, outer] |= torch.ones_like(touched[outer, outer]).tril()
        whole[inner, inner] |= torch.ones_like(whole[inner, inner]).tril(-1)
    for p in layout.prefixes:
        first[p.first : p.last], last[p.first : p.last] = p.start, p.end
        touched[p.first // size : -(-p.last // size), p.start // size : -(-p.end // size)] = True
        whole[-(-p.first // size) : p.last // size, -(-p.start // size) : p.end // size] = True
    number, first, last = (on_device(t, layout.device) for t in (number, first, last))

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = (number[query] == number[key]) & (query >= key)
        return own | ((key >= first[query]) & (key < last[query]))

    def listed(where: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (number of key blocks per query block, their indices first in each row)."""
        order = where.int().argsort(dim=-1, descending=True, stable=True).int()
        counts = where.sum(-1, dtype=torch.int32)
        return tuple(on_device(t[None, None], layout.device) for t in (counts, order))  # type: ignore[return-value]

    return BlockMask.from_kv_blocks(
        *listed(touched & ~whole),
        *listed(whole),
        BLOCK_SIZE=size,
        mask_mod=sees,
        seq_lengths=(count, count),
    )
