"""Corrects for rollouts sampled from another distribution than the trainer's policy. Pure.

There are two differences: between the numerics of the sampling engine and of the trainer
(`sampling_ratio`), and between the rollouts' policy and the updated one (`off_policy_keep`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_cli.algorithm.losses import LARGEST_LOG_RATIO, sequence_mean

MODES = (
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "sequence_mean_truncate",
    "sequence_mean_mask",
)


def sampling_ratio(
    old_logprobs: Tensor, sampling_logprobs: Tensor, mask: Tensor, mode: str
) -> Tensor:
    """Returns π_old(trainer) / π(sampler), before any bound.

    Args:
        old_logprobs, sampling_logprobs, mask: [B, C].
        mode: the part before the last underscore is the level. "token": each token's ratio.
            "sequence": the product over the completion. "sequence_mean": the geometric mean, since
            the product of many tokens exceeds any bound, which would drop long completions.

    Returns:
        [B, C] for tokens, [B, 1] for sequences; 1 on tokens that do not train.
    """
    difference = (old_logprobs - sampling_logprobs) * mask
    level = mode.rpartition("_")[0]
    if level == "sequence":
        difference = difference.sum(-1, keepdim=True)
    elif level == "sequence_mean":
        difference = sequence_mean(difference, mask)[:, None]
    return difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def bounded(ratio: Tensor, mode: str, cap: float | None, floor: float | None) -> Tensor:
    """Returns the factor of the policy loss: the ratio, clamped to its bounds or 0 outside them.

    Truncation is TIS (https://fengyao.notion.site/off-policy-rl), masking is MIS (IcePop, arXiv
    2510.18855). Bounds are inclusive.
    """
    assert mode in MODES, f"unknown mode {mode!r}"
    low, high = -math.inf if floor is None else floor, math.inf if cap is None else cap
    if mode.endswith("truncate"):
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def off_policy_keep(
    advantages: Tensor, logprobs: Tensor, sampling_logprobs: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    """Returns 0 on tokens with A < 0 in strongly off-policy completions, else 1, [B, C].

    DeepSeek-V3.2 (arXiv 2512.02556, section 3.1, off-policy sequence masking): a token with A < 0
    is excluded if the mean of log π_sampler − log π over its completion exceeds the threshold.

    Args:
        advantages, logprobs, sampling_logprobs, mask: [B, C].
    """
    drift = sequence_mean(sampling_logprobs - logprobs.detach(), mask)[:, None]  # [B, 1]
    return ((advantages >= 0) | (drift <= threshold)).to(mask.dtype)


def effective_share(mean: float, mean_of_squares: float) -> float:
    """Returns Kish's effective sample size as a share of the weights: mean(w)² / mean(w²)."""
    return mean * mean / mean_of_squares if mean_of_squares > 0 else 0.0


def log_correction(weights: Tensor, mask: Tensor) -> Tensor:
    """Returns the finite log of a correction for `losses.vespo`; 0 becomes the smallest float."""
    tiny = torch.finfo(weights.dtype).tiny
    return weights.clamp(min=tiny).log() * (mask if weights.shape == mask.shape else 1.0)
