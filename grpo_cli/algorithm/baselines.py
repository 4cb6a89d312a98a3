"""The baseline and the divisor of an advantage, A = (r − baseline) / divisor, for explanations.

A function for each rule of `advantages.py` that has this form, with the parameters of its rule; it
returns both as [P, G] float64. Groups whose rewards are all equal have an advantage of 0 whatever
their divisor is. `pass_at_k` and `gdpo` have no such baseline.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_cli.algorithm.advantages import EPS, group_mean, group_std

Terms = tuple[Tensor, Tensor]  # (baseline, divisor), [P, G] each


def _group(rewards: Tensor, *, scale: str) -> Terms:
    """The group's mean; the standard deviation of the group or of the step, or 1."""
    divisor = torch.ones_like(rewards[:, :1])
    if scale == "group":
        divisor = group_std(rewards)[:, None] + EPS
    elif scale == "batch":
        divisor = divisor * (group_std(rewards.reshape(1, -1)) + EPS)
    return group_mean(rewards).expand_as(rewards), divisor.expand_as(rewards)


def _rloo(rewards: Tensor) -> Terms:
    """The mean of the group's other rewards; 1."""
    others = (~rewards.isnan()).sum(-1, keepdim=True) - 1  # [P, 1]
    rest = rewards.nansum(-1, keepdim=True) - rewards
    return rest / others.clamp(min=1), torch.ones_like(rewards)


def _reinforce_pp(rewards: Tensor, *, baseline: str) -> Terms:
    """The group's mean, or that of the step; the standard deviation of what is left, over it."""
    own = group_mean(rewards) if baseline == "group" else torch.zeros_like(rewards[:, :1])
    every = (rewards - own).reshape(1, -1)
    divisor = group_std(every) + EPS
    return (own + every.nanmean()).expand_as(rewards), divisor.expand_as(rewards)


def _opo(rewards: Tensor, lengths: Tensor) -> Terms:
    """The group's mean weighted by length; 1."""
    weight = torch.where(rewards.isnan(), 0.0, lengths.to(rewards.dtype))
    mean = (weight * rewards.nan_to_num()).sum(-1) / weight.sum(-1).clamp(min=1)
    return mean[:, None].expand_as(rewards), torch.ones_like(rewards)


def _max_rl(rewards: Tensor) -> Terms:
    """The group's mean, twice."""
    mean = group_mean(rewards).expand_as(rewards)
    return mean, mean.clamp(min=torch.finfo(mean.dtype).tiny)


BASELINES: dict[str, Callable[..., Terms]] = {
    "group": _group,
    "rloo": _rloo,
    "reinforce_pp": _reinforce_pp,
    "opo": _opo,
    "max_rl": _max_rl,
}
