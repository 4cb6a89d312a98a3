"""Every loss written out literally: one completion after another, one token after another.

Straight from the papers, over ragged lists, without padding, masks or weights, so that it shares
neither code nor shortcuts with `grpo_cli`, of which it imports nothing. Everything is a float or a
float64 scalar of torch, for autograd: what a paper writes under a stop-gradient is a float here.

    total_loss(batch, settings, longest)   the loss of one optimizer batch

`settings` are the knobs of `loss`, by name. A new loss is a function of its name. Three things are
no paper's and are marked with "Tool": how huge ratios are kept finite, how top-entropy
selection and GMPO go together, and advantages that differ along a completion.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Settings = Mapping[str, Any]


@dataclass
class Completion:
    """One completion of a prompt; every list has one entry a token."""

    prompt: int  # completions of one prompt are a group
    logprobs: list[Tensor]  # log π, scalars with gradient
    old_logprobs: list[float] | None  # log π_old; None: on-policy, so that π_old = sg[π]
    sampling_logprobs: list[float]  # of the engine; NaN where it gave none
    ref_logprobs: list[float]
    entropies: list[Tensor]  # scalars with gradient
    advantages: list[float]
    noise: list[float]  # in [0, 1), what Clip-Cov draws tokens by
    trains: bool = True  # False: it is one of the G, but no token of it trains

    def __len__(self) -> int:
        return len(self.logprobs)

    def old(self) -> list[float]:
        """log π_old of each token."""
        if self.old_logprobs is None:
            return [logprob.item() for logprob in self.logprobs]
        return self.old_logprobs


@dataclass
class Around:
    """What a policy loss needs to know beside the completion itself."""

    settings: Settings
    high_entropy: list[bool]  # tokens that the policy term trains
    chosen: list[bool]  # tokens that the covariance has chosen
    corrections: list[float]  # of the sampler: one a token, or one for the completion


# Scalars


def constant(value: float) -> Tensor:
    """A number without gradient."""
    return torch.tensor(value, dtype=torch.float64)


def plus(values: Sequence[Tensor]) -> Tensor:
    """Σ, 0 of nothing."""
    total = constant(0.0)
    for value in values:
        total = total + value
    return total


def clip(value: Tensor, low: float, high: float) -> Tensor:
    """clip(x, low, high): no gradient outside."""
    if value < low:
        return constant(low)
    if value > high:
        return constant(high)
    return value


def lesser(one: Tensor, other: Tensor) -> Tensor:
    """min(x, y)."""
    return one if one <= other else other


def exp(value: Tensor) -> Tensor:
    """e^x. Tool: constant beyond e^80 and e^-80, which float32 and the products after it hold."""
    return torch.exp(clip(value, -80.0, 80.0))


# Importance ratios


def ratios(completion: Completion, level: str) -> list[Tensor]:
    """ρ of each token.

    token: π(y_t) / π_old(y_t), PPO (arXiv 1707.06347, section 3).
    sequence: s = (π(y) / π_old(y))^(1/|y|), one for all tokens, GSPO (arXiv 2507.18071, eq. 7).
    sequence_token: sg[s] · π(y_t) / sg[π(y_t)], GSPO-token (eq. 14).
    """
    log_ratios = log_ratios_of(completion)
    if level == "token":
        return [exp(log_ratio) for log_ratio in log_ratios]
    log_s = plus(log_ratios) / len(completion)
    if level == "sequence":
        return [exp(log_s) for _ in log_ratios]
    assert level == "sequence_token"
    return [exp(log_s.item() + lp - lp.item()) for lp in completion.logprobs]


def log_ratios_of(completion: Completion) -> list[Tensor]:
    """log π(y_t) − log π_old(y_t) of each token."""
    return [lp - old for lp, old in zip(completion.logprobs, completion.old(), strict=True)]


# Policy losses: one completion -> the loss of each of its tokens


def clipped(completion: Completion, around: Around) -> list[Tensor]:
    """−min(min(ρ, δ)·A, clip(ρ, 1−ε, 1+ε_high)·A).

    PPO (arXiv 1707.06347, eq. 7), GRPO (arXiv 2402.03300, eq. 3), ε_high: DAPO (arXiv 2503.14476,
    eq. 8), δ: INTELLECT-2 (arXiv 2505.07291, section 3.4).
    """
    s = around.settings
    epsilon_high = s["epsilon"] if s["epsilon_high"] is None else s["epsilon_high"]
    delta = math.inf if s.get("delta") is None else s["delta"]
    losses = []
    for ratio, advantage in zip(
        ratios(completion, s["ratio_level"]), completion.advantages, strict=True
    ):
        free = lesser(ratio, constant(delta)) * advantage
        held = clip(ratio, 1 - s["epsilon"], 1 + epsilon_high) * advantage
        losses.append(-lesser(free, held))
    return losses


def cispo(completion: Completion, around: Around) -> list[Tensor]:
    """−sg[min(ρ, ε_max)]·A·log π: MiniMax-M1 (arXiv 2506.13585, eq. 4), ScaleRL (2510.13786)."""
    cap = around.settings["ratio_cap"]
    losses = []
    for ratio, advantage, logprob in zip(
        ratios(completion, around.settings["ratio_level"]),
        completion.advantages,
        completion.logprobs,
        strict=True,
    ):
        losses.append(-min(ratio.item(), cap) * advantage * logprob)
    return losses


def sapo(completion: Completion, around: Around) -> list[Tensor]:
    """−(4/τ)·σ(τ(ρ − 1))·A; τ by the sign of A: SAPO (arXiv 2511.20347, eqs. 5 and 6)."""
    s = around.settings
    losses = []
    for ratio, advantage in zip(
        ratios(completion, s["ratio_level"]), completion.advantages, strict=True
    ):
        tau = s["sapo_temperature_pos"] if advantage > 0 else s["sapo_temperature_neg"]
        gate = 1 / (1 + torch.exp(-tau * (ratio - 1)))
        losses.append(-4 / tau * gate * advantage)
    return losses


def vespo(completion: Completion, around: Around) -> list[Tensor]:
    """−sg[φ(w)]·A·log π, φ(w) = w^k·e^(λ(1−w)), w = Π_t ρ_t: VESPO (arXiv 2602.10693).

    The rollouts' distribution being the engine's, w takes the sampler's corrections in as well. As
    in the authors' code ρ_t is kept within e^±20, corrections and w between 1e-8 and e^20.
    """
    s = around.settings
    log_w = sum(min(max(x.item(), -20.0), 20.0) for x in log_ratios_of(completion))
    for correction in around.corrections:
        log_w += math.log(min(max(correction, 1e-8), math.exp(20)))
    w = math.exp(min(max(log_w, math.log(1e-8)), 20.0))
    losses = []
    for advantage, logprob in zip(completion.advantages, completion.logprobs, strict=True):
        sign = "pos" if advantage >= 0 else "neg"
        phi = w ** s[f"vespo_k_{sign}"] * math.exp(s[f"vespo_lambda_{sign}"] * (1 - w))
        losses.append(-phi * advantage * logprob)
    return losses


def gmpo(completion: Completion, around: Around) -> list[Tensor]:
    """−A·(Π_t ρ̃_t)^(1/|y|): GMPO (arXiv 2507.20673, eq. 4).

    ρ̃ is min(ρ, e^ε_high) for A > 0 and max(ρ, e^−ε) for the others: clip(ρ, e^−ε, e^ε_high) where
    that is the smaller of ρA and clip(ρ)A. Each token carries the completion's value.

    Tool: of tokens left out by their entropy neither the product nor the loss knows; the others
    carry more, so that the completion weighs what it would otherwise. Where advantages differ along
    the completion, the sign is each token's, and the value is multiplied by the token's own A.
    """
    s = around.settings
    epsilon_high = s["epsilon"] if s["epsilon_high"] is None else s["epsilon_high"]
    logs = []
    for log_ratio, advantage, kept in zip(
        log_ratios_of(completion), completion.advantages, around.high_entropy, strict=True
    ):
        if not kept:
            continue
        if advantage > 0:
            logs.append(clip(log_ratio, -math.inf, epsilon_high))
        else:
            logs.append(clip(log_ratio, -s["epsilon"], math.inf))
    if not logs:
        return [constant(0.0) for _ in completion.advantages]
    value = exp(plus(logs) / len(logs)) * len(completion) / len(logs)
    return [-value * advantage for advantage in completion.advantages]


def clip_cov(completion: Completion, around: Around) -> list[Tensor]:
    """The clipped loss of a token, 0 if the covariance chose it (arXiv 2505.22617, eq. 10)."""
    token = {**around.settings, "ratio_level": "token", "delta": None}
    of_clipped = clipped(completion, Around(token, [], [], []))
    return [
        constant(0.0) if chosen else loss
        for loss, chosen in zip(of_clipped, around.chosen, strict=True)
    ]


def kl_cov(completion: Completion, around: Around) -> list[Tensor]:
    """−ρA, and + β·|log ρ| if the covariance chose the token (arXiv 2505.22617, eq. 12).

    The paper's KL(π_old ‖ π) is |log π − log π_old| in the authors' code.
    """
    losses = []
    for log_ratio, advantage, chosen in zip(
        log_ratios_of(completion), completion.advantages, around.chosen, strict=True
    ):
        loss = -exp(log_ratio) * advantage
        if chosen:
            loss = loss + around.settings["cov_kl"] * abs(log_ratio)
        losses.append(loss)
    return losses


# Tokens that are treated apart


def top_entropy(batch: Sequence[Completion], share: float) -> list[list[bool]]:
    """Tokens with H ≥ the (1 − share) quantile of the batch's: arXiv 2506.01939, eq. 6.

    The quantile between two values is interpolated linearly.
    """
    if share >= 1:
        return [[True] * len(completion) for completion in batch]
    ordered = sorted(h.item() for c in batch if c.trains for h in c.entropies)
    if not ordered:
        return [[False] * len(completion) for completion in batch]
    place = (1 - share) * (len(ordered) - 1)
    left, right = ordered[math.floor(place)], ordered[math.ceil(place)]
    threshold = left + (right - left) * (place - math.floor(place))
    return [[c.trains and h.item() >= threshold for h in c.entropies] for c in batch]


def covariances(batch: Sequence[Completion]) -> list[list[float]]:
    """(log π − mean log π)(A − mean A), means over the batch's tokens: arXiv 2505.22617, eq. 9."""
    logprobs = [lp.item() for c in batch if c.trains for lp in c.logprobs]
    advantages = [a for c in batch if c.trains for a in c.advantages]
    mean_logprob, mean_advantage = average(logprobs), average(advantages)
    return [
        [
            (lp.item() - mean_logprob) * (a - mean_advantage)
            for lp, a in zip(c.logprobs, c.advantages, strict=True)
        ]
        for c in batch
    ]


