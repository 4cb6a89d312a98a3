"""Recomputes the activations of some layers in the backward, to save memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def enable(model: PreTrainedModel, share: float = 1.0) -> None:
    """Makes an evenly spread share of each stack of layers recompute its activations.

    Of n layers, layer i is recomputed if floor((i + 1) · share) > floor(i · share): with 0.5 the
    layers 1, 3, 5, ... The gradient is the same to the bit for every share.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if share >= 1:
        return
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            layers = [m for m in module if isinstance(m, GradientCheckpointingLayer)]
            for i, layer in enumerate(layers):
                layer.gradient_checkpointing = is_recomputed(i, share)


def is_recomputed(layer: int, share: float) -> bool:
    """Whether a layer is among an evenly spread share of the layers."""
    # A share such as 1/3 is a little off in binary; 1e-9 of a layer puts it right.
    return int((layer + 1) * share + 1e-9) > int(layer * share + 1e-9)


@contextlib.contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Keeps all activations for a while."""
    modules = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    for module in modules:
        setattr(module, "gradient_checkpointing", False)  # noqa: B010
    try:
        yield
    finally:
        for module in modules:
            setattr(module, "gradient_checkpointing", True)  # noqa: B010
