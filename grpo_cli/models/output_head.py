"""Computes the output head, from hidden states to logits, in float32 (`model.head_dtype`).

A log-probability in bfloat16 has 8 bits. If the sampler and the trainer round it differently, their
ratio is not 1. With logits in float32 the two agree better (MiniMax-M1, arXiv 2506.13585, section
3.2; ScaleRL, arXiv 2510.13786, section 3.2). The weights, including tied ones, are unchanged: only
the product is in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_cli.errors import UserError


class Float32Linear(nn.Linear):
    """Multiplies in float32, with or without autocast, regardless of its weight's dtype."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns logits in float32."""
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return nn.functional.linear(hidden.float(), self.weight.float(), bias)


def use_float32(model: PreTrainedModel) -> None:
    """Makes a model compute its output head in float32.

    Raises:
        UserError: the head is not a plain linear layer.
    """
    layer = model.get_output_embeddings()
    if type(layer) is not nn.Linear:
        raise UserError(
            f"model.head_dtype = float32: the output layer of {type(model).__name__} is a "
            f"{type(layer).__name__}, not an nn.Linear; use model.head_dtype=auto."
        )
    layer.__class__ = Float32Linear


def is_float32(model: PreTrainedModel) -> bool:
    """Returns whether `use_float32` was applied to a model."""
    return isinstance(model.get_output_embeddings(), Float32Linear)
