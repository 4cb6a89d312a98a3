"""Estimates the KL to the reference on sampled tokens."""

from __future__ import annotations

from torch import Tensor

from grpo_cli.algorithm.losses import LARGEST_LOG_RATIO


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The estimate log π − log π_ref: unbiased as a value, high variance, can be negative.

    Schulman 2020 (http://joschu.net/blog/kl-approx.html), as the next two. In the loss its gradient
    is ∇log π, which is 0 on average over the policy's own samples. There it only regularises
    together with `loss.kl_bias_correction`. In the reward it is the usual choice.
    """
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log π − log π_ref)² / 2: biased as a value; its gradient is unbiased for the KL."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """π_ref/π − log(π_ref/π) − 1: unbiased and never negative (DeepSeekMath eq. 4)."""
    log_ratio = ref_logprobs - logprobs
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp() - log_ratio - 1


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
