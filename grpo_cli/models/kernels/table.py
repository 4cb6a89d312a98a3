"""Lists the kernels in the order in which they are tried, with the requirements of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from grpo_cli.models.kernels.base import Kernel
from grpo_cli.models.kernels.flex import Flex
from grpo_cli.models.kernels.plain import Plain
from grpo_cli.models.kernels.varlen import HALVES, RepeatedVarlen, Varlen

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WIDEST = 256  # maximum head dimension of flash attention


@dataclass(frozen=True)
class Needs:
    """Describes the attention that a kernel must compute."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int  # 0: not known yet
    heads: int
    key_heads: int

    @classmethod
    def of(cls, model: PreTrainedModel, device: torch.device) -> Needs:
        """Reads a model's config, and autocast's dtype if it is enabled."""
        config = model.config.get_text_config(decoder=True)
        layers = getattr(config, "per_layer_config", None) or [config]  # for unequal layers
        heads = int(layers[0].num_attention_heads)
        dims = [getattr(c, "head_dim", None) or c.hidden_size // heads for c in layers]
        key_heads = getattr(layers[0], "num_key_value_heads", None) or heads
        dtype = model.dtype
        if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device.type)
        return cls(device, dtype, int(max(dims)), heads, int(key_heads))

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        heads = f" with heads of {self.head_dim}" if self.head_dim else ""
        return f"{dtype} on {self.device.type}{heads}"


@dataclass(frozen=True)
class Row:
    """Describes a kernel: its name and its requirements."""

    name: str
    make: Callable[[], Kernel]
    # Depends only on device type, precision and heads, which all processes share.
    fits: Callable[[Needs], bool]


def _half(needs: Needs) -> bool:
    return needs.device.type == "cuda" and needs.dtype in HALVES


def _flash(needs: Needs) -> bool:
    return _half(needs) and needs.head_dim % 8 == 0 and needs.head_dim <= WIDEST


TABLE: Sequence[Row] = (
    Row("varlen", Varlen, _flash),
    Row("varlen", RepeatedVarlen, lambda n: _flash(n) and n.heads != n.key_heads),
    # Not in float32, where compilation would take longer than a short run.
    Row("flex", Flex, _half),
    Row("plain", Plain, lambda n: True),
)
