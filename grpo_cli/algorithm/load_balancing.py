"""Computes the load-balancing loss of a mixture of E experts.

    L = E · Σ_e f_e · P_e        f_e: how often expert e is among the k of a token, per token
                                 P_e: mean probability of expert e over the tokens

Switch Transformer, arXiv 2101.03961, eq. 4 to 6, with the tokens of all layers together, as in
transformers. L is k if the load is even. It is a product of two means over the optimizer batch, so
a sum of the micro-batches' own L would be a different loss. f_e has no gradient: it is first
counted over the complete batch, and the parts of P_e then add up over micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """The routing of a micro-batch's tokens, summed over tokens and layers."""

    assigned: Tensor  # [E] number of tokens that have each expert among their k
    probability: Tensor  # [E] sum of probabilities, with gradient
    tokens: Tensor  # [] number of tokens, each counted once per layer

    @classmethod
    def of(cls, router_logits: Sequence[Tensor], k: int, mask: Tensor) -> Routing:
        """Sums over the layers' router logits [T, E], on tokens where mask [T] is 1."""
        assigned, probability = [], []
        for logits in router_logits:
            dtype = torch.promote_types(logits.dtype, torch.float32)
            p = logits.softmax(-1, dtype=dtype)  # [T, E]
            chosen = torch.zeros_like(p).scatter_(-1, p.topk(k, dim=-1).indices, 1.0)
            assigned.append((chosen * mask[:, None]).sum(0))
            probability.append((p * mask[:, None]).sum(0))
        tokens = mask.sum() * len(router_logits)
        return cls(torch.stack(assigned).sum(0), torch.stack(probability).sum(0), tokens)


@dataclass(frozen=True)
class ExpertLoad:
    """The experts' load in one optimizer batch, over all processes."""

    assigned: Sequence[float]  # [E]
    tokens: float

    def loss(self, routing: Routing) -> Tensor:
        """Returns a micro-batch's part of L, []; the parts add up to L."""
        p = routing.probability
        share = torch.tensor(self.assigned, dtype=p.dtype, device=p.device) / self.tokens
        return len(p) * (share * p).sum() / self.tokens
