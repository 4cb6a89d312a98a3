"""FLOPs by hand and against torch's own count of real passes; peaks by table."""

import math
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from grpo_cli.models import adapters, flops
from grpo_cli.models.flops import forward_flops, listed_peak, params_in_products, peak_flops
from grpo_cli.models.settings import Adapter
from tests.conftest import CPU
from tests.tables import table

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": "eager",  # of which torch counts every product
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
MOE = {**EXPERTS, "moe_intermediate_size": 16}


def make(name: str, **more: Any) -> PreTrainedModel:
    suffix = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **more})
    return getattr(transformers, f"{name}{suffix}")(config)


@pytest.mark.parametrize(
    ("name", "more", "logits"),
    [
        ("Qwen2", {"tie_word_embeddings": True}, 4),
        ("Qwen2", {"tie_word_embeddings": False, "num_key_value_heads": 1}, None),
        ("Qwen3", {"head_dim": 16}, 4),  # not hidden_size / heads
        ("GPT2", {}, None),
        ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, 4),
        ("Olmoe", EXPERTS, None),
        ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]}, 4),
    ],
)
def test_flops_match_torch(name: str, more: dict[str, Any], logits: int | None) -> None:
    """Exactly, with eager attention, which also computes the pairs that the mask takes out."""
    experts = {"experts_implementation": "eager"} if "num_experts_per_tok" in more else {}
    model = make(name, **more, **experts)
    b, t = 3, 11
    ids = torch.arange(b * t).view(b, t)

    def forward() -> torch.Tensor:
        return model(ids, use_cache=False, logits_to_keep=logits or 0).logits

    expected = forward_flops(
        model.config,
        params_in_products(model),
        b * t,
        attended=b * t * t,
        logits=None if logits is None else b * logits,
    )
    with FlopCounterMode(display=False) as counter:
        forward()
    assert counter.get_total_flops() == expected
    with FlopCounterMode(display=False) as counter:
        forward().sum().backward()
    assert counter.get_total_flops() == flops.FORWARD_BACKWARD * expected


def test_frozen_weights_have_no_gradient() -> None:
    """Under an adapter. Torch counts attention's products of two activations three times."""
    model = make("Qwen2", num_hidden_layers=6)
    pytest.importorskip("peft")
    adapters.attach(model, adapters.config_of(Adapter(method="lora", rank=1), "base", None), 7)
    number = params_in_products(model)
    trained = params_in_products(model, trained=True)
    # In each layer, rank 1: queries and outputs, keys and values, three of the feed-forward part.
    assert trained == 6 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
    assert flops.passes(number, trained) == 2 + trained / number
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(20).view(1, 20), use_cache=False).logits.sum().backward()
    expected = forward_flops(model.config, number, 20, 400) * flops.passes(number, trained)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.05)
    assert flops.passes(number, number) == flops.FORWARD_BACKWARD
    assert flops.passes(None, None) == flops.FORWARD_BACKWARD  # of a NaN


def test_sliding_window() -> None:
    def pairs(tokens: int, attended: int, **more: Any) -> float:
        config = transformers.Qwen2Config(**{**SIZES, **more})
        return forward_flops(config, 0, tokens, attended) / (4 * 4 * 8)

    window = {"use_sliding_window": True, "sliding_window": 6}
    kinds = {"layer_types": ["full_attention", "sliding_attention"]}
    assert pairs(10, 55) == 2 * 55
    assert pairs(10, 55, **window, **kinds) == 55 + 55
    assert pairs(20, 210, **window, **kinds) == 210 + 120
    mistral = transformers.MistralConfig(**{**SIZES, "sliding_window": 6})
    assert forward_flops(mistral, 0, 20, 210) == 4 * 4 * 8 * (120 + 120)


def test_unknown_architectures() -> None:
    config = transformers.Qwen2Config(**SIZES)
    assert math.isnan(forward_flops(config, None, 5, 15))
    mixed = transformers.Qwen2Config(**SIZES, layer_types=["full_attention", "linear_attention"])
    assert math.isnan(forward_flops(mixed, 1, 5, 15))
    with torch.device("meta"):
        mamba = transformers.MambaForCausalLM(transformers.MambaConfig(num_hidden_layers=1))
        latent = transformers.DeepseekV3Config(**SIZES)
    assert params_in_products(mamba) is None
    assert math.isnan(forward_flops(mamba.config, 1, 5, 15))
    assert math.isnan(forward_flops(latent, 1, 5, 15))
    assert math.isnan(forward_flops(transformers.T5Config(), 1, 5, 15))
    assert math.isnan(forward_flops(transformers.Gemma3Config(), 1, 5, 15))  # has a vision tower


@table(
    ("name", "bf16", "float32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312, 19.5),
        ("NVIDIA H100 80GB HBM3", 989, 67),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None, None),
        ("NVIDIA GeForce GTX 1080", None, None),
    ],
)
def test_peaks_of_data_sheets(name: str, bf16: float | None, float32: float | None) -> None:
    for expected, dtype in ((bf16, torch.bfloat16), (float32, torch.float32)):
        found = listed_peak(name, dtype, tf32=False)
        assert found == (None if expected is None else pytest.approx(expected * 1e12))


def test_peaks_of_other_types() -> None:
    a100 = "NVIDIA A100-SXM4-40GB"
    assert listed_peak(a100, torch.float16, tf32=False) == 312e12
    assert listed_peak(a100, torch.float32, tf32=True) == 156e12
    assert listed_peak(a100, torch.float64, tf32=True) is None
    assert math.isnan(peak_flops(CPU, torch.float32))
