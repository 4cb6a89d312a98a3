"""Calls the packages flash-attn 2 and 3, or flash-attn 2 as the `kernels` package loads it.

Each offers a function for the forward and one for the backward below its public ones; the arguments
are those of flash-attn 2.7 and later, and of flash-attn 3.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_cli.models.kernels.ragged import Ragged, RaggedKernel

HUB_REPOSITORY = "kernels-community/flash-attn2"


class Flash2(RaggedKernel):
    """Computes each part with flash-attn 2 (arXiv 2307.08691)."""

    def __init__(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """forward, backward: `_flash_attn_varlen_forward` and `_flash_attn_varlen_backward`."""
        self.run, self.run_backward = forward, backward

    @classmethod
    def of(cls, module: Any) -> Flash2:
        """Takes the functions of a module `flash_attn_interface`."""
        return cls(module._flash_attn_varlen_forward, module._flash_attn_varlen_backward)

    @classmethod
    def installed(cls) -> Flash2:
        """Imports the installed package."""
        return cls.of(importlib.import_module("flash_attn.flash_attn_interface"))

    @classmethod
    def of_hub(cls) -> Flash2:
        """Loads the kernel of the hub: from the network, or from the hub's cache."""
        loaded = importlib.import_module("kernels").get_kernel(HUB_REPOSITORY)
        return cls.of(sys.modules[loaded.flash_attn_varlen_func.__module__])

    def part(
        self, r: Ragged, scale: float, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns (out [M, Hq, D], lse [M, Hq]); see `RaggedKernel`."""
        out, lse, *_ = self.run(query, key, value, *r.ranges, **options(r, scale))
        return out, lse.transpose(0, 1).contiguous()

    def part_backward(self, r: Ragged, scale: float, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients of queries, keys and values; see `RaggedKernel`."""
        grad, query, key, value, out, lse = tensors
        grads = tuple(torch.empty_like(t) for t in (query, key, value))
        self.run_backward(
            grad.contiguous(), query, key, value, out, lse.transpose(0, 1).contiguous(), *grads,
            *r.ranges, **options(r, scale), deterministic=False,
        )  # fmt: skip
        return grads


def options(r: Ragged, scale: float) -> dict[str, Any]:
    """Returns the arguments that forward and backward of flash-attn 2 share."""
    return {
        "dropout_p": 0.0, "softmax_scale": scale, "causal": r.causal, "window_size_left": -1,
        "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None,
    }  # fmt: skip


class Flash3(RaggedKernel):
    """Computes each part with flash-attn 3, for Hopper (arXiv 2407.08608)."""

    def __init__(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """forward, backward: `_flash_attn_forward` and `_flash_attn_backward`."""
        self.run, self.run_backward = forward, backward

    @classmethod
    def installed(cls) -> Flash3:
        """Imports the installed package."""
        module = importlib.import_module("flash_attn_interface")
        return cls(module._flash_attn_forward, module._flash_attn_backward)

    def part(
        self, r: Ragged, scale: float, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns (out [M, Hq, D], lse [M, Hq]); see `RaggedKernel`."""
        out, lse, *_ = self.run(
            query, key, value, cu_seqlens_q=r.query_offsets, cu_seqlens_k=r.key_offsets,
            max_seqlen_q=r.most_queries, max_seqlen_k=r.most_keys, softmax_scale=scale,
            causal=r.causal,
        )  # fmt: skip
        return out, lse.transpose(0, 1).contiguous()

    def part_backward(self, r: Ragged, scale: float, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients of queries, keys and values; see `RaggedKernel`."""
        grad, query, key, value, out, lse = tensors
        grads = tuple(torch.empty_like(t) for t in (query, key, value))
        offsets, longest = r.ranges[:2], r.ranges[2:]
        # By place: the last one is named causal or is_causal, depending on the version.
        self.run_backward(
            grad.contiguous(), query, key, value, out, lse.transpose(0, 1).contiguous(), *offsets,
            None, None, *longest, *grads, scale, r.causal,
        )  # fmt: skip
        return grads
