"""Computes the loss of a micro-batch: policy term, corrections, KL and entropy bonus; its metrics.

The terms are pure functions; `grpo_loss` combines them for every policy loss of `losses.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_cli.algorithm import losses
from grpo_cli.algorithm.batch import Batch
from grpo_cli.algorithm.load_balancing import ExpertLoad, Routing
from grpo_cli.algorithm.losses import (
    LARGEST_LOG_RATIO,
    loss_function,
    rows_that_train,
    sequence_mean,
)
from grpo_cli.algorithm.metric_sums import MetricSums
from grpo_cli.algorithm.settings import CORRECTIONS, Loss
from grpo_cli.algorithm.variants import apply, parameters, traits_of
from grpo_cli.errors import TrainingError

# Metrics that training acts on, as on "kl": a gap stops the run, the entropy adapts its bonus.
STALENESS = "staleness/logp_difference"  # |log π − log π_sampler|; logged for prefetched rollouts
SAMPLER_GAP = "sampling/sampling_logp_difference/mean"  # |log π_old − log π_sampler|
TRAINED_ENTROPY = "entropy/trained"  # of the tokens that the policy term trains; not logged
LARGEST_WEIGHT = 1e9  # its square fits in float32; such a sample counts for one token either way
KL_GAIN = 0.1  # Ziegler et al.: β changes by at most a fifth of this per step
ENTROPY_COEF_STEP, ENTROPY_COEF_MAX = 0.005, 1.0  # Skywork-OR1's step


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of one optimizer step, and the count that divides the entropy bonus."""

    beta: float
    entropy: float
    entropy_tokens: float  # tokens that the policy term trains in the optimizer batch
    router: float = 0.0  # weight of the load-balancing loss
    load: ExpertLoad | None = None  # in the optimizer batch, if `router` is not 0


@dataclass
class AdaptiveBeta:
    """The coefficient of the KL term, which follows `loss.kl_target` if that is set.

    β ← β(1 + 0.1·e), e = clip(KL/target − 1, −0.2, 0.2) (Ziegler et al., arXiv 1909.08593, section
    2.2), with the mean KL of the step's tokens.
    """

    adapted: float | None = None  # stored in checkpoints; None before the first update

    def value(self, config: Loss) -> float:
        """Returns the coefficient for this step."""
        if config.kl_target is None or self.adapted is None:
            return config.beta
        return self.adapted

    def update(self, config: Loss, kl: float) -> None:
        """Updates the coefficient from the KL measured in a step; a NaN leaves it unchanged."""
        if config.kl_target is not None and math.isfinite(kl):
            error = min(max(kl / config.kl_target - 1, -0.2), 0.2)
            self.adapted = self.value(config) * (1 + KL_GAIN * error)


@dataclass
class AdaptiveEntropyBonus:
    """The coefficient of the entropy bonus, which follows `loss.entropy_target` if that is set.

    It takes a step up after an entropy at or below the target, and else a step down. The bonus is
    applied only after such an entropy, so not in the first optimizer step (Skywork-OR1, arXiv
    2505.22312, section 4.1).
    """

    adapted: float | None = None  # stored in checkpoints; None before the first update
    entropy: float | None = None  # entropy of the last optimizer step, nats a token; also stored

    def value(self, config: Loss) -> float:
        """Returns the coefficient for this optimizer step."""
        target = config.entropy_target
        if target is None:
            return config.entropy_coef
        if self.entropy is None or not self.entropy <= target:  # a NaN too
            return 0.0
        return config.entropy_coef if self.adapted is None else self.adapted

    def update(self, config: Loss, entropy: float) -> None:
        """Updates the coefficient from the entropy measured in an optimizer step."""
        if config.entropy_target is None:
            return
        self.entropy = entropy
        coef = config.entropy_coef if self.adapted is None else self.adapted
        step = ENTROPY_COEF_STEP if entropy <= config.entropy_target else -ENTROPY_COEF_STEP
        self.adapted = min(max(coef + step, 0.0), ENTROPY_COEF_MAX)


class LossOutput(NamedTuple):
    """The loss of one micro-batch, and what is measured with it."""

    loss: Tensor  # [] a sum, already divided by the optimizer batch's counts; with gradient
    metrics: MetricSums


def every_rollout_has_gradient(
    config: Loss, *, has_reference: bool, entropy_coef: float, router_coef: float = 0.0
) -> bool:
    """Returns whether zero-advantage rollouts also get a forward and backward pass.

    Their gradient can come from the KL, the entropy, the load of experts, or a loss that needs no
    advantage.
    """
    kl = has_reference and config.kl_in == "loss"
    without_advantage = traits_of(loss_function(config)).trains_without_advantage
    bonus = entropy_coef > 0 or router_coef > 0
    return kl or bonus or without_advantage


