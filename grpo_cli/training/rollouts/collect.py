"""Samples and scores the groups of a step; dynamic sampling keeps only those with a signal.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): a group without any advantage, as when its
rewards are all equal, has no gradient. It is dropped, and new prompts are sampled until the step is
full. Leftover groups go into the next step, with the log-probabilities of the policy that sampled
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from operator import attrgetter

import torch

from grpo_cli.algorithm.advantages import settle
from grpo_cli.algorithm.loss import every_rollout_has_gradient
from grpo_cli.config.interpolation import masked
from grpo_cli.config.recipe import Recipe
from grpo_cli.distributed import heartbeat
from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.models.flops import rollout_flops
from grpo_cli.records import Group, Rollout, RolloutStats, StepStats, regrouped, rollout_stats
from grpo_cli.reporting.rollout_metrics import mean, staleness_metrics
from grpo_cli.reporting.stage_clock import Clock
from grpo_cli.scoring.scorer import ScoringSession, metrics_of
from grpo_cli.training.logprob_passes import with_old_logprobs
from grpo_cli.training.rollouts.credit import has_signal, unknown_reward_names
from grpo_cli.training.rollouts.queue import PrefetchedGroups
from grpo_cli.training.run import Run, StepBatch

LOWEST_SHARE = 0.1  # least assumed share of groups with a signal: limits what is sampled
MAX_ATTEMPTS = 10  # rounds of sampling in a step, as in DAPO; then the step has fewer groups


def collect(run: Run, clock: Clock) -> StepBatch:
    """Samples and scores the groups of a step, and divides them over the processes.

    Every group is accepted; with dynamic sampling, only those with a signal, and more are sampled
    until there are as many as the step has prompts.

    Raises:
        TrainingError: a reward function failed, the advantage rule does not take its rewards, or
            too many environments failed.
        UserError: a reward names an environment's reward that does not exist.
        Interrupted: the run has to end first.
    """
    recipe, queue = run.recipe, run.queue
    wanted, dynamic = recipe.prompts_per_step, recipe.generation.dynamic_sampling
    prefetched = queue.prefetched.popleft() if queue.prefetched else None
    own, queue.leftover = queue.leftover, []  # this process's accepted groups
    accepted = gathered(run.workers, own) if dynamic else {}
    carried, sampled, sessions = len(accepted), StepStats(), list[ScoringSession]()
    while len(accepted) < wanted and len(sessions) < MAX_ATTEMPTS:
        share = max(queue.signal_share, LOWEST_SHARE) if dynamic else 1.0
        number = min(wanted, math.ceil((wanted - len(accepted)) / share))
        sessions.append(session := run.scorer.begin(run.trainer_state()))
        ahead = prefetched if len(sessions) == 1 else None
        groups = _sample(run, number, clock, session, ahead)
        with (
            run.interrupts.interruptible(),
            clock.waiting(),
            run.workers.raise_together(),
            clock.stage("reward"),
        ):
            rollouts = session.finish([r for g in groups for r in g.rollouts], run.policy.tokenizer)
        groups = regrouped(groups, rollouts)
        groups = settle(groups, recipe.reward_weights, recipe.loss.mask_truncated)
        fresh = gathered(run.workers, groups)
        check_environments(recipe, fresh, run.state.step)
        if run.state.step == 0:
            check_reward_names(run, fresh)
        sampled |= fresh
        usable = {p for p, group in fresh.items() if not dynamic or _has_signal(run, group)}
        own += [g for g in groups if g.prompt_index in usable]
        accepted |= {p: group for p, group in fresh.items() if p in usable}
        if not dynamic:
            break
        queue.signal_share = (len(accepted) - carried) / len(sampled)
    # Without leftover groups of the step before, `accepted` has the order of `sampled`.
    chosen = dict(sorted(accepted.items())[:wanted]) if dynamic else accepted
    queue.leftover = [g for g in own if g.prompt_index not in chosen]
    own = [g for g in own if g.prompt_index in chosen]
    batch = StepBatch(own, chosen, sampled or chosen, metrics_of(sessions, run.workers))
    if dynamic:
        with clock.stage("old_logprobs"):  # under the current policy, before its update
            leftover = [r for g in queue.leftover for r in g.rollouts]
            leftover = with_old_logprobs(run, leftover, attrgetter("is_scored"))
            queue.leftover = regrouped(queue.leftover, leftover)
        counts = {
            "attempts": len(sessions),
            "sampled": len(sampled),
            "dropped": len(sampled) - (len(accepted) - carried),
            "carried": carried,
            "missing": wanted - len(chosen),
        }
        batch.metrics |= {f"dynamic_sampling/{k}": float(n) for k, n in counts.items()}
    rollouts = [r for g in own for r in g.rollouts]
    if prefetched is not None:
        rollouts = [with_samplers_logprobs(r, run.state.step) for r in rollouts]
        batch.groups = regrouped(own, rollouts)
    if queue.prefetch_steps:
        took, waited = prefetched.seconds if prefetched else math.nan, clock.seconds["generate"]
        batch.metrics |= staleness_metrics(rollouts, run.state.step, waited, took, run.workers)
    batch.metrics |= queue.rollouter.take_times()
    streams = recipe.dataset.streaming  # whose rows do not come again soon
    for _, group in sorted(batch.sampled.items()) if not streams else ():
        queue.lengths[group[0].row] = mean([o.tokens for o in group])
    with clock.waiting():
        rebalance(run, batch)
    return batch


def _has_signal(run: Run, group: Sequence[RolloutStats]) -> bool:
    try:
        return has_signal(run.recipe, group)
    except ValueError as error:
        raise TrainingError(f"step {run.state.step + 1}: {error}") from error


def rebalance(run: Run, batch: StepBatch) -> None:
    """Moves groups so that every process has about as much to train on, in each minibatch."""
    workers, step = run.workers, batch.step_stats
    if workers.size == 1:
        return
    holders = workers.gather([g.prompt_index for g in batch.groups])
    owners = {p: rank for rank, own in enumerate(holders) for p in own}
    works = {p: _work(run, step[p]) for own in holders for p in own}
    parts: dict[int, dict[int, int]] = {}
    for position, part in minibatch_of(owners, run.recipe.update.minibatches).items():
        parts.setdefault(part, {})[position] = owners[position]
    moved: dict[int, int] = {}
    for part_owners in parts.values():
        moved |= moves(part_owners, works, workers.size)
    if not moved:
        return
    leaving = workers.gather([g for g in batch.groups if g.prompt_index in moved])
    kept = [g for g in batch.groups if g.prompt_index not in moved]
    arrived = [g for groups in leaving for g in groups if moved[g.prompt_index] == workers.rank]
    batch.groups = sorted([*kept, *arrived], key=lambda g: g.prompt_index)


def _work(run: Run, group: Sequence[RolloutStats]) -> float:
    """Returns the tokens of a group that an update computes; 0 for a group without gradient."""
    tokens = float(group[0].prompt_tokens + sum(o.tokens for o in group))
    always = every_rollout_has_gradient(
        run.recipe.loss,
        has_reference=run.policy.reference is not None,
        entropy_coef=run.state.entropy_bonus.value(run.recipe.loss),
        router_coef=run.policy.router_coef,
    )
    same = len({(o.outcome_reward, *map(tuple, o.steps.values())) for o in group}) == 1
    return 0.0 if same and not always else tokens


def with_samplers_logprobs(rollout: Rollout, step: int) -> Rollout:
    """Returns a rollout of an earlier policy with the sampler's log-probabilities as old ones.

    The trainer no longer has that policy; keeping it would take a copy of the weights per step.
    """
    sampled_at = rollout.completion.sampled_at
    if sampled_at is None or sampled_at >= step:
        return rollout
    return replace(rollout, old_logprobs=torch.tensor(rollout.completion.sampling_logprobs))


def _sample(
    run: Run,
    number: int,
    clock: Clock,
    session: ScoringSession,
    prefetched: PrefetchedGroups | None = None,
) -> list[Group]:
    """Returns this process's groups of the next `number` prompts.

    Args:
        session: begins to score the groups while others are still being sampled.
        prefetched: the groups, if they were prefetched.
    """
    queue, share = run.queue, -(-number // run.workers.size)
    groups, leaving = list[Group](), run.interrupts.interruptible(queue.rollouter.takes_turns)
    with clock.stage("generate"), leaving:
        sampling = nullcontext(prefetched.take()) if prefetched else queue.sample(number)
        with sampling as sampled:
            for group in sampled:
                session.add(group.rollouts)
                groups.append(group)
                heartbeat.detail(f"{len(groups)}/{share}")
    groups.sort(key=lambda group: group.prompt_index)
    if run.generator.computes_here:
        rollouts = [r for g in groups for r in g.rollouts]
        clock.count("generate", lambda: rollout_flops(run.policy.model, rollouts))
    return groups


def check_reward_names(run: Run, sampled: StepStats) -> None:
    """Raises a UserError if a reward names an environment's reward that no environment gives.

    If environments of other rows may still come, it only prints a note.
    """
    recipe = run.recipe
    may_come = recipe.environment.by_name or any(r.datasets for r in recipe.reward.values())
    for problem in unknown_reward_names(recipe, sampled):
        if not may_come:
            raise UserError(problem)
        run.reporter.say(f"note: {problem}")


def gathered(workers: Workers, groups: Sequence[Group]) -> StepStats:
    """Returns the statistics of every process's groups, on every process."""
    return {p: o for part in workers.gather(rollout_stats(groups)) for p, o in part}


