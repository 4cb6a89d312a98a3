"""Lists the adapters that `adapter.method` can name: LoRA and its variants in peft.

Recipes are checked against this table before peft is imported.
"""

from __future__ import annotations

from typing import Any

METHODS: dict[str, tuple[str, dict[str, Any]]] = {  # (words in the help text, peft's fields)
    "lora": ("LoRA", {}),
    "dora": ("LoRA with trained magnitudes", {"use_dora": True}),
    "rslora": ("LoRA scaled by alpha/√rank", {"use_rslora": True}),
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
