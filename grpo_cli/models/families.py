"""Describes how model families differ from the common decoder, by the names in their configs.

A new family with a scaled or capped output layer, or with other names for its attention window or
its experts, needs changes only here.
"""

from __future__ import annotations

from inspect import signature

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

# The output layer: logits = softcap(scale · (hidden @ weight.T + bias)).
LOGIT_SCALES = (
    "logit_scale",  # Cohere
    "lm_head_multiplier",  # Falcon-H1
    "output_multiplier",  # Muse Glimmer
)
LOGIT_DIVISOR = "logits_scaling"  # Granite and MiniCPM3 divide by it, HyperCLOVA X multiplies
LOGIT_SOFTCAPS = (
    "final_logit_softcapping",  # Gemma and others
    "logits_soft_cap",  # RecurrentGemma
    "output_logit_soft_cap",  # xLSTM
)

# Arguments of attention that change its result and that attention by parts does not support.
ATTENTION_EXTRAS = ("softcap", "s_aux", "position_bias", "head_mask")
# Fields of models that attend to selected keys, and select only in sdpa and eager (DeepSeek V3.2).
SPARSE = ("index_topk", "index_topk_blocks")
WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}

# Reasons in notes, which follow "its".
RECURRENT = "layers carry a state from token to token"
BIDIRECTIONAL = "images are read in both directions"
# Names of recurrent layers in a config's layer_types.
RECURRENT_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "recurrent"}

# Rotary embeddings of these kinds depend on the largest position of a forward pass.
DYNAMIC_ROPE = ("dynamic", "longrope")

# Decoders whose configs nevertheless have BERT's is_decoder=false.
DECODERS = ("gpt_neox", "gpt_neox_japanese")

# Config fields with the placeholder tokens for features of images, videos and audio.
IMAGE_TOKENS = (
    "image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id",
)  # fmt: skip

NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
# Parts whose FLOPs the formula in flops.py does not count: latent attention, shared keys and
# values, cross-attention.
UNCOUNTED_PARTS = ("kv_lora_rank", "num_kv_shared_layers", "cross_attention_layers")


def reads_both_directions(config: PretrainedConfig) -> bool:
    """Returns whether a model is an encoder such as BERT, which cannot generate."""
    return getattr(config, "is_decoder", True) is False and config.model_type not in DECODERS


def is_recurrent(model: PreTrainedModel) -> bool:
    """Returns whether some layers carry a recurrent state besides keys and values.

    State space layers, linear attention and short convolutions do. The state leaks from one
    sequence of a packed row to the next, and from padding to later tokens. With small weights the
    self-check would not detect that, so the model's own attributes and config decide. A model with
    custom code counts as recurrent if it has a depthwise convolution, as most such layers do.
    """
    config = model.config.get_text_config(decoder=True)
    return (
        bool(getattr(model, "_is_stateful", False))
        or not RECURRENT_LAYERS.isdisjoint(getattr(config, "layer_types", None) or ())
        or any(isinstance(m, nn.Conv1d) and m.groups > 1 for m in model.modules())
    )


def placeholder_tokens(config: PretrainedConfig) -> tuple[int, ...]:
    """Returns the placeholder tokens for features of images and videos; () for a text model.

    They must not be sampled, since there is no image for them in a completion.
    """
    ids = {getattr(config, name, None) for name in IMAGE_TOKENS}
    return tuple(sorted(i for i in ids if isinstance(i, int)))


def has_bidirectional_images(model: PreTrainedModel) -> bool:
    """Returns whether image tokens attend to each other bidirectionally (Gemma 3, PaliGemma).

    Packed rows and the embedded engine do not support that, and in half precision the self-check
    may not detect it. Such models build their masks from token types; Gemma 4 has a switch.
    """
    masks = getattr(model, "create_masks_for_generate", None)
    taken = signature(masks).parameters if masks is not None else {}
    config = model.config.get_text_config(decoder=True)
    switch = getattr(config, "use_bidirectional_attention", None)
    return "token_type_ids" in taken or ("mm_token_type_ids" in taken and switch == "vision")


def num_experts(config: PretrainedConfig) -> int | None:
    """Returns the number of routed experts per layer; None for a dense model."""
    return next((n for name in NUM_EXPERTS if (n := getattr(config, name, None))), None)


def without_router_logits(model: PreTrainedModel) -> dict[str, bool]:
    """Returns the forward argument that disables collecting router logits.

    A model whose config enables them also computes a loss from them and the attention mask, which
    packed rows and the embedded engine do not have.
    """
    collects = getattr(model.config.get_text_config(decoder=True), "output_router_logits", False)
    return {"output_router_logits": False} if collects else {}
