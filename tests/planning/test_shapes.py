"""Tensors and FLOPs of shapes against those of real models."""

from typing import Any

import pytest
import transformers
from transformers import PretrainedConfig

from grpo_cli.errors import UserError
from grpo_cli.models import flops
from grpo_cli.planning.shapes import Shape
from tests.planning.models import MODELS, MOE, config_of, of_kind, on_meta


@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_tables_have_the_parameters_of_real_ones(name: str) -> None:
    shape = MODELS[name]
    model = on_meta(config_of(shape))
    assert Shape.of(model.config) == shape
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.active == flops.params_in_products(model)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("Mistral", {"head_dim": 24}),
        ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen2", {"num_key_value_heads": 4, "num_hidden_layers": 3}),
        ("Qwen3", {"head_dim": 32}),
        ("Qwen3Moe", {**MOE, "head_dim": 16}),
        ("Qwen3Moe", {**MOE, "head_dim": 16, "tie_word_embeddings": True}),
    ],
)
def test_tensors_are_those_of_real_models(kind: str, more: dict[str, Any]) -> None:
    model = on_meta(of_kind(kind, **more))
    shape = Shape.of(model.config)
    of_layer = [tuple(p.shape) for p in model.base_model.layers[0].parameters()]
    every = [tuple(p.shape) for p in model.parameters()]
    assert sorted(shape.layer()) == sorted(of_layer)
    assert sorted(shape.layer() * shape.layers + shape.root()) == sorted(every)
    assert shape.active == flops.params_in_products(model)
    expected = flops.forward_flops(model.config, shape.active, 9, 45, logits=5)
    assert shape.forward_flops(9, 45, logits=5) == expected


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (transformers.GPT2Config(), "model_type = gpt2"),
        (of_kind("Llama", attention_bias=True), "llama with attention_bias"),
        (of_kind("Llama", mlp_bias=True), "llama with mlp_bias"),
        (of_kind("Qwen3Moe", **MOE, mlp_only_layers=[0]), "qwen3_moe with mlp_only_layers"),
        (of_kind("Qwen3Moe", **MOE, decoder_sparse_step=2), "qwen3_moe with decoder_sparse_step"),
    ],
)
def test_a_model_that_is_not_described_is_refused(config: PretrainedConfig, said: str) -> None:
    with pytest.raises(UserError, match=f"^{said}: .*llama, mistral"):
        Shape.of(config)
