"""Computes the advantages of rollouts from rewards, and their token weights from counts.

It also decides which rewards are credited to the turns of an episode, and checks that the loss
allows it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from grpo_cli.algorithm.advantages import (
    advantage_shares,
    all_equal,
    process_advantages,
    rule_function,
    turn_advantages,
)
from grpo_cli.algorithm.kl import ESTIMATORS
from grpo_cli.algorithm.losses import loss_function
from grpo_cli.algorithm.normalization import token_weight
from grpo_cli.algorithm.settings import Loss
from grpo_cli.algorithm.variants import apply, traits_of
from grpo_cli.config.recipe import Recipe
from grpo_cli.config.user_code import is_coroutine_function
from grpo_cli.environments.factory import rollout_function
from grpo_cli.errors import TrainingError, UserError, listed, nearest
from grpo_cli.records import (
    Group,
    Rollout,
    RolloutStats,
    StepStats,
    matrix,
    reward_tensors,
    weighted_parts,
)
from grpo_cli.scoring.registry import full_name

if TYPE_CHECKING:  # it imports transformers, and recipes are checked without
    from grpo_cli.distributed.workers import Workers

ZERO_ADVANTAGE = "frac_zero_advantage"


def subtract_kl_from_rewards(rollouts: Sequence[Rollout], estimator: str, beta: float) -> None:
    """Subtracts β·Σ_t KL_t of the policy that sampled from each rollout's reward.

    The sum is over the tokens that the policy has sampled.
    """
    for r in rollouts:
        assert r.old_logprobs is not None, "computed for every rollout before"
        assert r.ref_logprobs is not None, "computed for every rollout before"
        if math.isnan(r.outcome_reward) and not math.isnan(r.reward):
            r.outcome_reward = 0.0  # only steps were rewarded
        kl = ESTIMATORS[estimator](r.old_logprobs, r.ref_logprobs)  # [C]
        if r.completion.is_sampled is not None:
            kl = kl[r.completion.sampled_mask]
        r.outcome_reward -= beta * kl.sum().item()


def assign_advantages(
    recipe: Recipe, groups: Sequence[Group], step_stats: StepStats, step: int
) -> dict[str, float]:
    """Computes the advantages of all processes' groups, and sets those of this process's groups.

    Args:
        step: number of the step from 0, for messages.

    Returns:
        The metrics of the advantages, over all processes.

    Raises:
        TrainingError: the rule or the loss does not take such rewards.
    """
    if not step_stats:
        return {ZERO_ADVANTAGE: 1.0}
    try:
        rows = rule_advantages(recipe, step_stats)
    except ValueError as error:
        raise TrainingError(f"step {step + 1}: {error}") from error
    for g in groups:
        for r, advantage in zip(g.rollouts, rows[g.prompt_index], strict=False):  # ends in padding
            r.advantage = advantage
        if any(r.step_rewards for r in g.rollouts):
            credit_steps(recipe, g)
    return advantage_metrics(recipe, step_stats, rows)


def advantage_metrics(
    recipe: Recipe, step_stats: StepStats, rows: Mapping[int, Sequence[float]]
) -> dict[str, float]:
    """Returns the share of groups without an advantage, and each reward's share of advantages.

    If steps are rewarded, the tokens of a completion have different advantages. The shares are then
    computed from the completion's reward, with its steps summed.

    Args:
        rows: the advantages of each group by the recipe's rule, without those of rewarded steps.
    """
    ordered = sorted(step_stats.items())
    has_steps = any(o.steps for _, group in ordered for o in group)
    if has_steps:
        no_signal = [not has_signal(recipe, group) for _, group in ordered]
        total = matrix(step_stats, lambda o: o.reward)
        advantages = total - total.nanmean(-1, keepdim=True)
    else:
        total = matrix(step_stats, lambda o: o.outcome_reward)
        advantages = torch.tensor([rows[p] for p, _ in ordered], dtype=torch.float64)
        no_signal = [
            not any(a != 0 and not o.excluded for a, o in zip(rows[p], group, strict=False))
            for p, group in ordered
        ]
    weights = {name: reward.weight for name, reward in recipe.reward.items()}
    summands = traits_of(rule_function(recipe.advantage)).summands
    if summands is not None and not has_steps:
        values = apply(summands, reward_tensors(step_stats, weights), recipe.advantage)
        total = values.sum(-1).masked_fill(total.isnan(), torch.nan)
    else:
        values = weighted_parts(step_stats, weights)
    counted = matrix(step_stats, lambda o: float(not o.excluded)) == 1
    shares = advantage_shares(advantages, values, total, counted).tolist()
    return {
        ZERO_ADVANTAGE: sum(no_signal) / len(no_signal),
        **{f"rewards/{name}/advantage_share": s for name, s in zip(weights, shares, strict=False)},
    }


def rule_advantages(recipe: Recipe, step_stats: StepStats) -> dict[int, list[float]]:
    """Returns the advantages of each group by the recipe's rule, without those of rewarded steps.

    Raises:
        ValueError: the rule does not take such rewards.
    """
    weights = {name: reward.weight for name, reward in recipe.reward.items()}
    tensors = reward_tensors(step_stats, weights)
    advantages = apply(rule_function(recipe.advantage), tensors, recipe.advantage)  # [P, G]
    return dict(zip(sorted(step_stats), advantages.tolist(), strict=True))


def credit_steps(recipe: Recipe, group: Group) -> None:
    """Adds the advantages of rewarded steps and turns to those of a group's completions.

    Raises:
        TrainingError: the loss gives all tokens of a completion one gradient.
    """
    if (name := one_gradient(recipe.loss)) is not None:
        raise TrainingError(
            f"loss.{name}: gives all tokens of a completion one gradient, but a reward function "
            "rewards steps; use loss=gspo_token or another loss."
        )
    scale = "none" if recipe.advantage.scale == "none" else "group"
    of_turns = rewards_of_turns(recipe)
    steps = [
        [s for name, of in r.step_rewards.items() if name not in of_turns for s in of]
        for r in group.rollouts
    ]
    lengths = [len(r.completion.ids) for r in group.rollouts]
    found = process_advantages(steps, lengths, scale=scale)
    for r, own in zip(group.rollouts, found, strict=True):
        r.token_advantages = own + r.advantage
    if of_turns:
        credit_turns(group, of_turns, scale)


def credit_turns(group: Group, names: Collection[str], scale: str) -> None:
    """Adds the advantages of turns to the tokens of these turns.

    Args:
        names: the reward functions whose steps are turns.
        scale: as for `turn_advantages`.
    """
    rollouts = [r for r in group.rollouts if r.step_rewards.keys() & {*names}]
    rewards = [
        turn_rewards([[v for _, v in r.step_rewards.get(n, ())] for n in names]) for r in rollouts
    ]
    for r, own in zip(rollouts, turn_advantages(rewards, scale=scale), strict=True):
        assert r.token_advantages is not None, "set before"
        for (start, end), value in zip(r.completion.model_turns, own, strict=True):
            r.token_advantages[start:end] += value


def turn_rewards(parts: Sequence[Sequence[float]]) -> list[float]:
    """Returns the sum of several functions' rewards for each turn; empty parts are skipped."""
    return [sum(values) for values in zip(*filter(None, parts), strict=True)]


