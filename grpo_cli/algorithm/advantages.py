"""Computes advantages from rewards, with one pure function per rule.

A rule names its inputs as positional parameters:

    rewards   [P, G]      one row a group, float64; NaN marks a rollout without a reward
    parts     [P, G, R]   unweighted value of each reward function, NaN where it did not apply
    weights   [R]         the recipe's weights of these functions
    lengths   [P, G]      tokens of each completion

Keyword-only parameters are its knobs: fields of `advantage` in the recipe, or arguments of its own,
`advantage.args.NAME`, declared with `Arg`. A rule returns [P, G] float32, with 0 where the reward
is NaN and in groups whose rewards are all equal. It gets the complete step, so that no rule depends
on the division of prompts over processes.

To add a rule, write a function here with `@advantage_rule`, whose arguments are its `Traits`; a
YAML in recipes/advantage/; and a literal reference in tests/reference_advantages.py. A rule can
also be in your own module: `advantage.rule=my_module:my_rule`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor

from grpo_cli.algorithm.settings import Advantage
from grpo_cli.algorithm.variants import RULES as RULES
from grpo_cli.algorithm.variants import advantage_rule, find
from grpo_cli.config.knob import Arg
from grpo_cli.records import Group, Rollout

EPS = 1e-4  # keeps division by a standard deviation finite; TRL's value
TINY = 1e-12  # likewise where the paper has no such constant; rounding errors are smaller
ROUNDING = 1e-9  # differences up to this share of the summed rewards are rounding


def rule_function(config: Advantage) -> Callable[..., Tensor]:
    """Returns the advantage rule that `advantage.rule` names; raises a UserError without it."""
    return find(config.rule, "advantage.rule")


@advantage_rule("group")
def group_relative(rewards: Tensor, *, scale: str) -> Tensor:
    """A_i = (r_i − mean(r)) / (std + 1e-4), the mean over the group.

    DeepSeekMath, arXiv 2402.03300, section 4.1.2 (outcome supervision).

    Args:
        scale: "group" divides by the group's sample standard deviation; "batch" by that of all
            rewards of the step ("Lite PPO", arXiv 2508.08221); "none" does not divide (Dr. GRPO,
            arXiv 2503.20783).
    """
    assert scale in ("group", "batch", "none"), f"unknown scale {scale!r}"
    centred = rewards - group_mean(rewards)
    if scale == "group":
        centred = centred / (group_std(rewards)[:, None] + EPS)
    elif scale == "batch":
        centred = centred / (group_std(rewards.reshape(1, -1)) + EPS)
    return _finished(centred, rewards)


@advantage_rule()
def rloo(rewards: Tensor) -> Tensor:
    """A_i = r_i − the mean of the group's other rewards.

    Leave-one-out baseline: Ahmadian et al., arXiv 2402.14740, section 2.2 (Kool et al. 2019).
    """
    count = (~rewards.isnan()).sum(-1, keepdim=True)  # [P, 1]
    others = (count - 1).clamp(min=1)
    return _finished((rewards - group_mean(rewards)) * count / others, rewards)


def _groups_are_dropped(*, baseline: str, dynamic_sampling: bool) -> str | None:
    if baseline != "none" or not dynamic_sampling:
        return None
    return (
        "generation.dynamic_sampling: drops groups of equal rewards, which do have a signal "
        "with advantage.args.baseline=none; set one of the two."
    )


SUBTRACTED = "Subtract the group's mean before the normalisation (group), or not (none)."
BASELINES = ("group", "none")


@advantage_rule(check=_groups_are_dropped)
def reinforce_pp(
    rewards: Tensor, *, baseline: Annotated[str, Arg(SUBTRACTED, choices=BASELINES)] = "group"
) -> Tensor:
    """A_i = (r'_i − mean(r')) / (std(r') + 1e-4), mean and std over the whole step.

    REINFORCE++, arXiv 2501.03262, section 3.

    Args:
        baseline: "group": r' = r − mean of its group (REINFORCE++-baseline); "none": r' = r, as for
            a single completion per prompt. Then a step is all zeros only if all rewards are equal.
    """
    assert baseline in BASELINES, f"unknown baseline {baseline!r}"
    shaped = rewards - group_mean(rewards) if baseline == "group" else rewards
    # Exact zeros first: rounding errors of equal rewards must not be scaled up.
    if baseline == "group":
        shaped = shaped.masked_fill(all_equal(rewards)[:, None] & ~rewards.isnan(), 0.0)
    every = shaped.reshape(1, -1)
    out = (shaped - every.nanmean()) / (group_std(every) + EPS)
    if baseline == "group":
        return _finished(out, rewards)
    has_no_signal = all_equal(rewards.reshape(1, -1)) | rewards.isnan()
    return out.masked_fill(has_no_signal, 0.0).float()


@advantage_rule()
def opo(rewards: Tensor, lengths: Tensor) -> Tensor:
    """A_i = r_i − Σ l_j r_j / Σ l_j, the group's mean weighted by length.

    The minimum-variance baseline if a gradient's norm grows with length (OPO, arXiv 2505.23585, eq.
    6).
    """
    weight = torch.where(rewards.isnan(), 0.0, lengths.to(rewards.dtype))
    baseline = (weight * rewards.nan_to_num()).sum(-1) / weight.sum(-1).clamp(min=1)
    return _finished(rewards - baseline[:, None], rewards)


def _one_subset_only(*, k: int, num_generations: int) -> str | None:
    if k < num_generations:
        return None
    return (
        f"advantage.args.k = {k}: must be below generation.num_generations = "
        f"{num_generations}; with all completions in one subset none is better than another."
    )


@advantage_rule(check=_one_subset_only)
def pass_at_k(
    rewards: Tensor,
    *,
    k: Annotated[int, Arg("Size of the subsets, of which one has to be correct.", ge=1)] = 2,
) -> Tensor:
    """A_i = (E[max of a k-subset with i] − E[max of a k-subset]) / std(max of a k-subset).

    All k-subsets of the group in closed form. For rewards 0 and 1 these are the analytical
    advantages of pass@k training (arXiv 2508.10751, eqs. 9 to 12): with n rollouts, m of them
    wrong, R̄ = 1 − C(m,k)/C(n,k) and σ = √(R̄(1 − R̄)), A_right = (1 − R̄)/σ and
    A_wrong = (1 − R̄ − C(m−1,k−1)/C(n−1,k−1))/σ. A group in which every k-subset has the same
    maximum gets 0, so prompts that are solved often enough are not trained.

    Args:
        k: size of a subset, capped at the group's number of rewards.
    """
    out = torch.zeros_like(rewards)
    for p, row in enumerate(rewards):
        there = (~row.isnan()).nonzero().squeeze(-1)
        if len(there):
            out[p, there] = _pass_at_k(row[there], min(k, len(there)))
    return _finished(out, rewards)


def _pass_at_k(rewards: Tensor, k: int) -> Tensor:
    """Computes the advantages of one group without missing rewards, [n] -> [n]."""
    ordered, order = rewards.sort()
    n = len(rewards)
    # The k-th smallest reward is the smallest maximum that a subset can have.
    if all_equal(ordered[k - 1 :], magnitude=ordered.abs().max()):
        return torch.zeros_like(rewards)
    # probability that the j-th smallest of n, from 0, is the maximum of a k-subset
    chance = _chances(n, k)
    mean = (chance * ordered).sum()
    std = (chance * (ordered - mean).square()).sum().sqrt()
    # With i, a subset's maximum is that of k − 1 other rewards, or r_i if that is larger.
    within, chance_of_others = torch.empty_like(rewards), _chances(n - 1, max(k - 1, 1))
    for place, i in enumerate(order.tolist()):
        if k == 1:
            within[i] = rewards[i]
            continue
        others = torch.cat([ordered[:place], ordered[place + 1 :]])
        within[i] = (chance_of_others * others.clamp(min=ordered[place])).sum()
    return (within - mean) / (std + TINY)


def _chances(n: int, k: int) -> Tensor:
    """P(the j-th smallest of n is the maximum of a random k-subset), j = 0 … n−1: [n] float64."""
    total = math.comb(n, k)
    return torch.tensor([math.comb(j, k - 1) / total for j in range(n)], dtype=torch.float64)


def _reward_may_be_negative(*, kl_in_reward: bool) -> str | None:
    if not kl_in_reward:
        return None
    return "loss.kl_in = reward: advantage.rule=max_rl needs rewards >= 0; use loss.kl_in=loss."


@advantage_rule(check=_reward_may_be_negative)
def max_rl(rewards: Tensor) -> Tensor:
    """A_i = (r_i − mean(r)) / mean(r) over the group.

    MaxRL, arXiv 2602.02710: with rewards 0 and 1 the gradient is that of log(pass rate), truncated
    at the order that G samples allow.

    Raises:
        ValueError: a reward is negative; a negative mean would flip the sign.
    """
    if bool((rewards < 0).any()):
        lowest = rewards.nan_to_num(nan=math.inf).min().item()
        raise ValueError(f"advantage.rule=max_rl needs rewards >= 0; there is a {lowest:g}.")
    mean = group_mean(rewards)
    return _finished((rewards - mean) / mean.clamp(min=torch.finfo(mean.dtype).tiny), rewards)


def _parts_hold_no_kl(*, kl_in_reward: bool) -> str | None:
    if not kl_in_reward:
        return None
    return (
        "loss.kl_in = reward: advantage.rule=gdpo takes each function's reward; use "
        "loss.kl_in=loss."
    )


def _normalised_parts(parts: Tensor, weights: Tensor) -> Tensor:
    """Returns each function's weighted rewards after normalisation in the group, [P, G, R]."""
    normal = [group_relative(part, scale="group").double() for part in parts.unbind(-1)]
    return torch.stack(normal, dim=-1) * weights


@advantage_rule(check=_parts_hold_no_kl, summands=_normalised_parts)
def gdpo(parts: Tensor, weights: Tensor) -> Tensor:
    """Normalises each reward function within its group, sums them, then normalises over the step.

    Without the first step, functions of larger spread would dominate, and different reward vectors
    with equal sums would be indistinguishable (GDPO, arXiv 2601.05242, section 3).
    """
    total = _normalised_parts(parts, weights).sum(-1)  # [P, G]
    there = ~parts.isnan().all(-1)
    every = total.masked_fill(~there, torch.nan)
    out = (total - every.nanmean()) / (group_std(every.reshape(1, -1)) + EPS)
    has_no_signal = torch.stack([all_equal(part) for part in parts.unbind(-1)], dim=-1).all(-1)
    return out.masked_fill(has_no_signal[:, None] | ~there, 0.0).float()


def process_advantages(
    steps: Sequence[Sequence[tuple[int, float]]], lengths: Sequence[int], *, scale: str = "group"
) -> list[Tensor]:
    """Computes token advantages in a group from the rewards of its completions' steps.

    DeepSeekMath, arXiv 2402.03300, section 4.1.3 (process supervision): rewards are normalised over
    all steps of all completions of the group, r̃ = (r − mean) / (std + 1e-4), and
    A_{i,t} = Σ r̃_i^{(j)} over the steps j that end at or after token t.

    Args:
        steps: (token at which the step ends, from 0; its reward) of each completion's steps.
        lengths: number of tokens of each completion.
        scale: "group", or "none" to omit the division.

    Returns:
        A [C_i] float32 tensor per completion.
    """
    flat = torch.tensor([[value for one in steps for _, value in one]], dtype=torch.float64)
    normal = group_relative(flat, scale=scale)[0].tolist() if flat.numel() else []
    out = []
    for one, length in zip(steps, lengths, strict=True):
        at_end = torch.zeros(length, dtype=torch.float64)
        for token, _ in one:
            at_end[token] += normal.pop(0)
        out.append(at_end.flip(0).cumsum(0).flip(0).float())
    return out


def turn_advantages(
    rewards: Sequence[Sequence[float]], *, scale: str = "group"
) -> list[list[float]]:
    """Computes turn advantages in a group of episodes from the rewards of their turns.

        A_{i,k} = (G_{i,k} − b_k) / (s + 1e-4),  G_{i,k} = Σ_{j ≥ k} r_{i,j},  b_k = mean_i G_{i,k}

    The return G from turn k is compared with its mean over all episodes of the group, in which an
    ended episode counts as 0. The baseline does not depend on an episode's own number of turns,
    except through its share 1/G. A longer episode is therefore neither rewarded nor penalized for
    its length. `process_advantages` subtracts the mean reward of a step for each further step
    (https://github.com/verl-project/verl/issues/7244).

    s is the largest standard deviation of G_{i,k} in the group, over k: that of the total returns,
    unless later returns vary more. With scale "group" a group with equal total returns gives 0, as
    in the rules above.

    Args:
        rewards: reward of each turn of each episode; episodes may have different numbers of turns.
        scale: "group", or "none", which replaces s + 1e-4 by 1.

    Returns:
        The advantage of each turn of each episode.
    """
    assert scale in ("group", "none"), f"unknown scale {scale!r}"
    most = max(map(len, rewards), default=0)
    if most == 0:
        return [[] for _ in rewards]
    table = torch.zeros(len(rewards), most, dtype=torch.float64)  # [G, K]
    for row, own in zip(table, rewards, strict=True):
        row[: len(own)] = torch.tensor(own, dtype=torch.float64)
    returns = table.flip(-1).cumsum(-1).flip(-1)  # [G, K], 0 after an episode's last turn
    # As in `_finished`: rounding errors must not become a signal.
    centred = (returns - returns.mean(0)).masked_fill(all_equal(returns.T), 0.0)
    if scale == "group":
        centred = centred / (group_std(returns.T).max() + EPS)
        if all_equal(returns[None, :, 0]).item():
            centred = torch.zeros_like(centred)
    return [row[: len(own)].tolist() for row, own in zip(centred, rewards, strict=True)]


def group_mean(rewards: Tensor) -> Tensor:
    """Returns the mean of each group, [P, G] -> [P, 1]; NaN for a group without rewards."""
    return rewards.nanmean(-1, keepdim=True)


def group_std(rewards: Tensor) -> Tensor:
    """Sample standard deviation (divisor n − 1) of each group, [P, G] -> [P]; 0 if n < 2."""
    count = (~rewards.isnan()).sum(-1)
    centred = rewards - group_mean(rewards)
    return (centred.square().nansum(-1) / (count - 1).clamp(min=1)).sqrt()


def all_equal(rewards: Tensor, magnitude: Tensor | None = None) -> Tensor:
    """Marks groups whose rewards, without NaN, are all equal, [P, G] -> [P] bool.

    Rewards that differ only by rounding, such as 0.1 + 0.2 and 0.3, count as equal: largest minus
    smallest is at most 1e-9 of the magnitude.

    Args:
        magnitude: the largest Σ|weight · reward| of each group, [P], which exceeds the rewards if
            parts cancel; None: the largest |reward|.
    """
    low = rewards.nan_to_num(nan=torch.inf).amin(-1)
    high = rewards.nan_to_num(nan=-torch.inf).amax(-1)
    if magnitude is None:
        magnitude = rewards.nan_to_num().abs().amax(-1)
    return high - low <= ROUNDING * magnitude


def settle(
    groups: Sequence[Group], weights: Mapping[str, float], mask_truncated: bool
) -> list[Group]:
    """Returns groups in which rewards that differ only by rounding are made equal.

    Args:
        mask_truncated: excludes completions that reached the length limit from the loss.
    """
    return [
        replace(
            g,
            rollouts=[
                replace(r, excluded=mask_truncated and r.completion.finish_reason == "length")
                for r in level_rewards(g.rollouts, weights)
            ],
        )
        for g in groups
    ]


def level_rewards(rollouts: Sequence[Rollout], weights: Mapping[str, float]) -> list[Rollout]:
    """Returns a group's rollouts with equal rewards if their rewards differ only by rounding.

    Later code can then compare these rewards exactly.

    Args:
        weights: weight of each reward function, by name.
    """
    magnitudes = [
        sum(abs(weights[name] * (v or 0.0)) for name, v in r.reward_parts.items()) for r in rollouts
    ]
    magnitude = torch.tensor(max(magnitudes, default=0.0), dtype=torch.float64)
    found = list(rollouts)
    for name in ("reward", "outcome_reward"):
        known = [v for r in rollouts if not math.isnan(v := getattr(r, name))]
        if known and all_equal(torch.tensor(known, dtype=torch.float64), magnitude):
            found = [
                r if math.isnan(getattr(r, name)) else replace(r, **{name: max(known)})
                for r in found
            ]
    return found


def _finished(advantages: Tensor, rewards: Tensor) -> Tensor:
    """Zeroes advantages without a reward and in groups with equal rewards; converts to float32."""
    # A mean of equal floats can be off by one ulp, which eps would amplify.
    has_no_signal = all_equal(rewards)[:, None] | rewards.isnan()
    return advantages.masked_fill(has_no_signal, 0.0).float()


def advantage_shares(advantages: Tensor, values: Tensor, total: Tensor, counted: Tensor) -> Tensor:
    """Decomposes the variance of the advantages within their groups by reward function.

        share_k = Σ_i a_ik A_i / Σ_i A_i²,   a_ik = c_g d_ik

    A_i is the advantage and d_ik the contribution of function k to the reward, both without the
    mean of their group g. c_g is the slope of A on the reward within the group: 1 / std of the
    group with `advantage.scale=group`. Such a rule is linear in the reward, A_i = Σ_k a_ik. Then
    share_k = Cov(a_k, A) / Var(A), and the shares sum to 1. For a nonlinear rule (pass@k), Σ_i A_i²
    is replaced by the variance that A shares with the reward, Σ_i c_g d_i A_i.

    For example, the rewards 1 + 0, 0 + 0, 1 + 1, 0 + 1 of two functions give shares of 1/2 each. A
    function that works against the sum of all functions has a negative share.

    Args:
        advantages: [P, G].
        values: contribution of each function to the rewards, [P, G, R]; 0 where it did not apply.
        total: rewards from which the advantages are computed, [P, G]; NaN where there is none. They
            can include other terms, such as a KL, whose share is the rest up to 1.
        counted: mask of completions that train, [P, G] bool.

    Returns:
        [R] float64; empty if no completion that trains has an advantage.
    """
    scored = ~total.isnan()
    part = _centred(values, scored[..., None])  # [P, G, R]
    whole = _centred(total.nan_to_num(), scored)  # [P, G]
    advantage = _centred(advantages.double(), scored)
    squares = whole.square().sum(-1)
    slope = (advantage * whole).sum(-1) / squares.masked_fill(squares == 0, 1.0)  # [P]
    weight = slope[:, None] * advantage * (counted & scored)  # [P, G]
    variance = (weight * whole).sum()
    if not variance > 0:
        return torch.zeros(0, dtype=torch.float64)
    return torch.einsum("pg,pgr->r", weight, part) / variance


def _centred(values: Tensor, scored: Tensor) -> Tensor:
    """Subtracts the group's mean over the scored completions along dim 1; 0 elsewhere."""
    there = values.masked_fill(~scored, torch.nan)
    return (there - there.nanmean(1, keepdim=True)).nan_to_num()
