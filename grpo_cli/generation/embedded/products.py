"""Matrix products with a decoder's weights while it decodes, in oneDNN's layout on the CPU.

The product of a few rows with a large weight takes at best as long as reading the weight. The BLAS
behind `F.linear` copies the weight into another layout in each call; oneDNN, which torch ships,
does so once (`Product.of`). The results equal `F.linear`'s, in float32 except for rounding. In
float32, with up to 1,024 input features, the result of a row does not depend on the number of rows
(seen with AVX-512). With more features, and in bfloat16, few rows may differ in the last bits.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import PreTrainedModel

from grpo_cli.models.memory import total_memory

# Size of a weight from which oneDNN is faster: its call overhead is 10 µs above `F.linear`'s.
LARGE = 2**17
# Maximum share of memory for the copies. It is a share of total memory, not of free memory, since
# rounding must not depend on what else runs on the machine.
SHARE = 1 / 8
ARCHITECTURES = ("x86_64", "AMD64")  # CPU types on which oneDNN was measured to be faster


@dataclass(frozen=True)
class Product:
    """Multiplies [N, in] by one weight [out, in], or by several together."""

    weights: tuple[Tensor, ...]  # [out, in] each
    biases: tuple[Tensor | None, ...]
    packed: Tensor | None = None  # all weights together in oneDNN's layout
    packed_bias: Tensor | None = None  # [sum of out]

    @classmethod
    def of(cls, *linears: Any, prepacks: torch.dtype | None) -> Product:
        """Reads the weights of linear layers.

        Args:
            prepacks: dtype in which large weights are copied into oneDNN's layout; None: they are
                not copied.
        """
        weights: tuple[Tensor, ...] = tuple(linear.weight for linear in linears)
        biases: tuple[Tensor | None, ...] = tuple(linear.bias for linear in linears)
        is_large = sum(weight.numel() for weight in weights) >= LARGE
        is_float = all(w.dtype in (torch.float32, prepacks) for w in weights)
        if prepacks is None or not (is_large and is_float):
            return cls(weights, biases)
        together = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(together.to(prepacks))
        if all(bias is None for bias in biases):
            return cls(weights, biases, packed)
        pairs = zip(weights, biases, strict=True)
        full = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in pairs])
        return cls(weights, biases, packed, full.to(prepacks))

    @property
    def fuses(self) -> bool:
        """Whether oneDNN fuses the next operation; in 16 bit this would change the rounding."""
        return self.packed is not None and self.packed.dtype == torch.float32

    def __call__(self, x: Tensor) -> Tensor:
        """Computes [N, in] -> [N, sum of out]."""
        if self.packed is not None:
            return self._packed(x, "none")
        parts = [F.linear(x, *part) for part in zip(self.weights, self.biases, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def silu(self, x: Tensor) -> Tensor:
        """Applies SiLU (arXiv 1606.08415) to the product."""
        return self._packed(x, "swish") if self.fuses else F.silu(self(x))

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """Multiplies the product by another tensor [N, sum of out]."""
        return self._packed(x, "mul", other) if self.fuses else self(x) * other

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """Adds another tensor [N, sum of out] to the product."""
        return self._packed(x, "add", other) if self.fuses else self(x) + other

    def _packed(self, x: Tensor, then: str, other: Tensor | None = None) -> Tensor:
        assert self.packed is not None
        operator, x = torch.ops.mkldnn._linear_pointwise, x.to(self.packed.dtype)
        if other is None:
            product: Tensor = operator.default(x, self.packed, self.packed_bias, then, [], "")
        else:
            product = operator.binary(x, other, self.packed, self.packed_bias, then)
        return product


def packed_dtype(model: PreTrainedModel) -> torch.dtype | None:
    """Returns the dtype to prepack weights in; None if that is no faster or does not fit."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else model.dtype
    prepacks = (
        model.device.type == "cpu"
        and dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and platform.machine() in ARCHITECTURES
        and (dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
        and sum(w.numel() for w in model.parameters()) * dtype.itemsize <= SHARE * total_memory()
    )
    return dtype if prepacks else None