def has_signal(recipe: Recipe, group: Sequence[RolloutStats]) -> bool:
    """Returns whether a group has something to learn from: an advantage or steps that differ.

    Raises:
        ValueError: the rule does not take such rewards.
    """
    of_turns = rewards_of_turns(recipe)
    steps = [v for o in group for name, of in o.steps.items() if name not in of_turns for v in of]
    differ = len(steps) > 1 and not all_equal(torch.tensor(steps, dtype=torch.float64))
    if differ and not all(o.excluded for o in group):
        return True
    trained = [o for o in group if o.steps.keys() & {*of_turns}]
    turns = turn_advantages(
        [turn_rewards([o.steps.get(name, []) for name in of_turns]) for o in trained],
        scale="none" if recipe.advantage.scale == "none" else "group",
    )
    if any(any(own) and not o.excluded for own, o in zip(turns, trained, strict=True)):
        return True
    (advantages,) = rule_advantages(recipe, {0: list(group)}).values()
    return any(a != 0 and not o.excluded for a, o in zip(advantages, group, strict=True))


def set_token_weights(recipe: Recipe, groups: Sequence[Group], workers: Workers) -> float:
    """Sets the token weight of each rollout; returns the tokens of the optimizer batch.

    Args:
        groups: this process's groups of the optimizer batch.
    """
    lengths = {g.prompt_index: sum(r.loss_tokens for r in g.rollouts) for g in groups}
    counts = workers.sum(
        {
            "tokens": float(sum(lengths.values())),
            "completions": float(sum(len(g.rollouts) for g in groups)),
            "prompts": float(len(groups)),
        }
    )
    for g in groups:
        for r in g.rollouts:
            if r.loss_tokens:
                r.weight = token_weight(
                    recipe.loss.normalize,
                    r.loss_tokens,
                    lengths[g.prompt_index],
                    counts,
                    recipe.generation.max_completion_tokens,
                )
    return counts["tokens"]


