"""The load-balancing loss of a mixture of experts: each of E experts should get as many tokens.

    L = E · Σ_e f_e · P_e        f_e: how often expert e is among the k of a token, per token
                                 P_e: mean probability of expert e over the tokens

Switch Transformer, arXiv 2101.03961, eq. 4 to 6, with the tokens of all layers together, as in
transformers. L is k where the load is even. It is a product of two means over the optimizer batch,
so that a sum over micro-batches of their own L would be another loss. f_e has no gradient: it is
counted over the complete batch first, and the parts of P_e then add up over micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """The choices of routers for the tokens of a micro-batch, summed over tokens and layers."""

    assigned: Tensor  # [E] how often each expert is among the k of a token
    probability: Tensor  # [E] probabilities, with gradient
    tokens: Tensor  # [] tokens, each once for each layer

    @classmethod
    def of(cls, router_logits: Sequence[Tensor], k: int, mask: Tensor) -> Routing:
        """Sums over the layers' router logits [T, E]; only tokens on which mask [T] is 1 count."""
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
class Load:
    """The experts' load in one optimizer batch, over all processes."""

    assigned: Sequence[float]  # [E]
    tokens: float

    def loss(self, routing: Routing) -> Tensor:
        """Returns the part of L that belongs to a micro-batch, []; the parts add up to L."""
        p = routing.probability
        share = torch.tensor(self.assigned, dtype=p.dtype, device=p.device) / self.tokens
        return len(p) * (share * p).sum() / self.tokens
