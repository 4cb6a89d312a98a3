"""One step's groups: sampled, scored, and, with dynamic sampling, only those with a signal.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): a group without any advantage, as when its
rewards are all equal, has no gradient. It is dropped, and new prompts are sampled until the step is
full. Groups that are left over are carried to the next step, with the log-probabilities of the
policy that made them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from grpo_cli.ahead import Batch
from grpo_cli.clock import Clock
from grpo_cli.config import Recipe
from grpo_cli.credit import has_signal
from grpo_cli.errors import TrainingError
from grpo_cli.metrics import staleness_metrics
from grpo_cli.outcomes import Outcome, WholeStep, gathered
from grpo_cli.rollouts import Group, Rollout
from grpo_cli.run import Run
from grpo_cli.scoring import Sheet, metrics_of
from grpo_cli.survey import fill_old_logprobs

LOWEST_SHARE = 0.1  # of groups with a signal: more are not sampled in the hope of finding one


@dataclass
class Collected:
    """What a step trains on."""

    groups: list[Group]  # this process's
    whole_step: WholeStep  # outcomes of every process's groups
    sampled: WholeStep  # outcomes of all that was sampled in this step, dropped or not
    metrics: dict[str, float] = field(default_factory=dict)


def collect(run: Run, recipe: Recipe, clock: Clock) -> Collected:
    """Samples and scores the groups of a step.

    Raises:
        TrainingError: a reward function failed, or gave what the advantage rule does not take.
    """
    sheets: list[Sheet] = []
    if not recipe.generation.dynamic_sampling:
        batch = run.ahead.popleft() if run.ahead else None
        groups, whole_step = _sample(run, recipe, recipe.prompts_per_step, clock, sheets, batch)
        metrics = metrics_of(sheets, run.workers)
        if batch is not None:
            for r in (r for g in groups for r in g.rollouts):
                use_samplers_logprobs(r, run.state.step)
        if run.overlap:
            rollouts = [r for g in groups for r in g.rollouts]
            took, waited = batch.seconds if batch else math.nan, clock.seconds["generate"]
            metrics |= staleness_metrics(rollouts, run.state.step, waited, took, run.workers)
        return Collected(groups, whole_step, whole_step, metrics)
    wanted = recipe.prompts_per_step
    own, run.carried = run.carried, []
    usable = gathered(run.workers, own)
    carried = len(usable)
    sampled: WholeStep = {}
    attempts = 0
    while len(usable) < wanted and attempts < recipe.generation.max_attempts:
        share = max(run.state.signal_share, LOWEST_SHARE)
        number = min(wanted, math.ceil((wanted - len(usable)) / share))
        groups, fresh = _sample(run, recipe, number, clock, sheets)
        sampled |= fresh
        informative = {p for p, group in fresh.items() if _has_signal(run, recipe, group)}
        own += [g for g in groups if g.position in informative]
        usable |= {p: fresh[p] for p in informative}
        run.state.signal_share = (len(usable) - carried) / len(sampled)
        attempts += 1
    chosen = dict(sorted(usable.items())[:wanted])
    run.carried = [g for g in own if g.position not in chosen]
    with clock.stage("old_logprobs"):  # of the policy as it is now, before it is updated
        fill_old_logprobs(run, recipe, [r for g in run.carried for r in g.rollouts])
    metrics = {
        "dynamic_sampling/attempts": attempts,
        "dynamic_sampling/sampled": len(sampled),
        "dynamic_sampling/dropped": len(sampled) - (len(usable) - carried),
        "dynamic_sampling/carried": carried,
        "dynamic_sampling/missing": wanted - len(chosen),
    }
    return Collected(
        [g for g in own if g.position in chosen],
        chosen,
        sampled or chosen,  # the groups carried were enough
        {name: float(value) for name, value in metrics.items()} | metrics_of(sheets, run.workers),
    )


def use_samplers_logprobs(rollout: Rollout, step: int) -> None:
    """Makes the sampler's log-probabilities the old ones of what an earlier policy has sampled.

    That policy is gone from the trainer; its own would take a copy of the weights for each step.
    """
    sampled_at = rollout.completion.sampled_at
    if sampled_at is not None and sampled_at < step:
        rollout.old_logprobs = torch.tensor(rollout.completion.logprobs)


def _has_signal(run: Run, recipe: Recipe, group: Sequence[Outcome]) -> bool:
    try:
        return has_signal(recipe, group)
    except ValueError as error:
        raise TrainingError(f"step {run.state.step + 1}: {error}") from error


def _sample(
    run: Run,
    recipe: Recipe,
    number: int,
    clock: Clock,
    sheets: list[Sheet],
    batch: Batch | None = None,
) -> tuple[list[Group], WholeStep]:
    """(this process's groups of the next `number` prompts, outcomes of every process's).

    Args:
        sheets: gets the one that the groups are scored on.
        batch: the same groups, begun ahead.
    """
    sheet = run.scorer.begin(run.trainer_state())
    sheets.append(sheet)
    with clock.stage("generate"):
        sampling = run.sample(recipe, number) if batch is None else batch.take
        groups = sampling(sheet.add)  # scoring begins while others are still being sampled
    rollouts = [r for g in groups for r in g.rollouts]
    if run.generator.computes_here:
        clock.count("generate", run.flops(rollouts))
    with run.waiting(clock), run.workers.together(), clock.stage("reward"):
        sheet.finish(rollouts, run.tokenizer)
    for group in groups:
        for r in group.rollouts:
            r.masked = recipe.loss.mask_truncated and r.completion.finish_reason == "length"
    return groups, gathered(run.workers, groups)
