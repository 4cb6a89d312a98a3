"""Matrix products with a decoder's weights while it decodes, in oneDNN's layout on the CPU.

The product of a few rows with a large weight takes at best as long as reading the weight. The BLAS
behind `F.linear` copies the weight into another layout in each call; oneDNN, which torch ships,
does so once (`Product.of`). The results equal `F.linear`'s except for rounding. With up to
1,024 input features the result of a row does not depend on the number of rows (seen with AVX-512);
with more, the result of a single row may differ in the last bits.
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
    def of(cls, *linears: Any, prepacks: bool) -> Product:
        """Reads the weights of linear layers.

        Args:
            prepacks: copy weights into oneDNN's layout if they are large and float32.
        """
        weights: tuple[Tensor, ...] = tuple(linear.weight for linear in linears)
        biases: tuple[Tensor | None, ...] = tuple(linear.bias for linear in linears)
        is_large = sum(weight.numel() for weight in weights) >= LARGE
        if not (prepacks and is_large and all(w.dtype == torch.float32 for w in weights)):
            return cls(weights, biases)
        together = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(together)
        if all(bias is None for bias in biases):
            return cls(weights, biases, packed)
        zeros = (weight.new_zeros(len(weight)) for weight in weights)
        full = [z if b is None else b for z, b in zip(zeros, biases, strict=True)]
        return cls(weights, biases, packed, torch.cat(full))

    @property
    def width(self) -> int:
        """Number of output features of all weights together."""
        return sum(map(len, self.weights))

    def __call__(self, x: Tensor) -> Tensor:
        """Computes [N, in] -> [N, sum of out]."""
        if self.packed is not None:
            return self._packed(x, "none")
        parts = [F.linear(x, *part) for part in zip(self.weights, self.biases, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def silu(self, x: Tensor) -> Tensor:
        """Applies SiLU (arXiv 1606.08415) to the product."""
        return F.silu(self(x)) if self.packed is None else self._packed(x, "swish")

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """Multiplies the product by another tensor [N, sum of out]."""
        return self(x) * other if self.packed is None else self._packed(x, "mul", other)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """Adds another tensor [N, sum of out] to the product."""
        return self(x) + other if self.packed is None else self._packed(x, "add", other)

    def _packed(self, x: Tensor, then: str, other: Tensor | None = None) -> Tensor:
        operator = torch.ops.mkldnn._linear_pointwise
        if other is None:
            product: Tensor = operator.default(x, self.packed, self.packed_bias, then, [], "")
        else:
            product = operator.binary(x, other, self.packed, self.packed_bias, then)
        return product


def may_prepack(model: PreTrainedModel) -> bool:
    """Returns whether to prepack a model's weights: oneDNN is faster and the copies fit."""
    return (
        model.device.type == "cpu"
        and model.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and platform.machine() in ARCHITECTURES
        and sum(w.nbytes for w in model.parameters()) <= SHARE * total_memory()
    )
