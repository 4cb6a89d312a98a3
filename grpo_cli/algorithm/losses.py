"""Computes policy losses, with one pure function each, and their metrics.

A policy loss names its input tensors as positional parameters:

    log_ratio       [B, C]             log ρ = logprobs − old_logprobs of each token, with gradient
    ratio           [B, C] or [B, 1]   ρ at the recipe's level (`importance_ratio`)
    logprobs        [B, C]             log-probabilities under the policy, with gradient
    advantages      [B, C]             equal along a row, unless steps were rewarded
    mask            [B, C]             1 on the tokens that train
    trained         [B, C]             `mask` without the tokens that `loss.top_entropy` leaves out
    log_correction  [B, C] or [B, 1]   log of the sampler's correction (`loss.py`); a loss
                                       that names it applies the correction itself
    cov_selected    [B, C]             1 on the tokens that the loss's `select_tokens` chose

Keyword-only parameters are its knobs: fields of `loss` in the recipe, or arguments of its own,
`loss.args.NAME`, declared with `Arg`. It returns the loss of each token, [B, C] (or a tensor that
broadcasts to it), without averaging: `batch.py` divides it by the counts of the complete
optimizer batch over all processes.

To add a loss, write a function here with `@policy_loss`, whose arguments are its `Traits`; a YAML
in recipes/loss/; and a literal reference in tests/reference_losses.py. A loss can also be in your
own module: `loss.policy=my_module:my_loss`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor

from grpo_cli.algorithm.metric_sums import MetricSums
from grpo_cli.algorithm.settings import Loss
from grpo_cli.algorithm.token_selection import clip_cov as select_clip_cov
from grpo_cli.algorithm.token_selection import top_share
from grpo_cli.algorithm.variants import POLICY as POLICY
from grpo_cli.algorithm.variants import find, policy_loss
from grpo_cli.config.knob import Arg

# exp() of more overflows float32, and inf · 0 is NaN; ratios beyond e^80 are indistinguishable.
LARGEST_LOG_RATIO = 80.0


def loss_function(config: Loss) -> Callable[..., Tensor]:
    """Returns the policy loss that `loss.policy` names; raises a UserError without it."""
    return find(config.policy, "loss.policy")


def importance_ratio(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """Returns the ratio ρ of the policy to the policy that sampled the rollouts.

    Args:
        log_ratio: [B, C], 0 where `mask` is. mask: [B, C].
        level: "token": ρ_t = exp(log_ratio_t) (PPO, arXiv 1707.06347). "sequence": the geometric
            mean s = exp(mean_t log_ratio_t) (GSPO, arXiv 2507.18071, eq. 7). "sequence_token": the
            value s, with the gradient of each token's own log-probability (GSPO-token, eq. 14); for
            completions whose tokens differ in advantage.

    Returns:
        [B, C], or [B, 1] for "sequence".
    """
    assert level in ("token", "sequence", "sequence_token"), f"unknown level {level!r}"
    if level != "token":
        mean = sequence_mean(log_ratio, mask)[:, None]  # [B, 1]
        own = log_ratio - log_ratio.detach() + mean.detach()  # [B, C]
        log_ratio = mean if level == "sequence" else own
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Returns each row's mean over the tokens of `mask`, [B, C] -> [B]; 0 for an empty row."""
    assert values.shape == mask.shape, f"{tuple(values.shape)} values, {tuple(mask.shape)} mask"
    return (values * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def rows_that_train(mask: Tensor) -> Tensor:
    """Returns 1 for each row with a token that trains, else 0, [B, C] -> [B]."""
    return (mask.sum(-1) > 0).to(mask.dtype)


def clip_flags(
    ratio: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float | None
) -> tuple[Tensor, Tensor]:
    """Flags tokens whose gradient the clip removes: (below 1−ε, above 1+ε_high), bool."""
    high = epsilon if epsilon_high is None else epsilon_high
    return (ratio < 1 - epsilon) & (advantages < 0), (ratio > 1 + high) & (advantages > 0)


def measure_clipping(
    metric_sums: MetricSums,
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float,
    epsilon_high: float | None,
) -> None:
    """Adds clip_ratio/*: the share of tokens that the clip flags, or of rows with one ratio."""
    flags = clip_flags(ratio, advantages, epsilon, epsilon_high)
    rows = rows_that_train(mask)
    low, high = (flag.to(mask.dtype).expand_as(mask) for flag in flags)
    low_of, high_of = sequence_mean(low, mask), sequence_mean(high, mask)  # [B]
    if ratio.shape == mask.shape:
        metric_sums.mean("clip_ratio/low_mean", low, mask)
        metric_sums.mean("clip_ratio/high_mean", high, mask)
        metric_sums.mean("clip_ratio/region_mean", low + high, mask)
    else:
        metric_sums.mean("clip_ratio/low_mean", low_of, rows)
        metric_sums.mean("clip_ratio/high_mean", high_of, rows)
        metric_sums.mean("clip_ratio/region_mean", low_of + high_of, rows)
    metric_sums.lowest("clip_ratio/low_min", low_of, rows)
    metric_sums.highest("clip_ratio/high_max", high_of, rows)


def measure_clipping_of_logs(
    metric_sums: MetricSums,
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float,
    epsilon_high: float | None,
) -> None:
    """Adds clip_ratio/* for a clip of log ρ to (−ε, ε_high)."""
    ratio = 1 + log_ratio
    measure_clipping(
        metric_sums, ratio, advantages, mask, epsilon=epsilon, epsilon_high=epsilon_high
    )


def measure_selected(metric_sums: MetricSums, cov_selected: Tensor, mask: Tensor) -> None:
    """Adds cov_selected: the share of tokens selected by their covariance."""
    metric_sums.mean("cov_selected", cov_selected, mask)


def _delta_is_below_the_clip(
    *, epsilon: float, epsilon_high: float | None, delta: float | None = None
) -> str | None:
    high = epsilon if epsilon_high is None else epsilon_high
    if delta is None or delta >= 1 + high:
        return None
    return (
        f"loss.args.delta = {delta:g}: must be >= 1 + epsilon_high = {1 + high:g}; "
        "a lower one would also cut what positive advantages may gain."
    )


@policy_loss(metrics=(measure_clipping,), check=_delta_is_below_the_clip)
def clipped(
    ratio: Tensor,
    advantages: Tensor,
    *,
    epsilon: float,
    epsilon_high: float | None,
    delta: Annotated[
        float | None, Arg("Upper bound of the ratio for negative advantages; null: none.", gt=1)
    ] = None,
) -> Tensor:
    """−min(min(ρ, δ)·A, clip(ρ, 1−ε, 1+ε_high)·A).

    PPO's surrogate (arXiv 1707.06347, eq. 7) with GRPO's advantages (DeepSeekMath, arXiv
    2402.03300, eq. 3). ε_high > ε is DAPO's clip-higher (arXiv 2503.14476, eq. 8). δ also bounds
    the ratio for negative advantages, where the minimum does not (INTELLECT-2, arXiv 2505.07291,
    section 3.4). At ρ = 1 the gradient is −A·∇logprobs, that of REINFORCE.

    Divided by: tokens (dapo, bnpo), each completion's length (grpo), a constant (dr_grpo), with the
    sequence ratio (gspo), or not by length at all (luspo, arXiv 2602.05261).
    """
    high = epsilon if epsilon_high is None else epsilon_high
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.minimum(bounded * advantages, ratio.clamp(1 - epsilon, 1 + high) * advantages)


RatioCap = Annotated[float, Arg("Upper bound of a token's weight in CISPO.", gt=0)]


def measure_cap(
    metric_sums: MetricSums,
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ratio_cap: RatioCap = 5.0,
) -> None:
    """Adds cispo_clip_ratio: the share of tokens that the cap cuts, or of rows with one ratio."""
    cut = ((ratio > ratio_cap) & (advantages > 0)).to(mask.dtype).expand_as(mask)
    if ratio.shape == mask.shape:
        metric_sums.mean("cispo_clip_ratio", cut, mask)
    else:
        metric_sums.mean("cispo_clip_ratio", sequence_mean(cut, mask), rows_that_train(mask))


@policy_loss(metrics=(measure_cap,))
def cispo(
    ratio: Tensor, advantages: Tensor, logprobs: Tensor, *, ratio_cap: RatioCap = 5.0
) -> Tensor:
    """−sg[min(ρ, ε_max)]·A·logprobs: bounds each token's weight without removing its gradient.

    MiniMax-M1 (arXiv 2506.13585, eq. 4), in the form of ScaleRL (arXiv 2510.13786, section 3).
    Divided by tokens.
    """
    return -ratio.detach().clamp(max=ratio_cap) * advantages * logprobs


@policy_loss()
def sapo(
    ratio: Tensor,
    advantages: Tensor,
    *,
    sapo_temperature_pos: Annotated[float, Arg("Steepness of the gate for A > 0.", gt=0)] = 1.0,
    sapo_temperature_neg: Annotated[float, Arg("Steepness of the gate for A <= 0.", gt=0)] = 1.05,
) -> Tensor:
    """−(4/τ)·sigmoid(τ(ρ − 1))·A, with different τ for A > 0 and A ≤ 0.

    A soft gate in place of the clip (SAPO, arXiv 2511.20347, eqs. 5 and 6): its slope is 1 at ρ = 1
    and decreases on both sides. Divided by each completion's length.
    """
    tau = torch.full_like(advantages, sapo_temperature_neg)  # [B, C]
    tau.masked_fill_(advantages > 0, sapo_temperature_pos)
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages


VespoPower = Annotated[float, Arg("Power of the ratio in VESPO's weight.", ge=0)]
VespoDecay = Annotated[float, Arg("Decay with the ratio in VESPO's weight.", gt=0)]


def measure_phi(
    metric_sums: MetricSums,
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    log_correction: Tensor,
    *,
    vespo_k_pos: VespoPower = 2.0,
    vespo_lambda_pos: VespoDecay = 3.0,
    vespo_k_neg: VespoPower = 3.0,
    vespo_lambda_neg: VespoDecay = 2.0,
) -> None:
    """Adds vespo/phi_seq_mean: the mean of φ(w) over completions."""
    phi = vespo_weight(
        log_ratio,
        advantages,
        mask,
        log_correction,
        (vespo_k_pos, vespo_k_neg),
        (vespo_lambda_pos, vespo_lambda_neg),
    )
    metric_sums.mean("vespo/phi_seq_mean", sequence_mean(phi, mask), rows_that_train(mask))


def _correction_is_by_length(*, sampling_correction: str) -> str | None:
    if not sampling_correction.startswith("sequence_mean"):
        return None
    return (
        f"loss.sampling_correction = {sampling_correction}: vespo's ratio is a product over "
        "tokens, which a mean by length does not correct; use a token or sequence mode."
    )


@policy_loss(metrics=(measure_phi,), check=_correction_is_by_length)
def vespo(
    log_ratio: Tensor,
    advantages: Tensor,
    logprobs: Tensor,
    mask: Tensor,
    log_correction: Tensor,
    *,
    vespo_k_pos: VespoPower = 2.0,
    vespo_lambda_pos: VespoDecay = 3.0,
    vespo_k_neg: VespoPower = 3.0,
    vespo_lambda_neg: VespoDecay = 2.0,
) -> Tensor:
    """−sg[φ(w)]·A·logprobs with φ(w) = w^k·exp(λ(1 − w)) of the sequence's ratio w = Π_t ρ_t.

    VESPO (arXiv 2602.10693): a Gamma-shaped weight, 1 at w = 1, smooth and asymmetric by the sign
    of A. The sampler's correction is a factor of w only. Divided by tokens.
    """
    phi = vespo_weight(
        log_ratio.detach(),
        advantages,
        mask,
        log_correction,
        (vespo_k_pos, vespo_k_neg),
        (vespo_lambda_pos, vespo_lambda_neg),
    )
    return -phi * advantages * logprobs


def vespo_weight(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    log_correction: Tensor,
    k: tuple[float, float],
    lam: tuple[float, float],
) -> Tensor:
    """Returns φ(w) of `vespo`, [B, C]; k and lam hold the values for A ≥ 0 and A < 0.

    Computed from log w, clamped to [log 1e-8, 20] as in the authors' code.
    """
    low, high = math.log(1e-8), 20.0
    log_w = (log_ratio.clamp(-high, high) * mask).sum(-1, keepdim=True)  # [B, 1]
    log_w = log_w + log_correction.clamp(low, high).sum(-1, keepdim=True)
    log_w = log_w.clamp(low, high)
    k_of = torch.full_like(advantages, k[1]).masked_fill_(advantages >= 0, k[0])  # [B, C]
    lam_of = torch.full_like(advantages, lam[1]).masked_fill_(advantages >= 0, lam[0])
    return (lam_of + k_of * log_w - lam_of * log_w.exp()).exp()


@policy_loss(metrics=(measure_clipping_of_logs,), one_gradient_per_completion=True)
def gmpo(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    trained: Tensor,
    *,
    epsilon: float,
    epsilon_high: float | None,
) -> Tensor:
    """−A·exp(mean_t clip(log ρ_t)): the geometric mean of the ratios, each clipped on its own.

    GMPO (arXiv 2507.20673, eq. 4). The clip is in log space, log ρ in (−ε, ε_high), and one-sided
    by the sign of A as in PPO. Divided by completions: each token holds its completion's value, so
    that their mean is that value.
    """
    high = epsilon if epsilon_high is None else epsilon_high
    inside = log_ratio.clamp(-epsilon, high)
    pessimistic = torch.where(
        advantages > 0, torch.minimum(log_ratio, inside), torch.maximum(log_ratio, inside)
    )
    value = sequence_mean(pessimistic, trained)[:, None]  # [B, 1]
    value = value.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    share = mask.sum(-1, keepdim=True) / trained.sum(-1, keepdim=True).clamp(min=1)
    return -value * share * advantages


def _covariances_are_ordered(*, cov_low: float, cov_high: float) -> str | None:
    if cov_low < cov_high:
        return None
    return f"loss.args.cov_low = {cov_low:g}: must be below loss.args.cov_high = {cov_high:g}."


@policy_loss(
    metrics=(measure_clipping, measure_selected),
    select_tokens=select_clip_cov,
    check=_covariances_are_ordered,
)
def clip_cov(
    ratio: Tensor,
    advantages: Tensor,
    cov_selected: Tensor,
    *,
    epsilon: float,
    epsilon_high: float | None,
) -> Tensor:
    """`clipped`, without gradient on a few tokens of high covariance, to preserve entropy.

    Clip-Cov (arXiv 2505.22617, eq. 10); `token_selection.clip_cov` selects them. Divided by tokens.
    """
    loss = clipped(ratio, advantages, epsilon=epsilon, epsilon_high=epsilon_high)
    return loss * (1 - cov_selected)


def _kl_needs_updates(*, updates_per_step: int) -> str | None:
    if updates_per_step > 1:
        return None
    return (
        "loss.policy = kl_cov: its KL acts from a step's second update on; with one update a "
        "step it does nothing. Set update.minibatches or update.num_iterations above 1."
    )


@policy_loss(
    metrics=(measure_selected,),
    select_tokens=top_share,
    trains_without_advantage=True,
    notice=_kl_needs_updates,
)
def kl_cov(
    ratio: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    cov_selected: Tensor,
    *,
    cov_kl: Annotated[float, Arg("Weight of the KL on the selected tokens.", ge=0)] = 1.0,
) -> Tensor:
    """−ρA, and on the tokens of the highest covariance also a KL penalty to the old policy.

    KL-Cov (arXiv 2505.22617, eq. 12): −ρA + β_cov·|log ρ|, the authors' estimate. At ρ = 1 the
    penalty has no gradient, so it needs several updates per step. The sign of a |log ρ| below 1e-4
    is rounding noise, and would make the gradient depend on micro-batches: it counts as 0. Divided
    by tokens.
    """
    distance = log_ratio.abs()
    distance = torch.where(distance > 1e-4, distance, 0.0)
    return -ratio * advantages + cov_kl * cov_selected * distance