ENVIRONMENT = "environment"  # the reward that an environment gives


def rewards_of_turns(recipe: Recipe) -> list[str]:
    """Returns the names of the rewards that are credited to turns (`episode.credit=turns`)."""
    return environment_rewards(recipe) if recipe.episode.credit == "turns" else []


def environment_rewards(recipe: Recipe) -> list[str]:
    """Returns the names of the rewards that an environment gives."""
    own = full_name(ENVIRONMENT)
    return [name for name, reward in recipe.reward.items() if full_name(reward.function) == own]


def unknown_reward_names(recipe: Recipe, sampled: StepStats) -> Iterator[str]:
    """Yields a message for each reward that names an environment's reward that no rollout has.

    Args:
        sampled: the statistics of the first step.
    """
    episodes = [o.episode for group in sampled.values() for o in group if o.episode is not None]
    there = sorted({name for episode in episodes for name in episode.reward_names})
    for key in environment_rewards(recipe) if there else ():
        name = recipe.reward[key].args.get("name")
        if name not in (None, "turns", *there):
            yield (
                f"reward.{key}.args.name = {name!r}: no rollout of the first step has such a "
                f"reward of its environment; there are {listed(there)}.{nearest(name, there)}"
            )


def one_gradient(loss: Loss) -> str | None:
    """Returns the setting that gives all tokens of a completion one gradient, or None."""
    if traits_of(loss_function(loss)).one_gradient_per_completion:
        return f"policy = {loss.policy}"
    return "ratio_level = sequence" if loss.ratio_level == "sequence" else None


def check_episode_credit(recipe: Recipe) -> None:
    """Checks that rewards of environments and `episode.credit` fit the rest of the recipe.

    Raises:
        UserError: they do not fit.
    """
    given, of = environment_rewards(recipe), recipe.environment
    if given and not (of.path or of.by_name or recipe.rollout):
        there = "tools give none" if recipe.has_environment else "there is none"
        raise UserError(
            f"reward.{given[0]}: is what an environment gives, and {there}; set environment.path, "
            "or rollout, or use another reward, such as reward=[exact_match]."
        )
    path = recipe.rollout
    if given and path is not None and not is_coroutine_function(rollout_function(recipe)):
        raise UserError(
            f"reward.{given[0]}: is what an environment gives, and rollout = {path}, which is no "
            "coroutine function (async def), gives none; return rewards under a key such as score, "
            "and use a reward function that takes the column score."
        )
    if recipe.episode.credit != "turns":
        return
    if not given:
        raise UserError(
            "episode.credit = turns: is only read with a reward for turns, that of the "
            f"environment; add reward={ENVIRONMENT}, or use episode.credit=sum."
        )
    if (name := one_gradient(recipe.loss)) is not None:
        raise UserError(
            f"episode.credit = turns: with loss.{name} all tokens of a completion have one "
            "gradient; use loss=gspo_token or another loss, or episode.credit=sum."
        )
