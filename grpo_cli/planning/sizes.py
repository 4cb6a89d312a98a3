"""Measures a model on tensors without storage: its weights, and the activations of a token.

The model is built from its config on torch's meta device, so that 72B weights take no memory. The
bytes that a forward pass keeps for its backward are counted on the first two layers with fake
tensors, with the recipe's dtype, autocast, adapter and gradient checkpointing. The difference
between two lengths is taken, in which copies of weights cancel. Example: a layer of Qwen2.5-7B
keeps 240 kB per token in bfloat16, or 7 kB with gradient checkpointing.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_cli.config.recipe import Recipe
from grpo_cli.distributed.settings import HALF_TYPES
from grpo_cli.models import adapters, loading
from grpo_cli.models.activation_bytes import saved_bytes, without_checkpointing
from grpo_cli.models.memory import cache_numbers
from grpo_cli.models.settings import Adapter, Model

LENGTHS = (8, 16)  # tokens of the two passes; short, since a mask grows with their square


@dataclass(frozen=True)
class Sizes:
    """Numbers of a model's weights, and the bytes that a token takes."""

    config: PretrainedConfig
    parameters: int  # number of weights, without an adapter's
    layer: int  # weights of the largest layer
    matrices: int  # weights in the layers' matrices, which are quantized
    largest_matrix: int
    cache: int  # keys and values per token
    layers: int
    hidden: int
    vocab: int
    adapter: int = 0  # weights of the adapter; 0: all weights of the model are trained
    activations: float | None = None  # bytes per token kept for the backward; None: unknown

    @property
    def trained(self) -> int:
        return self.adapter or self.parameters


_counted: dict[str, Sizes] = {}
_traced: dict[str, tuple[int, float | None]] = {}


def sizes_of(config: PretrainedConfig, recipe: Recipe) -> Sizes:
    """Returns the sizes of a model as the recipe trains it."""
    sharded = recipe.distributed.strategy == "fsdp2"
    # Sharded weights are gathered in the type of the products.
    dtype = recipe.arithmetic_dtype if sharded else recipe.model.dtype
    autocast = None if sharded else HALF_TYPES.get(recipe.mixed_precision)
    settings = (recipe.model, recipe.adapter, dtype, autocast)
    model = config.to_json_string(use_diff=False)
    if model not in _counted:
        _counted[model] = _count(config)
    key = model + repr(settings)
    if key not in _traced:
        _traced[key] = _trace(config, *settings)
    adapter, activations = _traced[key]
    return replace(_counted[model], adapter=adapter, activations=activations)


def _count(config: PretrainedConfig) -> Sizes:
    """Returns the numbers of a model's weights."""
    model = _built(config, "float32", {})
    parts = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    layers = [list(part.parameters()) for part in parts]
    matrices = [p.numel() for layer in layers for p in layer if p.ndim == 2]
    text = config.get_text_config(decoder=True)
    return Sizes(
        config=config,
        parameters=sum(p.numel() for p in model.parameters()),
        layer=max((sum(p.numel() for p in layer) for layer in layers), default=0),
        matrices=sum(matrices),
        largest_matrix=max(matrices, default=0),
        cache=cache_numbers(text),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocab=text.vocab_size,
    )


def _built(config: PretrainedConfig, dtype: str, args: Mapping[str, Any]) -> PreTrainedModel:
    kind = loading.auto_class(config)
    with torch.device("meta"):
        model: PreTrainedModel = kind.from_config(
            copy.deepcopy(config), dtype=getattr(torch, dtype), **args
        )
    return model


def _trace(
    config: PretrainedConfig, settings: Model, adapter: Adapter, dtype: str, autocast: str | None
) -> tuple[int, float | None]:
    """Returns (weights of the adapter, bytes per token that a forward pass keeps).

    The bytes are None if the model cannot be traced. With gradient checkpointing they include one
    layer in full, which the backward recomputes.
    """
    layers = config.get_text_config(decoder=True).num_hidden_layers
    one, two = (_traced_layers(config, n, settings, adapter, dtype, autocast) for n in (1, 2))
    # A model of n layers is one layer with embedding and head, and n - 1 more layers.
    trained = one[0] + (layers - 1) * (two[0] - one[0])
    if one[1] is None or two[1] is None:
        return trained, None
    kept, in_full = one[1]
    return trained, kept + (layers - 1) * (two[1][0] - kept) + two[1][1] - in_full


def _traced_layers(
    config: PretrainedConfig,
    layers: int,
    settings: Model,
    adapter: Adapter,
    dtype: str,
    autocast: str | None,
) -> tuple[int, tuple[float, float] | None]:
    """Returns the result of `_trace` for a model's first `layers` layers.

    The bytes are a pair: those that the forward pass keeps, and those that it would keep without
    gradient checkpointing (0.0 if checkpointing is off).
    """
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = layers
    if types := getattr(text, "layer_types", None):
        with suppress(AttributeError):  # a property of some configs, derived from the number
            text.layer_types = [types[n % len(types)] for n in range(layers)]
    kernel = settings.attn_implementation
    model = _built(config, dtype, {"attn_implementation": kernel} if kernel else {})
    loading.prepare_for_training(model, settings)
    args = {key: v for key, v in adapter.args.items() if not key.startswith("init_")}
    added = adapters.config_of(replace(adapter, path=None, args=args), "plan", None)
    with torch.device("meta"):
        adapters.attach(model, added, 0)
    trained = sum(p.numel() for p in adapters.tensors_of(model).values())
    logging.disable(logging.ERROR)  # torch logs an operation that it cannot trace
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            kept, in_full = _bytes_per_token(model, autocast), 0.0
            if settings.gradient_checkpointing:
                with without_checkpointing(model):
                    in_full = _bytes_per_token(model, autocast)
            return trained, (kept, in_full)
    except Exception:  # a model's own code may fail in any way on fake tensors
        return trained, None
    finally:
        logging.disable(logging.NOTSET)


def _bytes_per_token(model: PreTrainedModel, autocast: str | None) -> float:
    """Returns the bytes per token that a forward pass over one sequence keeps, without weights."""
    half, found = getattr(torch, autocast or "bfloat16"), []
    for tokens in LENGTHS:
        with saved_bytes(model) as kept, torch.autocast("cpu", half, enabled=autocast is not None):
            model.base_model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
            found.append(kept())
    return (found[1] - found[0]) / (LENGTHS[1] - LENGTHS[0])
