"""Measures the bytes that a forward pass keeps for its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from grpo_cli.distributed import fsdp
from grpo_cli.models.memory import own_part
from grpo_cli.models.policy_logprobs import PolicyLogprobs, cut
from grpo_cli.records import Rollout


def bytes_per_token(
    policy_logprobs: PolicyLogprobs, rollouts: Sequence[Rollout], temperature: float
) -> float:
    """Measures the bytes per computed token that a forward pass keeps for its backward.

    It is the difference of two passes, which excludes memory that does not grow with the tokens,
    such as copies of the weights in another precision. With images it is the maximum of this and of
    the difference that one more prompt with images makes, including the vision tower. With gradient
    checkpointing one layer's share is added, since the backward recomputes one layer at a time.
    """
    model = policy_logprobs.model
    kept = _slope(policy_logprobs, rollouts, temperature)
    if getattr(model, "is_gradient_checkpointing", False):
        with without_checkpointing(model):
            all_layers = _slope(policy_logprobs, rollouts, temperature)
        kept += all_layers / model.config.get_text_config(decoder=True).num_hidden_layers
    return kept


@contextmanager
def without_checkpointing(model: nn.Module) -> Iterator[None]:
    """Disables gradient checkpointing within the context."""
    modules = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    for module in modules:
        setattr(module, "gradient_checkpointing", False)  # noqa: B010
    try:
        yield
    finally:
        for module in modules:
            setattr(module, "gradient_checkpointing", True)  # noqa: B010


def _slope(
    policy_logprobs: PolicyLogprobs, rollouts: Sequence[Rollout], temperature: float
) -> float:
    some = cut(rollouts)
    smaller, fewer = _kept(policy_logprobs, some[:1], temperature)

    def per_token(more: Sequence[Rollout]) -> float:
        size, tokens = _kept(policy_logprobs, more, temperature)
        if tokens > fewer and size > smaller:
            return (size - smaller) / (tokens - fewer)
        return size / tokens

    slope = per_token(some)
    if not some[0].prompt.images:  # `cut` puts images first
        return slope
    other = replace(some[0].prompt, row=some[0].prompt.row + 1)  # the same images, once more
    return max(slope, per_token([some[0], replace(some[0], prompt=other)]))


def _kept(
    policy_logprobs: PolicyLogprobs, rollouts: Sequence[Rollout], temperature: float
) -> tuple[int, int]:
    """Returns (bytes that a forward pass keeps, tokens that it computes)."""
    with saved_bytes(policy_logprobs.model) as kept, torch.enable_grad():
        logprobs, _ = policy_logprobs(rollouts, temperature)
    del logprobs
    fsdp.reshard(policy_logprobs.model)
    return kept(), policy_logprobs.tokens(rollouts)


@contextmanager
def saved_bytes(model: nn.Module) -> Iterator[Callable[[], int]]:
    """Counts the bytes that forward passes in the context save for backward, without weights."""
    weights = {own_part(p).untyped_storage()._cdata for p in model.parameters()}
    seen: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            seen[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # Counted at the end, when the gathered weights of a sharded model are empty.
        yield lambda: sum(storage.nbytes() for storage in seen.values())
