"""Lists the adapters that `adapter.method` can name: a new one of peft is one entry of METHODS.

It must be a method that peft injects into layers and can merge into their weights, since exports
and engines get merged weights. Recipes are checked against this table before peft is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Method:
    """Describes a method of peft.

    Attributes:
        title: words for it in the help text.
        peft_type: peft's name of the config's class, and tag of its model cards.
        knobs: fields of peft's config, with the knob below `adapter` that sets each.
        args: fields of peft's config that make the method.
    """

    title: str
    peft_type: str = "LORA"
    knobs: Mapping[str, str] = field(default_factory=lambda: {"r": "rank", "lora_alpha": "alpha"})
    args: Mapping[str, Any] = field(default_factory=dict)


METHODS = {
    "lora": Method("LoRA"),
    "dora": Method("LoRA with trained magnitudes", args={"use_dora": True}),
    "rslora": Method("LoRA scaled by alpha/√rank", args={"use_rslora": True}),
}
REFUSED = {  # fields of peft's configs with which an adapter cannot be merged or saved
    "trainable_token_indices": "trains rows of the embeddings, which are not merged",
    "lora_bias": "adds biases, which a merged model has no place for",
    "layer_replication": "makes a model of more layers than its base",
    "alora_invocation_tokens": "is active for a part of the tokens only, and cannot be merged",
    "megatron_config": "imports the modules that megatron_core names",
}
# Inits that do not read the base model's weights, which may be quantized.
INIT_WITHOUT_BASE = (True, False, "gaussian", "eva")
INIT_KEEPS_BASE = (*INIT_WITHOUT_BASE, "orthogonal")  # inits that do not change these weights
