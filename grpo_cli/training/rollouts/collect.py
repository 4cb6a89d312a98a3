"""Samples and scores the groups of a step; dynamic sampling keeps only those with a signal.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): a group without any advantage, as when its
rewards are all equal, has no gradient. It is dropped, and new prompts are sampled until the step is
full. Leftover groups go into the next step, with the log-probabilities of the policy that sampled
them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from grpo_cli.algorithm.advantages import level_rewards
from grpo_cli.algorithm.loss import every_rollout_has_gradient
from grpo_cli.config.interpolation import masked
from grpo_cli.config.schema import Recipe
from grpo_cli.distributed import heartbeat
from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.models.flops import rollout_flops
from grpo_cli.records import Group, Rollout, RolloutStats, StepStats, rollout_stats
from grpo_cli.reporting.rollout_metrics import mean, staleness_metrics
from grpo_cli.reporting.stage_clock import Clock
from grpo_cli.scoring.scorer import ScoringSession, metrics_of
from grpo_cli.training.logprob_passes import fill_old_logprobs
from grpo_cli.training.rollouts.balance import minibatch_of, moves
from grpo_cli.training.rollouts.credit import has_signal
from grpo_cli.training.rollouts.episode_credit import unknown_reward_names
from grpo_cli.training.rollouts.prefetch import PrefetchedGroups
from grpo_cli.training.run import Run
from grpo_cli.training.step_progress import StepBatch

LOWEST_SHARE = 0.1  # least assumed share of groups with a signal: limits what is sampled
MAX_ATTEMPTS = 10  # rounds of sampling in a step, as in DAPO; then the step has fewer groups


def collect(run: Run, recipe: Recipe, clock: Clock) -> StepBatch:
    """Samples and scores the groups of a step, and divides them over the processes.

    Raises:
        TrainingError: a reward function failed, the advantage rule does not take its rewards, or
            too many environments failed.
        UserError: a reward names an environment's reward that does not exist.
        Interrupted: the run has to end first.
    """
    dynamic = recipe.generation.dynamic_sampling
    collected = (collect_informative if dynamic else collect_next)(run, recipe, clock)
    if (episodes := run.queue.episodes) is not None:
        collected.metrics |= episodes.take_times()
    streams = recipe.dataset.streaming  # whose rows do not come again soon
    for _, group in sorted(collected.sampled.items()) if not streams else ():
        run.queue.lengths[group[0].row] = mean([o.tokens for o in group])
    with clock.waiting():
        rebalance(run, recipe, collected)
    return collected


def rebalance(run: Run, recipe: Recipe, collected: StepBatch) -> None:
    """Moves groups so that every process has about as much to train on, in each minibatch."""
    workers, step = run.workers, collected.step_stats
    if workers.size == 1:
        return
    holders = workers.gather([g.prompt_index for g in collected.groups])
    owners = {p: rank for rank, own in enumerate(holders) for p in own}
    works = {p: _work(run, recipe, step[p]) for own in holders for p in own}
    parts: dict[int, dict[int, int]] = {}
    for position, part in minibatch_of(owners, recipe.update.minibatches).items():
        parts.setdefault(part, {})[position] = owners[position]
    moved: dict[int, int] = {}
    for part_owners in parts.values():
        moved |= moves(part_owners, works, workers.size)
    if not moved:
        return
    leaving = workers.gather([g for g in collected.groups if g.prompt_index in moved])
    kept = [g for g in collected.groups if g.prompt_index not in moved]
    arrived = [g for groups in leaving for g in groups if moved[g.prompt_index] == workers.rank]
    collected.groups = sorted([*kept, *arrived], key=lambda g: g.prompt_index)


def _work(run: Run, recipe: Recipe, group: Sequence[RolloutStats]) -> float:
    """Returns the tokens of a group that an update computes; 0 for a group without gradient."""
    tokens = float(group[0].prompt_tokens + sum(o.tokens for o in group))
    speaks = every_rollout_has_gradient(
        recipe.loss,
        has_reference=run.policy.reference is not None,
        entropy_coef=run.entropy_bonus.value(recipe.loss),
        router_coef=run.policy.router_coef,
    )
    same = len({(o.outcome_reward, *map(tuple, o.steps.values())) for o in group}) == 1
    return 0.0 if same and not speaks else tokens


def collect_next(run: Run, recipe: Recipe, clock: Clock) -> StepBatch:
    """Collects the groups of the next prompts, prefetched ones if there are any."""
    queue, sessions = run.queue, list[ScoringSession]()
    batch = queue.prefetched.popleft() if queue.prefetched else None
    groups, step_stats = _sample(run, recipe, recipe.prompts_per_step, clock, sessions, batch)
    metrics = metrics_of(sessions, run.workers)
    rollouts = [r for g in groups for r in g.rollouts]
    if batch is not None:
        for r in rollouts:
            use_samplers_logprobs(r, run.state.step)
    if queue.prefetch_steps:
        took, waited = batch.seconds if batch else math.nan, clock.seconds["generate"]
        metrics |= staleness_metrics(rollouts, run.state.step, waited, took, run.workers)
    return StepBatch(groups, step_stats, step_stats, metrics)


def collect_informative(run: Run, recipe: Recipe, clock: Clock) -> StepBatch:
    """Samples until there are as many groups with a signal as the step has prompts."""
    queue, sessions = run.queue, list[ScoringSession]()
    wanted = recipe.prompts_per_step
    own, queue.leftover = queue.leftover, []
    usable = gathered(run.workers, own)
    carried = len(usable)
    sampled: StepStats = {}
    attempts = 0
    while len(usable) < wanted and attempts < MAX_ATTEMPTS:
        share = max(queue.signal_share, LOWEST_SHARE)
        number = min(wanted, math.ceil((wanted - len(usable)) / share))
        groups, fresh = _sample(run, recipe, number, clock, sessions)
        sampled |= fresh
        try:
            informative = {p for p, group in fresh.items() if has_signal(recipe, group)}
        except ValueError as error:
            raise TrainingError(f"step {run.state.step + 1}: {error}") from error
        own += [g for g in groups if g.prompt_index in informative]
        usable |= {p: fresh[p] for p in informative}
        queue.signal_share = (len(usable) - carried) / len(sampled)
        attempts += 1
    chosen = dict(sorted(usable.items())[:wanted])
    queue.leftover = [g for g in own if g.prompt_index not in chosen]
    with clock.stage("old_logprobs"):  # under the present policy, before its update
        fill_old_logprobs(run, recipe, [r for g in queue.leftover for r in g.rollouts])
    metrics = {
        "dynamic_sampling/attempts": attempts,
        "dynamic_sampling/sampled": len(sampled),
        "dynamic_sampling/dropped": len(sampled) - (len(usable) - carried),
        "dynamic_sampling/carried": carried,
        "dynamic_sampling/missing": wanted - len(chosen),
    }
    return StepBatch(
        [g for g in own if g.prompt_index in chosen],
        chosen,
        sampled or chosen,  # the leftover groups were enough
        {name: float(value) for name, value in metrics.items()} | metrics_of(sessions, run.workers),
    )


def use_samplers_logprobs(rollout: Rollout, step: int) -> None:
    """Sets old_logprobs to the sampler's log-probabilities for a rollout of an earlier policy.

    The trainer no longer has that policy; keeping it would take a copy of the weights per step.
    """
    sampled_at = rollout.completion.sampled_at
    if sampled_at is not None and sampled_at < step:
        rollout.old_logprobs = torch.tensor(rollout.completion.sampling_logprobs)


def _sample(
    run: Run,
    recipe: Recipe,
    number: int,
    clock: Clock,
    sessions: list[ScoringSession],
    batch: PrefetchedGroups | None = None,
) -> tuple[list[Group], StepStats]:
    """Returns this process's groups of the next `number` prompts, and all processes' outcomes.

    Args:
        sessions: receives the session in which the groups are scored.
        batch: the groups, if they were prefetched.
    """
    session = run.scorer.begin(run.trainer_state())
    sessions.append(session)
    # Processes in lockstep sample episodes in rounds: one that left early would block the others.
    in_rounds = run.queue.episodes is not None and run.workers.runs_in_lockstep
    leaving = nullcontext() if in_rounds else run.interrupts.interruptible()
    own, complete = -(-number // run.workers.size), itertools.count(1)

    def add(rollouts: Sequence[Rollout]) -> None:
        session.add(rollouts)  # scoring begins while others are still being sampled
        heartbeat.detail(f"{next(complete)}/{own}")

    with clock.stage("generate"), leaving:
        sampling = run.queue.sample(recipe, number) if batch is None else batch.take
        groups = sampling(add)
    rollouts = [r for g in groups for r in g.rollouts]
    if run.generator.computes_here:
        clock.count("generate", rollout_flops(run.policy.model, rollouts))
    with (
        run.interrupts.interruptible(),
        clock.waiting(),
        run.workers.raise_together(),
        clock.stage("reward"),
    ):
        session.finish(rollouts, run.policy.tokenizer)
    level_rewards(groups, {name: reward.weight for name, reward in recipe.reward.items()})
    for group in groups:
        for r in group.rollouts:
            r.excluded = recipe.loss.mask_truncated and r.completion.finish_reason == "length"
    step_stats = gathered(run.workers, groups)
    check_environments(recipe, step_stats, run.state.step)
    if run.state.step == 0:
        check_reward_names(run, recipe, step_stats)
    return groups, step_stats


def check_reward_names(run: Run, recipe: Recipe, sampled: StepStats) -> None:
    """Raises a UserError if a reward names an environment's reward that no environment gives.

    If environments of other rows may still come, it only prints a note.
    """
    may_come = recipe.environment.by_name or any(r.datasets for r in recipe.reward.values())
    for problem in unknown_reward_names(recipe, sampled):
        if not may_come:
            raise UserError(problem)
        run.reporter.say(f"note: {problem}")


def gathered(workers: Workers, groups: Sequence[Group]) -> StepStats:
    """Returns the outcomes of every process's groups, on every process."""
    return {p: o for part in workers.gather(rollout_stats(groups)) for p, o in part}


def check_environments(recipe: Recipe, sampled: StepStats, step: int) -> None:
    """Raises a TrainingError if too many of a step's environments failed.

    Args:
        sampled: the outcomes of rollouts that were sampled together, over all processes.
        step: counted from 0.
    """
    rollouts = [o for group in sampled.values() for o in group]
    failed = [o.episode for o in rollouts if o.episode and o.episode.environment_failed]
    limit = recipe.environment.max_failed_share
    if failed and len(failed) > limit * len(rollouts):
        raise TrainingError(
            f"step {step + 1}: the environments of {len(failed)} of {len(rollouts)} rollouts "
            f"failed, more than environment.max_failed_share = {limit:g}; the last error: "
            f"{masked(failed[-1].env_error) or failed[-1].stop_reason}"
        )
