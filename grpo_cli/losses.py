"""Policy losses: one pure function each, torch only.

A policy loss names the tensors it is computed from as positional parameters:

    log_ratio       [B, C]             log ρ = logprobs − old_logprobs of each token, with gradient
    ratio           [B, C] or [B, 1]   ρ at the level that the recipe asks for (`importance_ratio`)
    logprobs        [B, C]             log-probabilities under the policy, with gradient
    advantages      [B, C]             the same along a row, unless steps were rewarded
    mask            [B, C]             1 on the tokens that train
    trained         [B, C]             `mask` without what `loss.top_entropy` leaves out
    log_correction  [B, C] or [B, 1]   log of the sampler's correction (`corrections.py`)
    cov_selected    [B, C]             1 on the tokens that `selection.py` chose by covariance

and the knobs of `loss` that it reads as keyword-only ones. It returns the loss of each token,
[B, C] (or a value that broadcasts to it), without any average: what it is divided by is a matter of
`normalization.py`, whose counts are those of the whole optimizer batch over all processes. To add a
loss: a function here, its line in POLICY, a YAML in recipes/loss/, a literal reference in
tests/reference_losses.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# exp() of more overflows float32, and inf · 0 is NaN: past e^80 ratios are not told apart.
LARGEST_LOG_RATIO = 80.0


def importance_ratio(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """ρ between the policy and the policy that the rollouts were made with.

    Args:
        log_ratio: [B, C], 0 where `mask` is. mask: [B, C].
        level: "token": ρ_t = exp(log_ratio_t) (PPO, arXiv 1707.06347). "sequence": the geometric
            mean s = exp(mean_t log_ratio_t) (GSPO, arXiv 2507.18071, eq. 7). "sequence_token": s in
            value, whose gradient at each token is that of the token's own log-probability
            (GSPO-token, eq. 14); the one to use when a completion's tokens differ in advantage.

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
    """Mean over the tokens of `mask` of each row, [B, C] -> [B]; 0 for a row without any."""
    return (values * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def clipped(
    ratio: Tensor,
    advantages: Tensor,
    *,
    epsilon: float,
    epsilon_high: float | None,
    delta: float | None,
) -> Tensor:
    """−min(min(ρ, δ)·A, clip(ρ, 1−ε, 1+ε_high)·A).

    PPO's surrogate (arXiv 1707.06347, eq. 7) with GRPO's advantages (DeepSeekMath, arXiv
    2402.03300, eq. 3). ε_high > ε is DAPO's clip-higher (arXiv 2503.14476, eq. 8). δ bounds the
    ratio for negative advantages too, which the minimum leaves open (INTELLECT-2, arXiv 2505.07291,
    section 3.4). At ρ = 1 the gradient is −A·∇logprobs, that of REINFORCE.

    Divided by: tokens (dapo, bnpo), each completion's length (grpo), a constant (dr_grpo), with the
    sequence ratio (gspo), or not by length at all (luspo, arXiv 2602.05261).
    """
    high = epsilon if epsilon_high is None else epsilon_high
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.minimum(bounded * advantages, ratio.clamp(1 - epsilon, 1 + high) * advantages)


def clip_flags(
    ratio: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float | None
) -> tuple[Tensor, Tensor]:
    """Tokens that the clip takes the gradient from: (below 1−ε, above 1+ε_high), [B, C] bool."""
    high = epsilon if epsilon_high is None else epsilon_high
    return (ratio < 1 - epsilon) & (advantages < 0), (ratio > 1 + high) & (advantages > 0)


def cispo(ratio: Tensor, advantages: Tensor, logprobs: Tensor, *, ratio_cap: float) -> Tensor:
    """−sg[min(ρ, ε_max)]·A·logprobs: no token loses its gradient, its weight is bounded instead.

    MiniMax-M1 (arXiv 2506.13585, eq. 4), in the form of ScaleRL (arXiv 2510.13786, section 3).
    Divided by tokens.
    """
    return -ratio.detach().clamp(max=ratio_cap) * advantages * logprobs


def sapo(
    ratio: Tensor, advantages: Tensor, *, sapo_temperature_pos: float, sapo_temperature_neg: float
) -> Tensor:
    """−(4/τ)·sigmoid(τ(ρ − 1))·A, with a τ for A > 0 and one for the others.

    A soft gate in place of the clip (SAPO, arXiv 2511.20347, eqs. 5 and 6): its slope is 1 at
    ρ = 1 and falls off to both sides. Divided by each completion's length.
    """
    tau = torch.where(advantages > 0, sapo_temperature_pos, sapo_temperature_neg)
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages


def vespo(
    log_ratio: Tensor,
    advantages: Tensor,
    logprobs: Tensor,
    mask: Tensor,
    log_correction: Tensor,
    *,
    vespo_k_pos: float,
    vespo_lambda_pos: float,
    vespo_k_neg: float,
    vespo_lambda_neg: float,
) -> Tensor:
    """−sg[φ(w)]·A·logprobs with φ(w) = w^k·exp(λ(1 − w)) of the sequence's ratio w = Π_t ρ_t.

    VESPO (arXiv 2602.10693): a Gamma-shaped weight, 1 at w = 1, smooth and asymmetric by the sign
    of A. A correction for the sampler is a factor of w, and of nothing else. Divided by tokens.
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
    """φ(w) of `vespo`, [B, C]; k and lam for A ≥ 0 and for A < 0.

    Computed from log w, which is kept between log 1e-8 and 20 as in the authors' code.
    """
    low, high = math.log(1e-8), 20.0
    log_w = (log_ratio.clamp(-high, high) * mask).sum(-1, keepdim=True)  # [B, 1]
    log_w = log_w + log_correction.clamp(low, high).sum(-1, keepdim=True)
    log_w = log_w.clamp(low, high)
    k_of = torch.where(advantages >= 0, k[0], k[1])  # [B, C]
    lam_of = torch.where(advantages >= 0, lam[0], lam[1])
    return (lam_of + k_of * log_w - lam_of * log_w.exp()).exp()


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
    by the sign of A as in PPO. Divided by completions: each token of a completion carries the
    completion's value, so that their mean is that value.
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


def clip_cov(
    ratio: Tensor,
    advantages: Tensor,
    cov_selected: Tensor,
    *,
    epsilon: float,
    epsilon_high: float | None,
) -> Tensor:
    """`clipped`, without gradient on a few tokens of high covariance, which would cost entropy.

    Clip-Cov (arXiv 2505.22617, eq. 10); `selection.clip_cov` chooses them. Divided by tokens.
    """
    loss = clipped(ratio, advantages, epsilon=epsilon, epsilon_high=epsilon_high, delta=None)
    return loss * (1 - cov_selected)


def kl_cov(
    ratio: Tensor, log_ratio: Tensor, advantages: Tensor, cov_selected: Tensor, *, cov_kl: float
) -> Tensor:
    """−ρA, and on the tokens of the highest covariance a KL penalty to the old policy besides.

    KL-Cov (arXiv 2505.22617, eq. 12): −ρA + β_cov·|log ρ|, the authors' estimate. At ρ = 1 the
    penalty has no gradient: it takes several updates a step to act. Divided by tokens.
    """
    return -ratio * advantages + cov_kl * cov_selected * log_ratio.abs()


POLICY: dict[str, Callable[..., Tensor]] = {
    "clipped": clipped,
    "cispo": cispo,
    "sapo": sapo,
    "vespo": vespo,
    "gmpo": gmpo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
WITHOUT_ADVANTAGE = {"kl_cov"}  # have a gradient where the advantage is 0 too
