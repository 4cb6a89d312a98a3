"""Measures the loss on completions of held-out rows, as a step of training would (no update).

The completions are the policy's own, so that every ratio is 1: the figures that differ from those
of training are the loss's KL and the entropy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from grpo_cli.algorithm.advantages import level_rewards
from grpo_cli.algorithm.batch import collate
from grpo_cli.algorithm.loss import Coefficients, LossOutput, LossSums, grpo_loss, logged
from grpo_cli.config.schedules import at_step
from grpo_cli.evaluation.tasks import Task
from grpo_cli.models.loading import inference
from grpo_cli.records import Group, Rollout
from grpo_cli.training.logprob_passes import fill_ref_logprobs
from grpo_cli.training.rollouts.collect import gathered
from grpo_cli.training.rollouts.credit import assign_advantages, set_token_weights
from grpo_cli.training.run import Run


def held_out_loss(run: Run, task: Task, groups: Sequence[Group]) -> dict[str, float]:
    """Returns loss, KL, entropy and clip shares of a task's completions; collective.

    `loss.top_entropy` and other selections of tokens do not apply: every token counts.

    Args:
        groups: this process's.

    Raises:
        TrainingError: the rewards are not of the kind that the advantage rule takes.
        Interrupted: the run has to end first.
    """
    step = min(run.state.step, run.recipe.steps - 1)
    recipe = at_step(run.recipe, step)[0]
    recipe = dataclasses.replace(recipe, reward=dict(task.scorer.rewards))  # perhaps only some
    rollouts = [r for g in groups for r in g.rollouts]
    for r in rollouts:
        r.excluded = recipe.loss.mask_truncated and r.completion.finish_reason == "length"
    rollouts = [r for r in rollouts if r.loss_tokens]
    level_rewards(groups, {name: reward.weight for name, reward in recipe.reward.items()})
    assign_advantages(recipe, groups, gathered(run.workers, groups), step)
    if run.reference is not None:
        fill_ref_logprobs(run, recipe, rollouts)
    tokens = set_token_weights(recipe, groups, run.workers)
    if not tokens:
        return {}
    loss, temperature = recipe.loss, recipe.generation.temperature
    coefficients = Coefficients(
        run.beta.value(loss), run.entropy_bonus.value(loss), max(tokens, 1.0)
    )

    def compute(micro_batch: list[Rollout]) -> LossOutput:
        logprobs, entropies = run.policy_logprobs(
            micro_batch, temperature, entropy=True, entropy_gradient=False
        )
        batch = collate(micro_batch, run.workers.device)
        return grpo_loss(loss, batch, logprobs, entropies, coefficients).detached()

    run.micro_batches.calibrate(rollouts, temperature)
    sums = LossSums()
    own = rollouts or [run.micro_batches.dummy_rollout]  # every process has the same metrics
    with torch.no_grad(), inference(run.policy_logprobs.model):
        for output in run.micro_batches.map(compute, own, run.policy_logprobs):
            sums.add(output)
    figures = logged(loss, sums.reduced(run.workers).metrics.figures)
    of_sampler = ("sampling/", "staleness/")
    return {name: value for name, value in figures.items() if not name.startswith(of_sampler)}
