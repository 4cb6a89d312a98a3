"""One step's groups: sampled, scored, and, with dynamic sampling, only those with a signal.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): a group without any advantage, as when its
rewards are all equal, has no gradient. It is dropped, and new prompts are sampled until the step is
full. Groups that are left over are carried to the next step, with the log-probabilities of the
policy that made them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from grpo_cli.ahead import Batch
from grpo_cli.balance import minibatch_of, moves
from grpo_cli.clock import Clock
from grpo_cli.config import Recipe
from grpo_cli.credit import has_signal
from grpo_cli.errors import TrainingError
from grpo_cli.metrics import mean, staleness_metrics
from grpo_cli.objective import none_is_silent
from grpo_cli.outcomes import Outcome, WholeStep, gathered
from grpo_cli.rollouts import Group, Rollout
from grpo_cli.run import Run
from grpo_cli.scoring import Sheet, metrics_of
from grpo_cli.survey import fill_old_logprobs
from grpo_cli.work import Collected

LOWEST_SHARE = 0.1  # of groups with a signal: more are not sampled in the hope of finding one


def collect(run: Run, recipe: Recipe, clock: Clock) -> Collected:
    """Samples and scores the groups of a step, and divides them over the processes.

    Raises:
        TrainingError: a reward function failed, or gave what the advantage rule does not take.
        Interrupted: the run has to end first.
    """
    collected = _collected(run, recipe, clock)
    prompts = run.stream.prompt_at
    for position, group in sorted(collected.sampled.items()):  # of any number of processes
        run.lengths[prompts(position).row] = mean([o.tokens for o in group])
    with run.waiting(clock):
        rebalance(run, recipe, collected)
    return collected


def rebalance(run: Run, recipe: Recipe, collected: Collected) -> None:
    """Moves groups so that every process has about as much to train on, in each minibatch."""
    workers, step = run.workers, collected.whole_step
    if workers.size == 1:
        return
    holders = workers.gather([g.position for g in collected.groups])
    owners = {p: rank for rank, positions in enumerate(holders) for p in positions}
    works = {p: _work(run, recipe, step[p]) for p in owners}
    parts: dict[int, dict[int, int]] = {}
    for position, part in minibatch_of(owners, recipe.update.minibatches).items():
        parts.setdefault(part, {})[position] = owners[position]
    moved: dict[int, int] = {}
    for part_owners in parts.values():
        moved |= moves(part_owners, works, workers.size)
    if not moved:
        return
    leaving = workers.gather([g for g in collected.groups if g.position in moved])
    kept = [g for g in collected.groups if g.position not in moved]
    arrived = [g for groups in leaving for g in groups if moved[g.position] == workers.rank]
    collected.groups = sorted([*kept, *arrived], key=lambda g: g.position)


def _work(run: Run, recipe: Recipe, group: Sequence[Outcome]) -> float:
    """Tokens of a group that are computed in an update; about none if nothing in it differs."""
    tokens = float(group[0].prompt_tokens + sum(o.tokens for o in group))
    speaks = none_is_silent(recipe, run.reference is not None, run.entropy_coef(recipe))
    same = len({(o.outcome, *map(tuple, o.steps.values())) for o in group}) == 1
    return 0.0 if same and not speaks else tokens


def _collected(run: Run, recipe: Recipe, clock: Clock) -> Collected:
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
    with clock.stage("generate"), run.leavable():
        sampling = run.sample(recipe, number) if batch is None else batch.take
        groups = sampling(sheet.add)  # scoring begins while others are still being sampled
    rollouts = [r for g in groups for r in g.rollouts]
    if run.generator.computes_here:
        clock.count("generate", run.flops(rollouts))
    with run.leavable(), run.waiting(clock), run.workers.together(), clock.stage("reward"):
        sheet.finish(rollouts, run.tokenizer)
    for group in groups:
        for r in group.rollouts:
            r.masked = recipe.loss.mask_truncated and r.completion.finish_reason == "length"
    return groups, gathered(run.workers, groups)
