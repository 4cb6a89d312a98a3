"""Computes the loss of a micro-batch, with policy term, KL and entropy bonus, and its metrics.

The terms are pure functions (`losses.py`, `kl.py`, `corrections.py`); `grpo_loss` combines them for
every policy loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_cli.algorithm import corrections, losses
from grpo_cli.algorithm.batch import Batch
from grpo_cli.algorithm.kl import ESTIMATORS, k3
from grpo_cli.algorithm.load_balancing import ExpertLoad, Routing
from grpo_cli.algorithm.losses import loss_function, rows_that_train
from grpo_cli.algorithm.metric_sums import MetricSums
from grpo_cli.algorithm.settings import Loss
from grpo_cli.algorithm.variants import apply, parameters, traits_of
from grpo_cli.errors import TrainingError

# Metrics that training acts on, as on "kl": a gap stops the run, the entropy adapts its bonus.
STALENESS = "staleness/logp_difference"  # |log π − log π_sampler|; logged for prefetched rollouts
SAMPLER_GAP = "sampling/sampling_logp_difference/mean"  # |log π_old − log π_sampler|
TRAINED_ENTROPY = "entropy/trained"  # of the tokens that the policy term trains; not logged
LARGEST_WEIGHT = 1e9  # its square fits in float32; such a sample counts for one token either way


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of one optimizer step, and the count that divides the entropy bonus."""

    beta: float
    entropy: float
    entropy_tokens: float  # tokens that the policy term trains in the optimizer batch
    router: float = 0.0  # weight of the load-balancing loss
    load: ExpertLoad | None = None  # in the optimizer batch, if `router` is not 0


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
        "log_correction": corrections.log_correction(correction, mask),
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
        keep = corrections.off_policy_keep(
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
        out["sampling/effective_sample_size"] = corrections.effective_share(weight, squared)
    return out


def sampler_correction(
    config: Loss, old_logprobs: Tensor, sampling_logprobs: Tensor, mask: Tensor, metrics: MetricSums
) -> Tensor:
    """Returns the sampler's correction factor, [B, C] or [B, 1]; logs it."""
    mode = config.sampling_correction
    corrects = mode != "none"  # otherwise only the tokens' ratios are logged
    level = mode if corrects else "token_truncate"
    factor = ratio = corrections.sampling_ratio(old_logprobs, sampling_logprobs, mask, level)
    there = mask if ratio.shape == mask.shape else rows_that_train(mask)[:, None]
    if corrects:
        factor = corrections.bounded(ratio, mode, config.sampling_cap, config.sampling_floor)
        name = "sampling/importance_sampling_ratio"
        metrics.mean(f"{name}/mean", ratio, there)
        metrics.lowest(f"{name}/min", ratio, there)
        metrics.highest(f"{name}/max", ratio, there)
        metrics.mean("sampling/outside_bounds", (factor != ratio).to(mask.dtype), there)
    weight = factor.clamp(max=LARGEST_WEIGHT)
    metrics.mean("sampling/weight", weight, there)
    metrics.mean("sampling/weight_squared", weight.square(), there)
    return factor if corrects else torch.ones_like(mask[:, :1])
