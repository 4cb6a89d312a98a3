"""Which layers are recomputed, and that the gradient does not show it."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from grpo_cli.models import activation_checkpointing
from grpo_cli.models.activation_bytes import bytes_per_token, saved_bytes
from grpo_cli.models.activation_checkpointing import is_recomputed
from grpo_cli.models.policy_logprobs import PolicyLogprobs
from grpo_cli.planning.memory import activation_bytes
from grpo_cli.planning.settings import Settings
from grpo_cli.planning.shapes import Shape
from tests.conftest import make_rollout

SHARES = (1.0, 0.5, 0.0)  # 0: no checkpointing


@pytest.mark.parametrize(
    ("share", "layers"),
    [(1.0, [0, 1, 2, 3, 4, 5]), (0.5, [1, 3, 5]), (1 / 3, [2, 5]), (0.75, [1, 2, 3, 5]), (0.1, [])],
)
def test_layers_are_spread_evenly(share: float, layers: list[int]) -> None:
    assert [i for i in range(6) if is_recomputed(i, share)] == layers


def make_model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).train()


def test_more_layers_less_memory_and_the_same_gradient_to_the_bit() -> None:
    rollouts = [make_rollout([3, 4, 5], [*range(6, 6 + 8 * n)]) for n in (2, 3, 1)]
    rollouts = [replace(r, prompt=rollouts[0].prompt) for r in rollouts]
    model = make_model()
    settings = Settings(bf16=False, gradient_checkpointing=False)
    bytes_kept, gradients, measured = [], [], []
    for share in SHARES:
        own = copy.deepcopy(model)
        if share:
            activation_checkpointing.enable(own, share)
        policy_logprobs = PolicyLogprobs(own)
        policy_logprobs.check(rollouts, 1.0)
        with saved_bytes(own) as kept:
            logprobs, _ = policy_logprobs(rollouts, 1.0)
        bytes_kept.append(kept())
        logprobs.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in own.parameters()]))
        flags = [layer.gradient_checkpointing for layer in own.base_model.layers]
        s = replace(settings, gradient_checkpointing=share > 0, checkpointed_layers=share or 1.0)
        planned = activation_bytes(Shape.of(own.config), s)
        measured.append(bytes_per_token(policy_logprobs, rollouts, 1.0) / planned)
        assert [layer.gradient_checkpointing for layer in own.base_model.layers] == flags
    assert bytes_kept == sorted(bytes_kept)
    assert len({*bytes_kept}) == len(SHARES)
    assert all(torch.equal(g, gradients[0]) for g in gradients)
    assert measured == pytest.approx([1.0] * len(SHARES), rel=0.05), "as planned"
