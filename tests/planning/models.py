"""Models and shapes that the tests of this package share."""

from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from grpo_cli.planning.settings import Settings
from grpo_cli.planning.shapes import Shape
from tests.scripts.test_docs import script

MODELS: dict[str, Shape] = script("make_docs").MODELS
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}

# 10 rows and columns that can be checked in one's head: a layer has 4·4·4 + 3·4·8 + 2·4 = 168
# parameters, embedding and head 40 each, the last norm 4. 420 in all, 2·160 + 40 in products.
TINY = Shape(layers=2, hidden=4, heads=2, kv_heads=2, head_dim=2, width=8, vocab=10)
PLAIN = Settings(bf16=False, gradient_checkpointing=False, micro_tokens=1)


def make(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def on_meta(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return make(config)


def config_of(shape: Shape) -> PretrainedConfig:
    """Returns the configuration of a model of this shape: Qwen3-MoE with experts, else Qwen2."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
    }
    if not shape.experts:
        return transformers.Qwen2Config(**sizes, intermediate_size=shape.width)
    return transformers.Qwen3MoeConfig(
        **sizes,
        head_dim=shape.head_dim,
        moe_intermediate_size=shape.width,
        num_experts=shape.experts,
        num_experts_per_tok=shape.chosen,
    )


def of_kind(kind: str, **more: Any) -> PretrainedConfig:
    config: PretrainedConfig = getattr(transformers, f"{kind}Config")(**{**SMALL, **more})
    return config
