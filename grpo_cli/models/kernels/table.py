"""Lists the kernels in the order in which they are tried, with the requirements of each.

Does not import transformers, so that a wanted kernel that cannot run is refused early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from grpo_cli.config.schema import Recipe
from grpo_cli.errors import UserError
from grpo_cli.models.kernels.base import Kernel
from grpo_cli.models.kernels.flex import Flex
from grpo_cli.models.kernels.plain import Plain
from grpo_cli.models.kernels.varlen import HALVES, RepeatedVarlen, Varlen

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KNOB = "update.attention_kernel"
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
    """Describes a kernel: its name, its requirements, and when `auto` uses it."""

    name: str  # value of update.attention_kernel
    make: Callable[[], Kernel]
    # Depends only on device type, precision and heads, which all processes share.
    fits: Callable[[Needs], bool]
    needs: str  # the requirements of `fits`, for messages
    # Whether `auto` uses the kernel if it fits.
    is_automatic: Callable[[Needs], bool] = lambda needs: True


def _half(needs: Needs) -> bool:
    return needs.device.type == "cuda" and needs.dtype in HALVES


def _flash(needs: Needs) -> bool:
    return _half(needs) and needs.head_dim % 8 == 0 and needs.head_dim <= WIDEST


FLASH_NEEDS = f"bfloat16 or float16 on cuda, with heads of a multiple of 8 up to {WIDEST}"

TABLE: Sequence[Row] = (
    Row("varlen", Varlen, _flash, FLASH_NEEDS),
    Row("varlen", RepeatedVarlen, lambda n: _flash(n) and n.heads != n.key_heads, FLASH_NEEDS),
    # Not automatic in float32, where compilation would take longer than a short run.
    Row("flex", Flex, lambda n: n.device.type == "cuda", "on cuda", is_automatic=_half),
    Row("plain", Plain, lambda n: True, ""),
)


def check(recipe: Recipe) -> None:
    """Checks a wanted kernel as far as possible before a model is loaded.

    Raises:
        UserError: the kernel does not support the run's device or precision.
    """
    wanted = recipe.update.attention_kernel
    rows = [r for r in TABLE if r.name == wanted]
    if not rows:
        return
    on_cuda = recipe.device in ("auto", "cuda") and torch.cuda.is_available()
    device = torch.device("cuda" if on_cuda else "cpu")
    needs = Needs(device, getattr(torch, recipe.arithmetic_dtype), head_dim=0, heads=1, key_heads=1)
    if not any(r.fits(needs) for r in rows):
        raise refusal(wanted, unfit(rows, needs))


def unfit(rows: Sequence[Row], needs: Needs) -> str:
    """Returns the reason why none of a kernel's rows fits."""
    return f"it computes {rows[0].needs if rows else 'nothing'}, and this is {needs}"


def refusal(wanted: str, reason: str) -> UserError:
    return UserError(
        f"{KNOB} = {wanted}: {reason}; use {KNOB}=auto, which takes the first kernel that works."
    )
