"""Rounds float32 numbers to bfloat16 stochastically."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 2**22  # numbers that are rounded at once: their random bits take 16 MB


def round_stochastically(values: Tensor, out: Tensor, generator: torch.Generator) -> None:
    """Rounds float32 values to bfloat16, up or down, so that the expected value is the value.

    A bfloat16 is the first 16 bits of a float32. A uniform number of 16 bits is added to the bits
    of the value, and the last 16 bits are dropped. A value that lies a quarter of the way from one
    bfloat16 to the next becomes the next with probability 1/4 (arXiv 2010.06192, section 3).

        1.0 + 1/512 lies a quarter of the way from 1.0 to 1.0 + 1/128:
        1.0 in 3 of 4 cases, 1.0078125 in the others; rounding to nearest always gives 1.0

    Infinite values and NaN stay as they are.

    Args:
        values: float32. out: bfloat16 of the same shape, which is overwritten.
        generator: of the random bits, on the device of the values.
    """
    assert values.dtype == torch.float32, values.dtype
    assert out.dtype == torch.bfloat16, out.dtype
    source, target = values.reshape(-1), out.view(-1)
    for start in range(0, len(source), BLOCK):
        block = source[start : start + BLOCK]
        bits = torch.randint(
            2**16, block.shape, dtype=torch.int32, device=block.device, generator=generator
        )
        bits.add_(block.view(torch.int32)).bitwise_and_(-(2**16))
        rounded = torch.where(block.isfinite(), bits.view(torch.float32), block)
        target[start : start + BLOCK].copy_(rounded)
