"""Quantized base models through bitsandbytes: 4 bits per weight (nf4, QLoRA, arXiv 2305.14314).

Linear layers except the output head store quantized weights and dequantize them for each product.
Embeddings, the head, norms and biases keep their dtype. So do the experts of a mixture, which are
not linear layers in transformers. Only an adapter is trained, not these weights.

A weight takes 0.516 bytes: 4 bits, an 8-bit scale per 64 weights, and a 32-bit scale per 256 of
those scales (double quantization).
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

from grpo_cli.errors import UserError

if TYPE_CHECKING:
    from grpo_cli.models.settings import Model

BLOCK = 64  # weights of nf4 that share a scale


def require() -> None:
    """Raises a UserError if bitsandbytes is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            "model.quantization = nf4 needs bitsandbytes: pip install 'bitsandbytes>=0.46'."
        )


def check_stored(config: PretrainedConfig, path: str) -> None:
    """Checks that the weights of a model's files are not quantized.

    Raises:
        UserError: they are.
    """
    stored: Any = getattr(config, "quantization_config", None)
    if stored:
        method = stored.get("quant_method") if isinstance(stored, dict) else stored.quant_method
        method = getattr(method, "value", method) or "an unnamed method"
        raise UserError(
            f"model.path = {path}: its weights are stored quantized ({method}); give the model it "
            "was made from, with model.quantization=nf4 to quantize it when it is loaded."
        )


def load_options(config: Model, compute_dtype: torch.dtype) -> dict[str, Any]:
    """Returns the arguments of from_pretrained for quantizing a model; {} without quantization.

    Args:
        compute_dtype: dtype of products with dequantized weights.

    Raises:
        UserError: bitsandbytes is not installed.
    """
    if config.quantization == "none":
        return {}
    require()
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
    )
    return {"quantization_config": settings, "device_map": {"": "cpu"}}


def prepare(model: PreTrainedModel) -> None:
    """Prepares a newly loaded, quantized model for training.

    The model gets the config of the unquantized model, since weights that leave it, merged or sent
    to an engine, are dequantized.

    Raises:
        UserError: a layer's size does not fit the blocks of nf4.
    """
    import bitsandbytes

    for name, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            # On a CPU bitsandbytes 0.50 gives wrong results if a block crosses the end of a row.
            if module.in_features % BLOCK:
                raise UserError(
                    f"model.quantization = nf4: {name} has {module.in_features} inputs, which is "
                    f"no multiple of the {BLOCK} weights of a block; use model.quantization=none."
                )
            # On a CPU with AVX512-BF16 the first forward without gradient would permanently repack
            # the weight. Dequantizing it would then be wrong, and training would fail.
            module.support_avx512bf16_for_cpu = False
    del model.config.quantization_config
    model.hf_quantizer = None  # save_pretrained would use it to get the weights


def is_quantized(p: Tensor) -> bool:
    """Returns whether a parameter holds a quantized weight."""
    return type(p).__name__ == "Params4bit"


def dequantized(p: Any) -> Tensor:
    """Returns a quantized parameter's dequantized weight, as its layer computes with it."""
    from bitsandbytes import functional

    weight: Tensor = functional.dequantize_4bit(p.data, p.quant_state)
    return weight


def dtype_of(model: nn.Module) -> torch.dtype:
    """Returns the dtype that a model's quantized weights had before quantization."""
    dtype: torch.dtype = getattr(getattr(model, "config", None), "dtype", torch.float32)
    return dtype


def plain(p: Any, dtype: torch.dtype) -> Tensor:
    """Returns a parameter; for a quantized one, a meta tensor with its weight's shape.

    Args:
        dtype: dtype of the meta tensor.
    """
    if not is_quantized(p):
        parameter: Tensor = p
        return parameter
    return torch.empty(p.quant_state.shape, dtype=dtype, device="meta")


def numel(p: Tensor) -> int:
    """Returns the number of weights in a parameter; a byte stores two quantized weights."""
    return plain(p, torch.float32).numel()


def summary(model: nn.Module) -> str | None:
    """Returns a line with the counts of quantized and other weights; None if none is quantized."""
    parameters = [*model.parameters()]
    inside = [p for p in parameters if is_quantized(p)]
    if not inside:
        return None
    weights = sum(map(numel, inside)) / 1e6
    others = sum(p.numel() for p in parameters if not is_quantized(p) and not p.requires_grad)
    dtype = str(dtype_of(model)).removeprefix("torch.")
    return f"base model: {weights:.2f} M weights in nf4, {others / 1e6:.2f} M in {dtype}"
