"""Counts model FLOPs and a device's peak rate, for model FLOP utilisation (MFU).

Model FLOPs (PaLM, arXiv 2204.02311, appendix B) are those of the matrix products in the model's
formula, two for each multiply-add. Additional work of an implementation is not counted, such as
recomputing activations in the backward pass (gradient checkpointing, flash attention) or
multiplying padding: it lowers utilisation. With N parameters in matrix products, L layers and H
heads of size Q, a forward pass over `tokens` takes

    2 · N · tokens + 4 · L · H · Q · attended

where `attended` is the number of (query, key) pairs: n(n + 1)/2 for a sequence of n tokens. A
backward pass takes twice as much: one product for the gradient of the inputs and one for that of
the weights, except frozen ones.

If the formula does not describe a model, the result is NaN or None, not a wrong number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from grpo_cli.models import quantization
from grpo_cli.models.families import UNCOUNTED_PARTS, num_experts
from grpo_cli.models.packing import unique_tokens
from grpo_cli.records import Rollout, has_images

FORWARD_BACKWARD = 3.0  # in units of the forward pass, if every weight has a gradient


def passes(num_parameters: int | None, num_trained: int | None) -> float:
    """Returns the FLOPs of a forward and a backward pass, in units of the forward pass.

    It is exact if all weights have a gradient (3). With an adapter on a frozen model it is slightly
    above 2, and ignores attention's activation-activation products, which are few.

    Args:
        num_parameters, num_trained: counts from `params_in_products`.
    """
    if not num_parameters or num_trained is None:
        return FORWARD_BACKWARD
    return FORWARD_BACKWARD - 1 + num_trained / num_parameters


def params_in_products(model: PreTrainedModel, *, trained: bool = False) -> int | None:
    """Counts the parameters that multiply a token; returns None for a model with unknown parts.

    A weight that is both embedding and output head counts once, as the head, since an embedding
    look-up is not a product. Only the experts that a token is routed to count. For a
    vision-language model only the language model counts. The model must not be wrapped for
    distributed training.

    Args:
        trained: count only parameters that have a gradient.
    """
    config = model.config.get_text_config()
    experts = num_experts(config)
    experts_per_token = getattr(config, "num_experts_per_tok", None)
    total, routed = 0, 0
    modules = [*model.named_modules()]
    if config is not model.config:  # without the vision tower
        modules = [*model.get_decoder().named_modules()]
        if (head := model.get_output_embeddings()) is not None:
            modules.append(("head", head))
    for path, module in modules:
        in_expert = ".experts." in f".{path}."  # not `shared_experts`, which every token uses
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim < 2 or name.endswith("bias") or isinstance(module, nn.Embedding):
                continue  # norms, biases and embedding look-ups are not matrix products
            if trained and not weight.requires_grad:
                continue
            linear = isinstance(module, (nn.Linear, Conv1D))
            if in_expert and (linear or weight.shape[0] == experts):
                routed += quantization.numel(weight)
            elif linear or (experts and weight.shape == (experts, config.hidden_size)):  # router
                total += quantization.numel(weight)
            else:
                return None
    if not routed:
        return total
    if not experts or not isinstance(experts_per_token, int):
        return None
    return total + int(routed * experts_per_token // experts)


def forward_flops(
    config: PretrainedConfig,
    num_parameters: int | None,
    tokens: int,
    attended: int,
    logits: int | None = None,
) -> float:
    """Returns the model FLOPs of a forward pass; NaN if the formula does not describe the model.

    Args:
        config: config of a causal language model.
        num_parameters: count from `params_in_products`.
        tokens: number of computed tokens.
        attended: number of (query, key) pairs, including each token with itself. In layers with a
            sliding window a token attends to at most the window.
        logits: number of tokens whose logits are computed; None: all.
    """
    text = config.get_text_config()
    if getattr(text, "is_heterogeneous", False):  # its layers have heads of several sizes
        return math.nan
    heads = getattr(text, "num_attention_heads", None)
    layers = getattr(text, "num_hidden_layers", None)
    window = getattr(text, "sliding_window", None)
    every = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(text, "layer_types", None) or [every] * (layers or 0)
    known = (
        num_parameters is not None
        and text is config  # no vision or audio tower
        and isinstance(heads, int)
        and not config.is_encoder_decoder
        and set(kinds) <= {"full_attention", "sliding_attention"}
        and not any(getattr(text, name, None) for name in UNCOUNTED_PARTS)
    )
    if not known:
        return math.nan
    assert num_parameters is not None
    assert isinstance(heads, int)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    windowed = attended if window is None else min(attended, tokens * window)
    pairs = sum(attended if kind == "full_attention" else windowed for kind in kinds)
    without_logits = 0 if logits is None else tokens - logits
    products = num_parameters * tokens - text.hidden_size * text.vocab_size * without_logits
    return float(2 * products + 4 * heads * head_dim * pairs)


def rollout_flops(
    model: PreTrainedModel, rollouts: Sequence[Rollout], *, backward: bool = False
) -> float:
    """Returns the model FLOPs of a forward pass, each prompt once; NaN if unknown.

    They are unknown with images, since the formula does not describe a vision tower.

    Args:
        backward: also count the backward pass.
    """
    if has_images(r.prompt for r in rollouts):
        return math.nan
    tokens, pairs = unique_tokens(rollouts)
    predicted = sum(r.completion.sampled_tokens for r in rollouts)
    number = params_in_products(model)
    forward = forward_flops(model.config.get_text_config(), number, tokens, pairs, predicted)
    return forward * (passes(number, params_in_products(model, trained=True)) if backward else 1)


# Dense peaks in TFLOP/s from NVIDIA's data sheets: (part of the name, 16 bit on tensor cores with a
# float32 accumulator, float32 without tensor cores). The first match counts.
GPUS = (
    (r"GB200", 2500, 80),
    (r"B200", 2250, 75),
    (r"GH200", 989, 67),
    (r"H200 NVL", 835, 60),
    (r"H200", 989, 67),
    (r"H100 NVL", 835, 60),
    (r"H100 PCIe", 756, 51),
    (r"H[18]00", 989, 67),
    (r"H20", 148, 44),
    (r"A[18]00", 312, 19.5),
    (r"A10G", 70, 35),
    (r"RTX 6000 Ada", 364, 91.1),
    (r"L40S", 362, 91.6),
    (r"L40", 181, 90.5),
    (r"L4", 121, 30.3),
    (r"RTX 5090", 209.5, 104.8),
    (r"RTX 4090", 165.2, 82.6),
    (r"RTX 3090", 71, 35.6),
)
OTHER_CHIPS = re.compile(r"\b(MIG|Laptop|Max-Q|Ti|D)\b")  # slices and variants, not in the table


def listed_peak(name: str, dtype: torch.dtype, tf32: bool) -> float | None:
    """Returns an NVIDIA GPU's FLOP/s from its data sheet; None if it is not in the table.

    Args:
        name: the device's name from CUDA.
        tf32: whether float32 products may run on tensor cores, at half the speed of 16 bits.
    """
    found = next((row for row in GPUS if re.search(rf"\b{row[0]}\b", name)), None)
    if found is None or OTHER_CHIPS.search(name):
        return None
    _, half, single = found
    if dtype in (torch.float16, torch.bfloat16):
        return half * 1e12
    return (half / 2 if tf32 else single) * 1e12 if dtype == torch.float32 else None


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the peak FLOP/s of a GPU's data sheet for products of a dtype; NaN without one."""
    if device.type != "cuda" or torch.version.hip is not None:
        return math.nan
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return listed_peak(torch.cuda.get_device_name(device), dtype, tf32) or math.nan
