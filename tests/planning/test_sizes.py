"""Weights and activations that are counted without storage are those of a real model."""

from typing import Any

import pytest
import torch
import transformers

from grpo_cli.config.recipe import Recipe
from grpo_cli.models import loading
from grpo_cli.models.activation_bytes import bytes_per_token
from grpo_cli.models.policy_logprobs import PolicyLogprobs
from grpo_cli.models.settings import Adapter, Model
from grpo_cli.planning.plan import with_values
from grpo_cli.planning.sizes import sizes_of
from tests.conftest import make_rollout

SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.runs
def test_weights_by_hand() -> None:
    """A layer has 4·4·4 + 3·4·8 + 2·4 weights and 3·4 biases; embedding and head 40, a norm 4."""
    config = transformers.Qwen2Config(
        hidden_size=4, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=10, tie_word_embeddings=False,
    )  # fmt: skip
    sizes = sizes_of(config, Recipe())
    assert (sizes.layer, sizes.parameters) == (180, 2 * 180 + 84)
    assert sizes.matrices == 320
    assert sizes.cache == 2 * 2 * 4, "keys and values of two layers"
    rank = with_values(Recipe(), {"adapter": Adapter(method="lora", rank=1)})
    # A [r, in] and B [out, r]: 4 matrices of 4 + 4, and 3 of 4 + 8
    assert sizes_of(config, rank).adapter == 2 * (4 * 8 + 3 * 12)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["Qwen2Config", "Qwen3Config", "LlamaConfig"])
def test_activations_are_those_of_a_real_model(kind: str, checkpointing: bool) -> None:
    config = getattr(transformers, kind)(**SMALL)
    settings = Model(gradient_checkpointing=checkpointing)
    model = transformers.AutoModelForCausalLM.from_config(config)
    loading.prepare_for_training(model, settings)
    rollouts = [make_rollout([*range(3, 40)], [*range(6, 90)])]
    logprobs = PolicyLogprobs(model)
    logprobs.check(rollouts, 1.0)
    measured = bytes_per_token(logprobs, rollouts, 1.0)
    planned = sizes_of(config, with_values(Recipe(), {"model": settings})).activations
    assert planned == pytest.approx(measured, rel=0.15)


def test_autocast_and_random_numbers() -> None:
    config = transformers.Qwen2Config(**SMALL)
    full = with_values(Recipe(), {"model.gradient_checkpointing": False})
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    half = sizes_of(config, with_values(full, {"mixed_precision": "bf16"}))
    assert torch.equal(torch.random.get_rng_state(), before), "a run's numbers stay"
    in_full = sizes_of(config, full).activations
    assert in_full is not None
    assert half.activations is not None
    assert 0.4 < half.activations / in_full < 0.8, "copies of the weights do not count"
