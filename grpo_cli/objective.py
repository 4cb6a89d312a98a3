"""The loss of a micro-batch: policy term, KL, entropy bonus; and what is logged of it.

The pieces are pure functions of their own (`losses.py`, `kl.py`, `corrections.py`); here they are
put together, in one place for every policy loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_cli import corrections, losses
from grpo_cli.config import Loss, Recipe
from grpo_cli.kl import ESTIMATORS, k3
from grpo_cli.measures import MEASURES, rows_that_train
from grpo_cli.rollouts import Batch
from grpo_cli.signatures import apply, parameters
from grpo_cli.tally import Tally

DRIFT = "staleness/logp_difference"
DIFFERENCE = "sampling/sampling_logp_difference/mean"
LARGEST_WEIGHT = 1e9  # its square is a float32; such a sample counts for one token either way
ENTROPIES = ("entropy", "entropy_trained")  # what is tallied of entropies


@dataclass(frozen=True)
class Terms:
    """What the loss is computed from, [B, C] each: completion tokens, 0 where nothing trains."""

    logprobs: Tensor  # with gradient
    old_logprobs: Tensor
    sampling_logprobs: Tensor
    ref_logprobs: Tensor | None
    entropies: Tensor | None  # with gradient where a bonus asks for it
    advantages: Tensor
    mask: Tensor
    weights: Tensor  # what a token's loss is multiplied by (`normalization.py`)
    high_entropy: Tensor | None
    cov_selected: Tensor | None

    @property
    def sampled_logprobs(self) -> Tensor:
        """The engine's log-probabilities; the old policy's where it could not give one (NaN)."""
        unknown = self.sampling_logprobs.isnan()
        return torch.where(unknown, self.old_logprobs, self.sampling_logprobs)

    @classmethod
    def of(cls, batch: Batch, logprobs: Tensor, entropies: Tensor | None) -> Terms:
        """From a batch and what the policy says of it."""

        def masked(values: Tensor | None) -> Tensor | None:
            return None if values is None else batch.masked(values)

        logprobs = batch.masked(logprobs)
        old_logprobs = logprobs.detach()  # exactly on-policy, unless rows have some of their own
        if batch.old_logprobs is not None:
            absent = batch.old_logprobs.isnan()
            old_logprobs = torch.where(absent, old_logprobs, batch.masked(batch.old_logprobs))
        return cls(
            logprobs=logprobs,
            old_logprobs=old_logprobs,
            sampling_logprobs=batch.masked(batch.sampling_logprobs),
            ref_logprobs=masked(batch.ref_logprobs),
            entropies=masked(entropies),
            advantages=batch.advantages,
            mask=batch.loss_mask,
            weights=batch.weights,
            high_entropy=masked(batch.high_entropy),
            cov_selected=masked(batch.cov_selected),
        )


@dataclass(frozen=True)
class Coefficients:
    """The weights that may follow the run, and the count that the entropy bonus is divided by."""

    beta: float
    entropy: float
    entropy_tokens: float  # tokens that the policy term trains, in the optimizer batch


def none_is_silent(recipe: Recipe, has_reference: bool, entropy_coef: float) -> bool:
    """Whether every rollout is computed, also one without advantage.

    It has a gradient of its KL or entropy, or of a loss that needs no advantage; or the recipe asks
    for it.
    """
    loss = recipe.loss
    kl = has_reference and loss.kl_in == "loss"
    speaks = kl or entropy_coef > 0 or loss.policy in losses.WITHOUT_ADVANTAGE
    return speaks or not recipe.update.skip_silent


def loss_of(config: Loss, terms: Terms, coefficients: Coefficients, tally: Tally) -> Tensor:
    """One micro-batch's part of the loss: a sum, already divided by the optimizer batch's counts.

        Σ_t weight_t (policy_t · correction_t · keep_t · high_entropy_t + β·kl_t)
        − entropy_coef · Σ_t entropy_t / entropy_tokens

    Args:
        tally: takes what is logged.
    """
    mask = terms.mask
    trained = mask if terms.high_entropy is None else mask * terms.high_entropy
    log_ratio = terms.logprobs - terms.old_logprobs  # [B, C]
    ratio = losses.importance_ratio(log_ratio, mask, config.ratio_level)  # [B, C] or [B, 1]
    correction = sampler_correction(config, terms, tally)  # [B, C] or [B, 1]
    tensors = {
        "logprobs": terms.logprobs,
        "log_ratio": log_ratio,
        "ratio": ratio,
        "advantages": terms.advantages,
        "mask": mask,
        "trained": trained,
        "log_correction": corrections.log_correction(correction, mask),
        "cov_selected": mask * 0 if terms.cov_selected is None else terms.cov_selected,
    }
    function: Callable[..., Tensor] = losses.POLICY[config.policy]
    policy = apply(function, tensors, config)
    if "log_correction" not in parameters(function)[0]:  # it has taken it into account itself
        policy = policy * correction
    if config.off_policy_mask is not None:
        keep = corrections.off_policy_keep(
            terms.advantages, terms.logprobs, terms.sampled_logprobs, mask, config.off_policy_mask
        )
        policy = policy * keep
        tally.mean("sampling/off_policy_masked", 1 - keep, mask)
    if terms.high_entropy is not None:
        policy = policy * terms.high_entropy
    loss = (policy * terms.weights).sum()
    tally.total("policy_loss", loss)

    if terms.ref_logprobs is not None:
        kl = ESTIMATORS[config.kl_estimator](terms.logprobs, terms.ref_logprobs)  # [B, C]
        if config.kl_bias_correction:
            kl = kl * ratio
        if config.kl_in == "loss":
            loss = loss + coefficients.beta * (kl * terms.weights).sum()
        tally.mean("kl", kl.detach(), mask)
    if terms.entropies is not None:
        if coefficients.entropy:
            bonus = (terms.entropies * trained).sum() / coefficients.entropy_tokens
            loss = loss - coefficients.entropy * bonus
        tally.mean("entropy", terms.entropies.detach(), mask)
        tally.mean("entropy_trained", terms.entropies.detach(), trained)
    tally.total("loss", loss)

    with torch.no_grad():
        for measure in MEASURES.get(config.policy, ()):
            measure(config, tensors, tally)
        log_weight = terms.old_logprobs - terms.sampled_logprobs
        tally.mean(DIFFERENCE, log_weight.abs(), mask)
        tally.highest("sampling/sampling_logp_difference/max", log_weight.abs(), mask)
        kl = k3(terms.sampled_logprobs, terms.old_logprobs).clamp(min=0)  # but for rounding
        tally.mean("sampling/kl", kl, mask)
        drift = (terms.logprobs - terms.sampled_logprobs).abs()
        tally.mean(DRIFT, drift, mask)
    return loss


def logged(config: Loss, measured: dict[str, float]) -> dict[str, float]:
    """The metrics of an update, from its tallied figures."""
    out = {name: value for name, value in measured.items() if math.isfinite(value)}
    out.pop("entropy_trained", None)  # for the adaptive bonus alone
    kl = "kl" in out and config.kl_in == "loss"
    if not (kl or config.entropy_coef or config.entropy_target):  # there is no other term
        del out["policy_loss"]
    if "sampling/weight" in out:
        weight, squared = out.pop("sampling/weight"), out.pop("sampling/weight_squared")
        out["sampling/effective_sample_size"] = corrections.effective_share(weight, squared)
    return out


def sampler_correction(config: Loss, terms: Terms, tally: Tally) -> Tensor:
    """The factor for drawing from another distribution than the trainer's, [B, C] or [B, 1]."""
    mode, mask = config.sampling_correction, terms.mask
    if mode == "none":  # how good the tokens' weights would be is still of interest
        ratio = corrections.sampling_ratio(
            terms.old_logprobs, terms.sampled_logprobs, mask, "token_truncate"
        ).clamp(max=LARGEST_WEIGHT)
        tally.mean("sampling/weight", ratio, mask)
        tally.mean("sampling/weight_squared", ratio.square(), mask)
        return torch.ones_like(mask[:, :1])
    ratio = corrections.sampling_ratio(terms.old_logprobs, terms.sampled_logprobs, mask, mode)
    factor = corrections.bounded(ratio, mode, config.sampling_cap, config.sampling_floor)
    there = mask if ratio.shape == mask.shape else rows_that_train(mask)[:, None]
    name = "sampling/importance_sampling_ratio"
    tally.mean(f"{name}/mean", ratio, there)
    tally.lowest(f"{name}/min", ratio, there)
    tally.highest(f"{name}/max", ratio, there)
    tally.mean("sampling/outside_bounds", (factor != ratio).to(mask.dtype), there)
    tally.mean("sampling/weight", factor, there)
    tally.mean("sampling/weight_squared", factor.square(), there)
    return factor
