"""Computes the share of the advantage's variance that each reward function explains."""

from __future__ import annotations

import torch
from torch import Tensor


def advantage_shares(advantages: Tensor, values: Tensor, total: Tensor, counted: Tensor) -> Tensor:
    """Decomposes the variance of the advantages within their groups by reward function.

        share_k = Σ_i a_ik A_i / Σ_i A_i²,   a_ik = c_g d_ik

    A_i is the advantage and d_ik the contribution of function k to the reward, both without the
    mean of their group g. c_g is the slope of A on the reward within the group: 1 / std of the
    group with `advantage.scale=group`. Such a rule is linear in the reward, A_i = Σ_k a_ik. Then
    share_k = Cov(a_k, A) / Var(A), and the shares sum to 1. For a nonlinear rule (pass@k), Σ_i A_i²
    is replaced by the variance that A shares with the reward, Σ_i c_g d_i A_i.

    For example, the rewards 1 + 0, 0 + 0, 1 + 1, 0 + 1 of two functions give shares of 1/2 each. A
    function that works against the sum of all functions has a negative share.

    Args:
        advantages: [P, G].
        values: contribution of each function to the rewards, [P, G, R]; 0 where it did not apply.
        total: rewards from which the advantages are computed, [P, G]; NaN where there is none. They
            can include other terms, such as a KL, whose share is the rest up to 1.
        counted: mask of completions that train, [P, G] bool.

    Returns:
        [R] float64; empty if no completion that trains has an advantage.
    """
    scored = ~total.isnan()
    part = _centred(values, scored[..., None])  # [P, G, R]
    whole = _centred(total.nan_to_num(), scored)  # [P, G]
    advantage = _centred(advantages.double(), scored)
    squares = whole.square().sum(-1)
    slope = (advantage * whole).sum(-1) / squares.masked_fill(squares == 0, 1.0)  # [P]
    weight = slope[:, None] * advantage * (counted & scored)  # [P, G]
    variance = (weight * whole).sum()
    if not variance > 0:
        return torch.zeros(0, dtype=torch.float64)
    return torch.einsum("pg,pgr->r", weight, part) / variance


def _centred(values: Tensor, scored: Tensor) -> Tensor:
    """Subtracts the group's mean over the scored completions along dim 1; 0 elsewhere."""
    there = values.masked_fill(~scored, torch.nan)
    return (there - there.nanmean(1, keepdim=True)).nan_to_num()