def chosen_by_covariance(batch: Sequence[Completion], settings: Settings) -> list[list[bool]]:
    """KL-Cov: the share of highest covariance (eq. 11). Clip-Cov: as many at random (eq. 10).

    Clip-Cov draws from the tokens whose covariance lies within its bounds. At least one token is
    chosen, if there is one.
    """
    chosen = [[False] * len(completion) for completion in batch]
    if settings["policy"] not in ("clip_cov", "kl_cov"):
        return chosen
    cov = covariances(batch)
    places = [(i, t) for i, c in enumerate(batch) if c.trains for t in range(len(c))]
    number = max(1, math.floor(settings["cov_share"] * len(places)))
    if settings["policy"] == "kl_cov":
        places.sort(key=lambda place: -cov[place[0]][place[1]])
    else:
        low, high = settings["cov_low"], settings["cov_high"]
        places = [(i, t) for i, t in places if low < cov[i][t] < high]
        places.sort(key=lambda place: batch[place[0]].noise[place[1]])
    for i, t in places[:number]:
        chosen[i][t] = True
    return chosen


def average(values: Sequence[float]) -> float:
    """Σ / number, 0 of nothing."""
    return math.fsum(values) / len(values) if values else 0.0


# Factors of the policy loss


def sampler_corrections(completion: Completion, settings: Settings) -> list[float]:
    """π_old / π_sampler within its bounds: one a token, or one for the completion.

    token: of each token. sequence: Π_t. sequence_mean: (Π_t)^(1/|y|). truncate: held to the bounds
    (TIS, https://fengyao.notion.site/off-policy-rl). mask: 0 outside (IcePop, arXiv 2510.18855).
    A token of which the engine gave nothing counts as equal under both.
    """
    mode = settings["sampling_correction"]
    if mode == "none":
        return [1.0]
    logs = [
        0.0 if math.isnan(sampled) else old - sampled
        for old, sampled in zip(completion.old(), completion.sampling_logprobs, strict=True)
    ]
    if mode in ("sequence_truncate", "sequence_mask"):
        logs = [sum(logs)]
    elif mode in ("sequence_mean_truncate", "sequence_mean_mask"):
        logs = [sum(logs) / len(completion)]
    else:
        assert mode in ("token_truncate", "token_mask")
    cap = settings["sampling_cap"]
    floor = 0.0 if settings["sampling_floor"] is None else settings["sampling_floor"]
    factors = []
    for log in logs:
        ratio = exp(constant(log)).item()
        if floor <= ratio <= cap:
            factors.append(ratio)
        elif mode.endswith("mask"):
            factors.append(0.0)
        else:
            factors.append(cap if ratio > cap else floor)
    return factors


