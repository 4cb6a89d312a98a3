"""Linear layers that hold their weight in 8 bits and compute with it dequantized.

bitsandbytes' own product of such a layer (LLM.int8(), arXiv 2208.07339) rounds the inputs to 8 bits
too. A model whose dequantized weights are merged and sent elsewhere would not round them, and would
be another policy than the one that is trained.
"""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.nn import Linear8bitLt
from torch import Tensor

from grpo_cli.models.quantization import dequantized


class _Product(torch.autograd.Function):
    """Computes x @ W.T and its gradient for x; W is dequantized again for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.weight = weight
        return x @ dequantized(weight).to(x.dtype).T

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (grad,) = grads
        return grad @ dequantized(ctx.weight).to(grad.dtype), None


class WeightOnlyInt8(Linear8bitLt):  # type: ignore[misc]
    """A layer of bitsandbytes with 8-bit weights, whose inputs are not rounded."""

    compute_dtype: torch.dtype

    @classmethod
    def replace(cls, layer: Linear8bitLt, compute_dtype: torch.dtype) -> None:
        """Turns a layer with quantized weights into one of this class, in place."""
        layer.__class__ = cls
        layer.compute_dtype = compute_dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            inputs = x.to(self.compute_dtype)
            out: Tensor = _Product.apply(inputs, self.weight)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.to(x.dtype)
