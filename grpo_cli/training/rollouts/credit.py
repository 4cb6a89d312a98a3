"""Computes the advantages of rollouts from rewards, and their token weights from counts.

It also decides which rewards are credited to the turns of an episode, and checks that the loss
allows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_cli.algorithm.advantages import (
    advantage_shares,
    all_equal,
    process_advantages,
    rule_function,
    turn_advantages,
)
from grpo_cli.algorithm.batch import token_weight
from grpo_cli.algorithm.loss import ESTIMATORS
from grpo_cli.algorithm.losses import loss_function
from grpo_cli.algorithm.settings import Loss
from grpo_cli.algorithm.variants import apply, traits_of
from grpo_cli.config.recipe import Recipe
from grpo_cli.environments.factory import kind_of
from grpo_cli.errors import TrainingError, UserError, listed, nearest
from grpo_cli.records import (
    Group,
    RolloutStats,
    StepStats,
    TrainingGroup,
    TrainingSample,
    WeightedSample,
    matrix,
)
from grpo_cli.scoring.registry import full_name

if TYPE_CHECKING:  # it imports transformers, and recipes are checked without
    from grpo_cli.distributed.workers import Workers

ZERO_ADVANTAGE = "frac_zero_advantage"


def subtract_kl(sample: TrainingSample, estimator: str, beta: float) -> TrainingSample:
    """Subtracts β·Σ_t KL_t of the policy that sampled from a sample's reward.

    The sum is over the tokens that the policy has sampled.
    """
    if not sample.is_scored:
        return sample
    assert sample.old_logprobs is not None, "computed for every scored sample before"
    assert sample.ref_logprobs is not None, "computed for every scored sample before"
    # It is NaN if only steps were rewarded.
    reward = 0.0 if math.isnan(sample.outcome_reward) else sample.outcome_reward
    kl = ESTIMATORS[estimator](sample.old_logprobs, sample.ref_logprobs)  # [C]
    own = kl[sample.completion.sampled_mask].sum().item()
    return replace(sample, outcome_reward=reward - beta * own)


def with_advantages(
    recipe: Recipe, groups: Sequence[TrainingGroup], step_stats: StepStats, step: int
) -> tuple[list[TrainingGroup], dict[str, float]]:
    """Computes the advantages of all processes' groups.

    Args:
        groups: this process's.
        step_stats: the statistics of all processes' groups.
        step: number of the step from 0, for messages.

    Returns:
        This process's groups with their advantages, and the metrics over all processes.

    Raises:
        TrainingError: the rule or the loss does not take such rewards.
    """
    if not step_stats:
        return [*groups], {ZERO_ADVANTAGE: 1.0}
    try:
        rows = rule_advantages(recipe, step_stats)
    except ValueError as error:
        raise TrainingError(f"step {step + 1}: {error}") from error
    credited = []
    for g in groups:
        advantages = rows[g.prompt_index]  # ends in padding
        tokens = token_advantages(recipe, g, advantages)
        samples = [
            r.as_kind(TrainingSample, advantage=advantage, token_advantages=own)
            for r, advantage, own in zip(g.rollouts, advantages, tokens, strict=False)
        ]
        credited.append(replace(g, rollouts=samples))
    return credited, advantage_metrics(recipe, step_stats, rows)


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
    weights = recipe.reward_weights
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


def reward_tensors(step_stats: StepStats, weights: Mapping[str, float]) -> dict[str, Tensor]:
    """Returns the inputs of advantage rules, by the names that `advantages.py` lists."""

    def part(name: str) -> Callable[[RolloutStats], float | None]:
        return lambda o: None if name in o.steps else o.reward_parts[name]

    return {
        "rewards": matrix(step_stats, lambda o: o.outcome_reward),
        "parts": torch.stack([matrix(step_stats, part(name)) for name in weights], dim=-1),
        "weights": torch.tensor(list(weights.values()), dtype=torch.float64),
        "lengths": matrix(step_stats, lambda o: o.sampled_tokens).nan_to_num(),
    }


def weighted_parts(step_stats: StepStats, weights: Mapping[str, float]) -> Tensor:
    """Returns the weighted scores of each function, [P, G, R]; 0 where it did not apply."""

    def part(name: str) -> Callable[[RolloutStats], float | None]:
        return lambda o: o.reward_parts[name]

    scaled = [weights[name] * matrix(step_stats, part(name)) for name in weights]
    return torch.stack(scaled, dim=-1).nan_to_num()


def rule_advantages(recipe: Recipe, step_stats: StepStats) -> dict[int, list[float]]:
    """Returns the advantages of each group by the recipe's rule, without those of rewarded steps.

    Raises:
        ValueError: the rule does not take such rewards.
    """
    weights = recipe.reward_weights
    tensors = reward_tensors(step_stats, weights)
    advantages = apply(rule_function(recipe.advantage), tensors, recipe.advantage)  # [P, G]
    return dict(zip(sorted(step_stats), advantages.tolist(), strict=True))


def token_advantages(
    recipe: Recipe, group: Group, advantages: Sequence[float]
) -> Sequence[Tensor | None]:
    """Adds the advantages of rewarded steps and turns to each completion's advantage, [C].

    Args:
        advantages: the advantage of each completion by the recipe's rule.

    Returns:
        None for each completion if no steps were rewarded.

    Raises:
        TrainingError: the loss gives all tokens of a completion one gradient.
    """
    if not any(r.step_rewards for r in group.rollouts):
        return [None] * len(group.rollouts)
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
    of_steps = process_advantages(steps, lengths, scale=scale)
    found = [own + a for own, a in zip(of_steps, advantages, strict=False)]
    if of_turns:
        add_turns(found, group, of_turns, scale)
    return found


def add_turns(found: list[Tensor], group: Group, names: Collection[str], scale: str) -> None:
    """Adds the advantages of turns to the tokens of these turns.

    Args:
        found: the advantages of each completion's tokens, [C].
        names: the reward functions whose steps are turns.
        scale: as for `turn_advantages`.
    """
    pairs = zip(found, group.rollouts, strict=True)
    trained = [(tokens, r) for tokens, r in pairs if r.step_rewards.keys() & {*names}]
    rewards = [
        turn_rewards([[v for _, v in r.step_rewards.get(n, ())] for n in names]) for _, r in trained
    ]
    for (tokens, r), own in zip(trained, turn_advantages(rewards, scale=scale), strict=True):
        for (start, end), value in zip(r.completion.model_turns, own, strict=True):
            tokens[start:end] += value


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


def weigh_samples(
    recipe: Recipe, groups: Sequence[TrainingGroup], workers: Workers
) -> tuple[list[WeightedSample], float]:
    """Returns the samples that train, with their token weights, and all processes' loss tokens.

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
    normalize, limit = recipe.loss.normalize, recipe.generation.max_completion_tokens
    samples = []
    for g in groups:
        for index, r in enumerate(g.rollouts):
            if r.loss_tokens:
                group_tokens = lengths[g.prompt_index]
                weight = token_weight(normalize, r.loss_tokens, group_tokens, counts, limit)
                place = (g.prompt_index, index)
                samples.append(r.as_kind(WeightedSample, place=place, weight=weight))
    return samples, counts["tokens"]


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
    if given and path is not None and not kind_of(recipe).has_environments:
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
