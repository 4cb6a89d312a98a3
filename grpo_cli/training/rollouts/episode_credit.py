"""Decides which rewards are credited to the turns of an episode; checks that the loss allows it.

Imports no model code, since a recipe is checked before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator

from grpo_cli.algorithm.losses import loss_function
from grpo_cli.algorithm.settings import Loss
from grpo_cli.algorithm.variants import traits_of
from grpo_cli.config.recipe import Recipe
from grpo_cli.config.user_code import is_coroutine_function
from grpo_cli.environments.factory import rollout_function
from grpo_cli.errors import UserError, listed, nearest
from grpo_cli.records import StepStats
from grpo_cli.scoring.registry import full_name

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
        sampled: the outcomes of the first step.
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
