"""Checks by peft's config whether vLLM can apply an adapter itself (`adapter.sync=adapter`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from grpo_cli.errors import UserError
from grpo_cli.models.adapter_methods import INIT_KEEPS_BASE

if TYPE_CHECKING:
    from peft import PeftConfig

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values of vLLM's max_lora_rank
OTHER_WAY = "use adapter.sync=merge, which sends merged weights"


def check(config: PeftConfig) -> None:
    """Checks that vLLM can apply an adapter with this config.

    Raises:
        UserError: vLLM cannot.
    """
    if reason := next(_reasons(config), None):
        raise UserError(f"adapter.sync = adapter: {reason}; {OTHER_WAY}.")


def _reasons(config: Any) -> Iterator[str]:
    if config.use_dora:
        yield "vLLM does not apply DoRA"
    if config.modules_to_save:
        names = ", ".join(sorted(config.modules_to_save))
        yield f"vLLM does not take modules that are trained as a whole (modules_to_save: {names})"
    if config.bias != "none":
        yield f"vLLM does not take trained biases (bias = {config.bias})"
    if config.target_parameters:
        names = ", ".join(config.target_parameters)
        yield f"vLLM gets adapters of linear layers only (target_parameters: {names})"
    if config.init_lora_weights not in INIT_KEEPS_BASE:
        yield (
            f"vLLM does not take the init {config.init_lora_weights}, since such an init can "
            "change the weights under the adapter"
        )
    for name in ("use_qalora", "use_bdlora"):
        if getattr(config, name, None):
            yield f"vLLM does not apply {name}"
    if largest_rank(config) > RANKS[-1]:
        yield f"rank {largest_rank(config)} is above vLLM's largest, {RANKS[-1]}"


def largest_rank(config: Any) -> int:
    """Returns the largest rank of an adapter's layers."""
    return int(max([config.r, *(config.rank_pattern or {}).values()]))


def max_rank(rank: int) -> int:
    """Returns the smallest value of vLLM's max_lora_rank that is at least `rank`."""
    return min(allowed for allowed in RANKS if allowed >= rank)