def off_policy_keep(completion: Completion, settings: Settings) -> list[bool]:
    """M_t = 0 if A_t < 0 and (1/|y|) Σ log π_sampler/π > δ: DeepSeek-V3.2 (arXiv 2512.02556, 3.1).

    Of a token of which the engine gave nothing, π_old takes the place of π_sampler.
    """
    threshold = settings["off_policy_mask"]
    if threshold is None:
        return [True] * len(completion)
    drift = average(
        [
            (old if math.isnan(sampled) else sampled) - lp.item()
            for lp, old, sampled in zip(
                completion.logprobs, completion.old(), completion.sampling_logprobs, strict=True
            )
        ]
    )
    return [advantage >= 0 or drift <= threshold for advantage in completion.advantages]


# KL to the reference


def kl(completion: Completion, settings: Settings) -> list[Tensor]:
    """The estimate for each token, with r = π_ref/π.

    Schulman 2020 (http://joschu.net/blog/kl-approx.html): k1 = −log r, k2 = (log r)²/2,
    k3 = r − 1 − log r, which is DeepSeekMath's (arXiv 2402.03300, eq. 4). Bias-corrected: times ρ
    (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
    """
    estimates = []
    for logprob, ref, ratio in zip(
        completion.logprobs,
        completion.ref_logprobs,
        ratios(completion, settings["ratio_level"]),
        strict=True,
    ):
        log_r = ref - logprob
        by_name: dict[str, Tensor] = {
            "k1": -log_r,
            "k2": log_r.square() / 2,
            "k3": torch.exp(log_r) - 1 - log_r,
        }
        estimate = by_name[settings["kl_estimator"]]
        estimates.append(estimate * ratio if settings["kl_bias_correction"] else estimate)
    return estimates


