"""Computes the loss of a micro-batch, with policy term, KL and entropy bonus, and its metrics.

The terms are pure functions (`losses.py`, `kl.py`, `corrections.py`); `grpo_loss` combines them for
every policy loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from grpo_cli.algorithm import corrections, losses
from grpo_cli.algorithm.batch import Batch
from grpo_cli.algorithm.kl import ESTIMATORS, k3
from grpo_cli.algorithm.load_balancing import ExpertLoad, Routing
from grpo_cli.algorithm.losses import loss_function, rows_that_train
from grpo_cli.algorithm.metric_sums import MaskedSum, MetricSums, ReducedMetrics, masked_sum
from grpo_cli.algorithm.settings import Loss
from grpo_cli.algorithm.variants import apply, parameters, traits_of
from grpo_cli.errors import TrainingError

if TYPE_CHECKING:
    from grpo_cli.distributed.workers import Workers

STALENESS = "staleness/logp_difference"  # logged for prefetched rollouts
LARGEST_WEIGHT = 1e9  # its square fits in float32; such a sample counts for one token either way


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of one optimizer step, and the count that divides the entropy bonus."""

    beta: float
    entropy: float
    entropy_tokens: float  # tokens that the policy term trains in the optimizer batch
    router: float = 0.0  # weight of the load-balancing loss
    load: ExpertLoad | None = None  # in the optimizer batch, if `router` is not 0


@dataclass(frozen=True)
class LossOutput:
    """The loss of one micro-batch, measurements that training acts on, and logged metrics."""

    loss: Tensor  # [] a sum, already divided by the optimizer batch's counts; with gradient
    kl: MaskedSum | None  # KL to the reference in nats per token; adapts β
    entropy: MaskedSum | None  # nats per token that the policy term trains; adapts the bonus
    sampler_gap: MaskedSum  # |log π_old − log π_sampler| per token; stops training if too large
    staleness_gap: MaskedSum  # |log π − log π_sampler| per token: the same for prefetched rollouts
    metrics: MetricSums

    def detached(self) -> LossOutput:
        """Returns the output with a loss detached from its graph."""
        return replace(self, loss=self.loss.detach())


class LossSums:
    """Adds up the outputs of one optimizer batch's micro-batches, on the device."""

    def __init__(self) -> None:
        self.loss: list[Tensor] = []
        self.means: dict[str, list[MaskedSum]] = {name: [] for name in ACTED_ON}
        self.metrics = MetricSums()

    def add(self, output: LossOutput) -> None:
        """Adds the detached output of a micro-batch."""
        self.metrics.add(output.metrics)
        self.loss.append(output.loss)
        for name, sums in self.means.items():
            if (mean := getattr(output, name)) is not None:
                sums.append(mean)

    def add_entropy(self, output: LossOutput) -> None:
        """Adds only the entropy, for rollouts that have no gradient."""
        self.metrics.add(output.metrics, only=("entropy",))
        if output.entropy is not None:
            self.means["entropy"].append(output.entropy)

    def reduced(self, workers: Workers) -> MeasuredUpdate:
        """Reduces the measurements over all processes."""
        acted_on = MetricSums()
        acted_on.sums["loss"] = self.loss
        for name, sums in self.means.items():
            acted_on.sums[name] = [s.total for s in sums]
            acted_on.counts[name] = [s.number for s in sums]
        found = acted_on.reduced(workers)
        means = {name: Mean(found.sums[name], found.counts[name]) for name in ACTED_ON}
        return MeasuredUpdate(
            loss=found.sums["loss"], metrics=self.metrics.reduced(workers), **means
        )


class Mean(NamedTuple):
    """A mean over tokens that can be pooled with others."""

    total: float = 0.0
    number: float = 0.0

    @property
    def value(self) -> float:
        """The mean; NaN without values."""
        return self.total / self.number if self.number else math.nan

    @classmethod
    def pooled(cls, means: Iterable[Mean]) -> Mean:
        """Returns the mean over the tokens of several optimizer batches."""
        parts = list(means)
        return cls(math.fsum(m.total for m in parts), math.fsum(m.number for m in parts))


@dataclass(frozen=True)
class MeasuredUpdate:
    """The measurements of all processes in one optimizer batch; the fields are `LossOutput`'s."""

    loss: float
    kl: Mean
    entropy: Mean
    sampler_gap: Mean
    staleness_gap: Mean
    metrics: ReducedMetrics

    def to_state(self) -> dict[str, Any]:
        """Returns plain values for a checkpoint."""
        means = {name: list(getattr(self, name)) for name in ACTED_ON}
        return {"loss": self.loss, "metrics": asdict(self.metrics), **means}

    @classmethod
    def from_state(cls, saved: Mapping[str, Any]) -> MeasuredUpdate:
        """Restores the result of `to_state`."""
        means = {name: Mean(*saved[name]) for name in ACTED_ON}
        metrics = ReducedMetrics(**{k: dict(v) for k, v in saved["metrics"].items()})
        return cls(loss=saved["loss"], metrics=metrics, **means)


ACTED_ON = ("kl", "entropy", "sampler_gap", "staleness_gap")


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

    mean_kl = mean_entropy = None
    if batch.ref_logprobs is not None:
        kl = ESTIMATORS[config.kl_estimator](logprobs, batch.ref_logprobs)  # [B, C]
        if config.kl_bias_correction:
            kl = kl * ratio
        if config.kl_in == "loss":
            loss = loss + coefficients.beta * (kl * batch.weights).sum()
        mean_kl = metrics.mean("kl", kl, mask)
    if entropies is not None:
        entropies = batch.zero_masked(entropies)
        if coefficients.entropy:
            bonus = (entropies * trained).sum() / coefficients.entropy_tokens
            loss = loss - coefficients.entropy * bonus
        metrics.mean("entropy", entropies, mask)
        mean_entropy = masked_sum(entropies, trained)
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
        sampler_gap = metrics.mean("sampling/sampling_logp_difference/mean", gap, mask)
        metrics.highest("sampling/sampling_logp_difference/max", gap, mask)
        sampler_kl = k3(sampling_logprobs, old_logprobs).clamp(min=0)  # < 0 only by rounding
        metrics.mean("sampling/kl", sampler_kl, mask)
        drift = (logprobs - sampling_logprobs).abs()
        staleness_gap = metrics.mean(STALENESS, drift, mask)
    return LossOutput(loss, mean_kl, mean_entropy, sampler_gap, staleness_gap, metrics)


def logged(config: Loss, measured: dict[str, float]) -> dict[str, float]:
    """Selects the logged metrics from the reduced figures of an update."""
    out = {name: value for name, value in measured.items() if math.isfinite(value)}
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
