"""The bytes that a forward pass keeps, with and without gradient checkpointing."""

import copy
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from grpo_cli.models.activation_bytes import bytes_per_token, saved_bytes
from grpo_cli.models.policy_logprobs import PolicyLogprobs
from tests.conftest import make_rollout


def test_checkpointing_saves_memory_and_keeps_the_gradient(model: PreTrainedModel) -> None:
    rollouts = [make_rollout([3, 4, 5], [*range(6, 6 + 8 * n)]) for n in (2, 3, 1)]
    rollouts = [replace(r, prompt=rollouts[0].prompt) for r in rollouts]
    model.train()
    bytes_kept, gradients = [], []
    for checkpointing in (True, False):
        own = copy.deepcopy(model)
        if checkpointing:
            own.gradient_checkpointing_enable({"use_reentrant": False})
        policy_logprobs = PolicyLogprobs(own)
        policy_logprobs.check(rollouts, 1.0)
        with saved_bytes(own) as kept:
            logprobs, _ = policy_logprobs(rollouts, 1.0)
        bytes_kept.append(kept())
        logprobs.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in own.parameters()]))
        flags = [layer.gradient_checkpointing for layer in own.base_model.layers]
        assert bytes_per_token(policy_logprobs, rollouts, 1.0) > 0
        assert [layer.gradient_checkpointing for layer in own.base_model.layers] == flags
    assert bytes_kept[0] < bytes_kept[1]
    assert torch.equal(*gradients)


def test_saved_bytes_count_a_storage_once_and_no_weights() -> None:
    layer = nn.Linear(10, 20, bias=False)
    given = torch.ones(5, 10)
    with saved_bytes(layer) as kept:
        assert kept() == 0
        a = layer(given)  # keeps `given`, 200 bytes, and its weight
        assert kept() == 200
        b = a.exp()  # keeps its result, 400 bytes
        assert kept() == 600
        c = b.view(20, 5).sin()  # keeps a view of the same
        assert kept() == 600
        c.double().square().sum().backward()  # keeps 800 bytes; backward finds all it needs
    assert kept() == 1400
    assert layer.weight.grad is not None
    with torch.no_grad(), saved_bytes(layer) as kept:
        layer(given).exp()
    assert kept() == 0