def grpo_loss(
    config: Loss,
    batch: Batch,
    logprobs: Tensor,
    entropies: Tensor | None,
    coefficients: Coefficients,
    routing: Routing | None = None,
) -> LossOutput:
    """Computes one micro-batch's part of the loss, divided by the optimizer batch's counts.

        Σ_t weight_t (policy_t · correction_t · keep_t · high_entropy_t + β·kl_t)
        − entropy_coef · Σ_t entropy_t / entropy_tokens + router · L (load_balancing.py)

    Args:
        logprobs: [B, C] log-probabilities of the current policy, with gradient.
        entropies: [B, C], with gradient if there is a bonus; None if they are not measured.
        routing: routing of the micro-batch's tokens to experts, if their load is balanced.
    """
    metrics = MetricSums()
    mask = batch.loss_mask
    trained = mask if batch.high_entropy is None else mask * batch.high_entropy
    logprobs = batch.zero_masked(logprobs)
    old_logprobs = batch.old_logprobs_or(logprobs.detach())
    # Use the old policy's where the generator reported none.
    unknown = batch.sampling_logprobs.isnan()
    sampling_logprobs = torch.where(unknown, old_logprobs, batch.sampling_logprobs)
    log_ratio = logprobs - old_logprobs  # [B, C]
    ratio = losses.importance_ratio(log_ratio, mask, config.ratio_level)  # [B, C] or [B, 1]
    correction = sampler_correction(config, old_logprobs, sampling_logprobs, mask, metrics)
    tensors = {
        "logprobs": logprobs,
        "log_ratio": log_ratio,
        "ratio": ratio,
        "advantages": batch.advantages,
        "mask": mask,
        "trained": trained,
        "log_correction": log_correction(correction, mask),
        "cov_selected": mask * 0 if batch.cov_selected is None else batch.cov_selected,
    }
    function = loss_function(config)
    policy = apply(function, tensors, config)
    if policy.shape not in (mask.shape, (len(mask), 1)):
        raise TrainingError(
            f"loss.policy = {config.policy}: returned a tensor of shape {list(policy.shape)} for "
            f"{mask.shape[0]} completions of up to {mask.shape[1]} tokens; it has to return the "
            "loss of each token, [B, C]."
        )
    if "log_correction" not in parameters(function)[0]:  # otherwise the loss applies it itself
        policy = policy * correction
    if config.off_policy_mask is not None:
        keep = off_policy_keep(
            batch.advantages, logprobs, sampling_logprobs, mask, config.off_policy_mask
        )
        policy = policy * keep
        metrics.mean("sampling/off_policy_masked", 1 - keep, mask)
    if batch.high_entropy is not None:
        policy = policy * batch.high_entropy
    loss = (policy * batch.weights).sum()
    metrics.total("policy_loss", loss)

    if batch.ref_logprobs is not None:
        kl = ESTIMATORS[config.kl_estimator](logprobs, batch.ref_logprobs)  # [B, C]
        if config.kl_bias_correction:
            kl = kl * ratio
        if config.kl_in == "loss":
            loss = loss + coefficients.beta * (kl * batch.weights).sum()
        metrics.mean("kl", kl, mask)
    if entropies is not None:
        entropies = batch.zero_masked(entropies)
        if coefficients.entropy:
            bonus = (entropies * trained).sum() / coefficients.entropy_tokens
            loss = loss - coefficients.entropy * bonus
        metrics.mean("entropy", entropies, mask)
        metrics.mean(TRAINED_ENTROPY, entropies, trained)
    if coefficients.load is not None:
        assert routing is not None, "the policy's routers are recorded"
        aux_loss = coefficients.load.loss(routing)
        loss = loss + coefficients.router * aux_loss
        metrics.total("aux_loss", aux_loss)
    metrics.total("loss", loss)

    with torch.no_grad():
        for measure in traits_of(function).metrics:
            apply(measure, {**tensors, "metric_sums": metrics}, config)
        gap = (old_logprobs - sampling_logprobs).abs()
        metrics.mean(SAMPLER_GAP, gap, mask)
        metrics.highest("sampling/sampling_logp_difference/max", gap, mask)
        sampler_kl = k3(sampling_logprobs, old_logprobs).clamp(min=0)  # < 0 only by rounding
        metrics.mean("sampling/kl", sampler_kl, mask)
        drift = (logprobs - sampling_logprobs).abs()
        metrics.mean(STALENESS, drift, mask)
    return LossOutput(loss, metrics)


def logged(config: Loss, measured: dict[str, float]) -> dict[str, float]:
    """Selects the logged metrics from the reduced figures of an update."""
    out = {
        name: value
        for name, value in measured.items()
        if math.isfinite(value) and name != TRAINED_ENTROPY
    }
    kl = "kl" in out and config.kl_in == "loss"
    terms = (kl, config.entropy_coef, config.entropy_target, "aux_loss" in out)
    if not any(terms):  # the loss has no other term
        del out["policy_loss"]
    if "sampling/weight" in out:
        weight, squared = out.pop("sampling/weight"), out.pop("sampling/weight_squared")
        out["sampling/effective_sample_size"] = effective_share(weight, squared)
    return out


def sampler_correction(
    config: Loss, old_logprobs: Tensor, sampling_logprobs: Tensor, mask: Tensor, metrics: MetricSums
) -> Tensor:
    """Returns the sampler's correction factor, [B, C] or [B, 1]; logs it."""
    mode = config.sampling_correction
    corrects = mode != "none"  # otherwise only the tokens' ratios are logged
    level = mode if corrects else "token_truncate"
    factor = ratio = sampling_ratio(old_logprobs, sampling_logprobs, mask, level)
    there = mask if ratio.shape == mask.shape else rows_that_train(mask)[:, None]
    if corrects:
        factor = bounded(ratio, mode, config.sampling_cap, config.sampling_floor)
        name = "sampling/importance_sampling_ratio"
        metrics.mean(f"{name}/mean", ratio, there)
        metrics.lowest(f"{name}/min", ratio, there)
        metrics.highest(f"{name}/max", ratio, there)
        metrics.mean("sampling/outside_bounds", (factor != ratio).to(mask.dtype), there)
    weight = factor.clamp(max=LARGEST_WEIGHT)
    metrics.mean("sampling/weight", weight, there)
    metrics.mean("sampling/weight_squared", weight.square(), there)
    return factor if corrects else torch.ones_like(mask[:, :1])


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
    assert mode in CORRECTIONS, f"unknown mode {mode!r}"
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
