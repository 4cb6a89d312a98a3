"""The reference policy π_ref of the KL term."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_cli.models import adapters, loading
from grpo_cli.models.memory import own_part
from grpo_cli.models.policy_logprobs import PolicyLogprobs


class Reference:
    """A frozen reference policy, as a second model."""

    def __init__(self, logprobs: PolicyLogprobs) -> None:
        self.logprobs = logprobs
        self.has_moved = False  # True once it differs from the run's initial model

    @property
    def weights_to_save(self) -> nn.Module | Mapping[str, Tensor] | None:
        """The weights that a checkpoint must store, or None."""
        return self.weights if self.has_moved else None

    @property
    def weights(self) -> nn.Module | Mapping[str, Tensor]:
        """The model, or the weights that can change, by name."""
        model: nn.Module = self.logprobs.model
        return model

    @property
    def nbytes(self) -> int:
        """Bytes of this process for the reference, in addition to the policy."""
        weights = self.weights
        tensors = weights.parameters() if isinstance(weights, nn.Module) else weights.values()
        return sum(own_part(tensor).nbytes for tensor in tensors)

    def refresh(self, policy: PreTrainedModel, alpha: float) -> None:
        """Updates the reference: π_ref ← α π + (1 − α) π_ref (TR-DPO, arXiv 2404.09656)."""
        loading.mix(self.logprobs.model, policy, alpha)
        self.has_moved = True


class AdapterReference(Reference):
    """The policy with its initial adapter, without a second model.

    A copy of the initial adapter's weights replaces the current ones during a forward pass.
    """

    def __init__(self, logprobs: PolicyLogprobs) -> None:
        """Makes the reference from the policy's current weights.

        Args:
            logprobs: computes log-probabilities of the policy, and from now on of the reference.
        """
        super().__init__(logprobs)
        self.copy = adapters.copied(logprobs.model)
        self.autocast, logprobs.autocast = logprobs.autocast, self._entered

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self.copy

    def refresh(self, policy: PreTrainedModel, alpha: float) -> None:
        for name, p in adapters.tensors_of(policy).items():
            self.copy[name].lerp_(p.detach(), alpha)
        self.has_moved = True

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        initial = adapters.replaced(self.logprobs.model, self.copy)
        # Without a graph, since the weights change back before a backward could use them.
        with torch.no_grad(), initial, self.autocast():
            yield
