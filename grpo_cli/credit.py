"""From a step's rewards to the advantages of its rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpo_cli.advantages import RULES, process_advantages
from grpo_cli.config import Recipe
from grpo_cli.errors import TrainingError
from grpo_cli.kl import ESTIMATORS
from grpo_cli.outcomes import Outcome, WholeStep, reward_tensors
from grpo_cli.rollouts import Group, Rollout
from grpo_cli.signatures import apply


def penalize(rollouts: Sequence[Rollout], estimator: str, beta: float) -> None:
    """Subtracts β·Σ_t KL_t of the policy that sampled from each rollout's reward."""
    for r in rollouts:
        assert r.old_logprobs is not None, "computed for every rollout before"
        assert r.ref_logprobs is not None, "computed for every rollout before"
        if math.isnan(r.outcome) and not math.isnan(r.reward):
            r.outcome = 0.0  # only steps were rewarded
        r.outcome -= beta * ESTIMATORS[estimator](r.old_logprobs, r.ref_logprobs).sum().item()


def assign_advantages(
    recipe: Recipe, groups: Sequence[Group], whole_step: WholeStep, step: int
) -> None:
    """Computes the advantages of the whole step; each process takes those of its own groups.

    Args:
        step: for messages, counted from 0.

    Raises:
        TrainingError: the rewards are not of the kind that the rule or the loss takes.
    """
    if not whole_step:
        return
    try:
        rows = rule_advantages(recipe, whole_step)
    except ValueError as error:
        raise TrainingError(f"step {step + 1}: {error}") from error
    for g in groups:
        for r, advantage in zip(g.rollouts, rows[g.position], strict=False):  # ends in padding
            r.advantage = advantage
        if any(r.step_rewards for r in g.rollouts):
            credit_steps(recipe, g)


def rule_advantages(recipe: Recipe, whole_step: WholeStep) -> dict[int, list[float]]:
    """Advantages of each group by the recipe's rule, without those of rewarded steps.

    Raises:
        ValueError: the rule does not take such rewards.
    """
    weights = {name: reward.weight for name, reward in recipe.reward.items()}
    tensors = reward_tensors(whole_step, weights)
    advantages = apply(RULES[recipe.advantage.rule], tensors, recipe.advantage)  # [P, G]
    return dict(zip(sorted(whole_step), advantages.tolist(), strict=True))


def credit_steps(recipe: Recipe, group: Group) -> None:
    """Adds the advantages of rewarded steps to those of a group's completions.

    Raises:
        TrainingError: the loss gives all tokens of a completion one gradient.
    """
    loss = recipe.loss
    if loss.policy == "gmpo" or loss.ratio_level == "sequence":
        name = "policy = gmpo" if loss.policy == "gmpo" else "ratio_level = sequence"
        raise TrainingError(
            f"loss.{name}: gives all tokens of a completion one gradient, but a reward function "
            "rewards steps; use loss=gspo_token or another loss."
        )
    scale = "none" if recipe.advantage.scale == "none" else "group"
    steps = [[s for of in r.step_rewards.values() for s in of] for r in group.rollouts]
    lengths = [len(r.completion.ids) for r in group.rollouts]
    found = process_advantages(steps, lengths, scale=scale)
    for r, own in zip(group.rollouts, found, strict=True):
        r.token_advantages = own + r.advantage


def has_signal(recipe: Recipe, group: Sequence[Outcome]) -> bool:
    """Whether a group has something to learn from: an advantage or steps that differ.

    Raises:
        ValueError: the rule does not take such rewards.
    """
    steps = {value for o in group for of in o.steps.values() for value in of}
    if len(steps) > 1 and not all(o.masked for o in group):
        return True
    (advantages,) = rule_advantages(recipe, {0: list(group)}).values()
    return any(a != 0 and not o.masked for a, o in zip(advantages, group, strict=True))