# The whole


def normalised(
    losses: Sequence[Sequence[Tensor]], batch: Sequence[Completion], how: str, longest: int
) -> Tensor:
    """One number from the losses of the tokens that train, a list for each completion.

    tokens: Σ_i Σ_t / Σ_i |y_i|, DAPO (arXiv 2503.14476, eq. 8).
    completions: (1/G) Σ_i (1/|y_i|) Σ_t, DeepSeekMath (arXiv 2402.03300, eq. 3).
    prompts: the mean over prompts of Σ / Σ_i |y_i| of their groups, ScaleRL (arXiv 2510.13786).
    constant: (1/G) Σ_i (1/longest) Σ_t, Dr. GRPO (arXiv 2503.20783, section 3.1).
    sums: (1/G) Σ_i Σ_t, LUSPO (arXiv 2602.05261).

    A completion of which nothing trains is an empty list, and is counted.
    """
    if how == "tokens":
        return plus([x for own in losses for x in own]) / max(1, sum(len(own) for own in losses))
    if how == "completions":
        return plus([plus(own) / len(own) for own in losses if own]) / len(losses)
    if how == "constant":
        return plus([plus(own) / longest for own in losses]) / len(losses)
    if how == "sums":
        return plus([plus(own) for own in losses]) / len(losses)
    assert how == "prompts"
    groups: dict[int, list[Tensor]] = {completion.prompt: [] for completion in batch}
    for own, completion in zip(losses, batch, strict=True):
        groups[completion.prompt] += own
    return plus([plus(own) / len(own) for own in groups.values() if own]) / len(groups)


def total_loss(batch: Sequence[Completion], settings: Settings, longest: int) -> Tensor:
    """Policy term + β·KL − entropy_coef·(mean entropy of the tokens that the policy term trains).

    Args:
        longest: the run's longest completion, what "constant" divides by.
    """
    high_entropy = top_entropy(batch, settings["top_entropy"])
    chosen = chosen_by_covariance(batch, settings)
    losses: list[list[Tensor]] = []
    entropies: list[Tensor] = []
    for i, completion in enumerate(batch):
        losses.append([])
        if not completion.trains:
            continue
        corrections = sampler_corrections(completion, settings)
        around = Around(settings, high_entropy[i], chosen[i], corrections)
        assert settings["policy"] in globals(), f"write {settings['policy']} here, as in its paper"
        policy = globals()[settings["policy"]](completion, around)
        keep = off_policy_keep(completion, settings)
        penalised = settings["beta"] > 0 and settings["kl_in"] == "loss"
        estimates = kl(completion, settings) if penalised else []
        for t in range(len(completion)):
            loss = constant(0.0)
            if high_entropy[i][t]:
                entropies.append(completion.entropies[t])
                if keep[t]:
                    loss = policy[t]
            if settings["policy"] != "vespo":  # which has taken it into w
                loss = loss * (corrections[t] if len(corrections) > 1 else corrections[0])
            if penalised:
                loss = loss + settings["beta"] * estimates[t]
            losses[-1].append(loss)
    total = normalised(losses, batch, settings["normalize"], longest)
    bonus = plus(entropies) / max(1, len(entropies))
    return total - bonus * float(settings["entropy_coef"])
