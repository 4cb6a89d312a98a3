"""The reference policy π_ref of the KL term."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_cli.models import adapters, loading
from grpo_cli.models.memory import own_part
from grpo_cli.models.policy_logprobs import PolicyLogprobs

Autocast = Callable[[], contextlib.AbstractContextManager[Any]]


class Reference:
    """A frozen policy that is asked for log-probabilities: a second model."""

    def __init__(self, logprobs: PolicyLogprobs) -> None:
        self.logprobs = logprobs
        self.has_moved = False  # it is no longer the model that the run began with

    @property
    def weights_to_save(self) -> nn.Module | Mapping[str, Tensor] | None:
        """The weights, if a checkpoint has to hold them."""
        return self.weights if self.has_moved else None

    @property
    def weights(self) -> nn.Module | Mapping[str, Tensor]:
        """The model, or what of it can move, by name."""
        model: nn.Module = self.logprobs.model
        return model

    @property
    def nbytes(self) -> int:
        """The bytes that this process keeps for the reference besides the policy."""
        weights = self.weights
        tensors = weights.parameters() if isinstance(weights, nn.Module) else weights.values()
        return sum(own_part(tensor).nbytes for tensor in tensors)

    def refresh(self, policy: PreTrainedModel, alpha: float) -> None:
        """Moves the reference: π_ref ← α π + (1 − α) π_ref (TR-DPO, arXiv 2404.09656)."""
        loading.mix(self.logprobs.model, policy, alpha)
        self.has_moved = True


class AdapterReference(Reference):
    """The policy with the adapter that it began with: no second model.

    A fresh adapter is switched off. Otherwise a copy of its first weights is put into the policy
    for the time of a forward pass.
    """

    def __init__(
        self, make: Callable[[Autocast], PolicyLogprobs], autocast: Autocast, *, keeps_copy: bool
    ) -> None:
        """Makes the reference of a policy that begins now.

        Args:
            make: makes the log-probabilities of the policy, given what to enter for each forward.
            autocast: the run's mixed precision.
            keeps_copy: the policy with its adapter off is not the beginning, or the reference will
                move.
        """
        self.autocast = autocast
        super().__init__(make(self._entered))
        self.copy = adapters.copied(self.logprobs.model) if keeps_copy else None

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self.copy or {}

    def refresh(self, policy: PreTrainedModel, alpha: float) -> None:
        assert self.copy is not None, "a reference that moves has a copy"
        for name, p in adapters.tensors_of(policy).items():
            self.copy[name].lerp_(p.detach(), alpha)
        self.has_moved = True

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        model = self.logprobs.model
        if self.copy is None:
            weights = adapters.switched_off(model)
        else:
            weights = adapters.replaced(model, self.copy)
        # Without a graph, since the weights are others again before a backward could read them.
        with torch.no_grad(), weights, self.autocast():
            yield
