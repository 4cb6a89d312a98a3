"""Rewards to advantages: one pure function for each rule.

Rewards are [P, G], one row a group; NaN marks a rollout to which no reward function applied. A rule
returns [P, G] advantages, 0 where the reward is NaN. Advantages of the whole step are computed
together, so that no rule depends on how prompts are divided over processes.
"""

import torch
from torch import Tensor


def group_relative(rewards: Tensor, *, scale: str = "group", eps: float = 1e-4) -> Tensor:
    """A_i = (r_i − mean(r)) / (std(r) + eps) over the group.

    DeepSeekMath, arXiv 2402.03300, section 4.1.2 (outcome supervision).

    Args:
        rewards: [P, G], NaN where there is none.
        scale: "group" divides by the group's sample standard deviation; "none" does not
            (Dr. GRPO, arXiv 2503.20783).
        eps: keeps the division finite; TRL's value.

    Returns:
        [P, G] float32. A group whose rewards are all equal gets exactly 0.
    """
    assert rewards.ndim == 2, f"rewards must be [P, G], not {tuple(rewards.shape)}"
    assert scale in ("group", "none"), f"unknown scale {scale!r}"
    rewards = rewards.double()
    centred = rewards - rewards.nanmean(-1, keepdim=True)  # [P, G]
    if scale == "group":
        centred = centred / (group_std(rewards)[:, None] + eps)
    # Compared exactly: a mean of equal floats can be off by one ulp, and eps would blow that up.
    silent = all_equal(rewards)[:, None] | rewards.isnan()
    return centred.masked_fill(silent, 0.0).float()


def group_std(rewards: Tensor) -> Tensor:
    """Sample standard deviation (divisor n − 1) of each group, [P, G] -> [P]; 0 if n < 2."""
    count = (~rewards.isnan()).sum(-1)
    centred = rewards - rewards.nanmean(-1, keepdim=True)
    return (centred.square().nansum(-1) / (count - 1).clamp(min=1)).sqrt()


def all_equal(rewards: Tensor) -> Tensor:
    """Groups that carry no signal, [P, G] -> [P] bool: all rewards that are there are equal."""
    low = rewards.nan_to_num(nan=torch.inf).amin(-1)
    high = rewards.nan_to_num(nan=-torch.inf).amax(-1)
    return low >= high