def check_environments(recipe: Recipe, sampled: StepStats, step: int) -> None:
    """Raises a TrainingError if too many of a step's environments failed.

    Args:
        sampled: the statistics of rollouts that were sampled together, over all processes.
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


UNEVEN = 1.03  # times the mean: below it, the busiest process keeps its groups


def minibatch_of(positions: Iterable[int], minibatches: int) -> dict[int, int]:
    """Returns the minibatch of each group: stretches of about equal size, in order of position.

    The minibatches therefore do not depend on the number of processes.
    """
    in_order = sorted(positions)
    return {p: place * minibatches // len(in_order) for place, p in enumerate(in_order)}


def moves(owners: Mapping[int, int], works: Mapping[int, float], size: int) -> dict[int, int]:
    """Returns the groups to move so that no process has much more work than the others.

    Args:
        owners: the process of each group, by its position. works: the work of each group.

    Returns:
        The new process of each group that moves; as few as needed.
    """
    sums = [0.0] * size
    own: list[set[int]] = [set() for _ in range(size)]
    for position, rank in owners.items():
        sums[rank] += works[position]
        own[rank].add(position)
    mean, moved = sum(sums) / size, dict[int, int]()
    for _ in range(len(owners)):
        most = max(range(size), key=lambda r: (sums[r], -r))
        least = min(range(size), key=lambda r: (sums[r], r))
        gap = sums[most] - sums[least]
        # A group smaller than the gap lowers the larger sum; one of half the gap lowers it most.
        fitting = [p for p in own[most] if 0 < works[p] < gap]
        if sums[most] <= UNEVEN * mean or not fitting:
            break
        best = min(fitting, key=lambda p: (abs(works[p] - gap / 2), p))
        own[most].remove(best)
        own[least].add(best)
        sums[most] -= works[best]
        sums[least] += works[best]
        moved[best] = least
    return {p: rank for p, rank in moved.items() if owners[p] != rank}
