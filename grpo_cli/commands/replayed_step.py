"""Recomputes a kept step as `train.py` takes it, and explains each completion of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from grpo_cli import train
from grpo_cli.algorithm.baselines import BASELINES
from grpo_cli.algorithm.batch import collate
from grpo_cli.algorithm.loss import Coefficients, grpo_loss
from grpo_cli.algorithm.variants import apply
from grpo_cli.checkpoints import paths
from grpo_cli.config.schema import Recipe
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.models.loading import inference
from grpo_cli.models.memory import is_out_of_memory
from grpo_cli.random_streams import rng_state, set_rng_state
from grpo_cli.records import Group, Rollout, StepStats, reward_tensors
from grpo_cli.training.replay import run as replay_run
from grpo_cli.training.replay.completion_terms import Terms, terms_of
from grpo_cli.training.replay.gradient_parts import GradientParts, Part
from grpo_cli.training.replay.results import NO_PART, Explanation, Replay, UpdateReport
from grpo_cli.training.rollouts.credit import assign_advantages
from grpo_cli.training.run import Run
from grpo_cli.training.step import Step, begin

AGREES = 1e-4  # of an advantage: rounding to float32 is smaller

Chosen = Callable[[Group, int], bool]  # whether a completion of a group is to be explained alone


def replay(
    folder: Path, step: int, chosen: Chosen | None, device: str | None, trust: bool = True
) -> Replay:
    """Recomputes a kept step with all its optimizer steps.

    Args:
        step: counted from 1.
        chosen: the completions whose gradients are taken one by one, while all others are one
            part; None: all of them.
        device: to compute on; None: that of the run.
        trust: whether any model that the step names is loaded.

    Raises:
        UserError: the step is damaged or of another version, or has none of the chosen completions.
        TrainingError: the model does not fit into the memory of one process.
    """
    kept = replay_run.restore(folder, paths.kept_path(folder, step), device, trust)
    try:
        return _replay(kept, step, chosen)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingError(
            f"out of memory: grpo replay computes in one process, which needs room for the "
            f"model, its optimizer and two gradients; {kept.processes} processes have trained it. "
            "Use --device=cpu on a machine with more memory."
        ) from error


def _replay(kept: replay_run.Kept, number: int, chosen: Chosen | None) -> Replay:
    run = kept.run
    step = begin(run)
    batch = step.batch
    assert batch is not None, "a kept step has its rollouts"
    every = [(g, j) for g in batch.groups for j in range(len(g.rollouts))]
    if chosen is not None and not any(chosen(*one) for one in every):
        rows = sorted({g.prompt.row for g in batch.groups})
        raise UserError(
            f"--row: step {number} has no such completion; its rows are "
            f"{', '.join(map(str, rows))}, each with the completions 0 to "
            f"{max(j for _, j in every)} (--sample)."
        )
    step_stats = train.fill_logprobs(run, step, batch)
    assign_advantages(step.recipe, batch.groups, step_stats, step.number)
    reports: list[UpdateReport] = []

    def take(run: Run, step: Step, update: int) -> None:
        report = explained_step(run, step, update, chosen, kept.has_dropout)
        reports.append(report)

    metrics = train.update_policy(run, step, take)
    decode = run.tokenizer.convert_ids_to_tokens
    texts = {
        (g.prompt_index, j): [
            run.tokenizer.convert_tokens_to_string([token]) for token in decode(r.completion.ids)
        ]
        for g in batch.groups
        for j, r in enumerate(g.rollouts)
        if chosen is not None and chosen(g, j)
    }
    return Replay(
        number,
        step.recipe,
        str(run.workers.device),
        kept.processes,
        metrics,
        reports,
        batch.groups,
        baselines_of(step.recipe, batch.groups, step_stats),
        texts,
        {g.prompt_index: run.tokenizer.decode(g.prompt.ids) for g in batch.groups},
        kept.has_dropout,
    )


def explained_step(
    run: Run, step: Step, update: int, chosen: Chosen | None, has_dropout: bool
) -> UpdateReport:
    """Takes one optimizer step as `train.optimizer_step` does, and explains its gradient."""
    report = UpdateReport(update)
    groups = train.minibatch(step, update)
    batch = train.optimizer_batch(run, step, groups, update)
    if batch is None:
        return report
    before = rng_state()
    sums = train.accumulate(run, step, batch)
    after = rng_state()
    parts = GradientParts(run.policy)
    set_rng_state(before)  # the same dropout
    with parts.watching():
        explain(run, step, groups, batch, report, parts, chosen, has_dropout)
    report.difference = parts.difference
    parts.restore()
    set_rng_state(after)
    train.apply_gradient(run, step, sums)
    report.loss, report.norm = step.progress.totals[-1].loss, step.progress.norms[-1]
    return report


def explain(
    run: Run,
    step: Step,
    groups: Sequence[Group],
    batch: train.OptimizerBatch,
    report: UpdateReport,
    parts: GradientParts,
    chosen: Chosen | None,
    has_dropout: bool,
) -> None:
    """Computes the gradient of each chosen completion, and of all others together.

    Without dropout each chosen completion is a micro-batch of its own. With dropout it is not: its
    masks are those of the micro-batch that it was trained in, so that the forward passes are
    repeated as they were, and each completion has a backward pass through the complete one.
    """
    places = {id(r): (g, j) for g in groups for j, r in enumerate(g.rollouts)}
    own = {id(r) for r in batch.with_gradient if chosen is None or chosen(*places[id(r)])}
    of_others: list[Part] = []

    of_batch, load = batch.coefficients, batch.coefficients.load

    def explained(micro_batch: list[Rollout]) -> None:
        logprobs, entropies = train.policy_outputs(run, step, of_batch, micro_batch)
        routing, coefficients = run.policy_logprobs.routing, of_batch
        if has_dropout and load is not None and routing is not None:  # not of single completions
            coefficients = replace(of_batch, load=None)
            aux_loss = run.scaler.scale(of_batch.router * load.loss(routing))
            aux_loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            of_others.append(parts.take_part())
        alone = [[i] for i, r in enumerate(micro_batch) if id(r) in own]
        rest = [i for i, r in enumerate(micro_batch) if id(r) not in own]
        for members in [*alone, *([rest] if rest else [])]:
            rollouts = [micro_batch[i] for i in members]
            width = max(len(r.completion.ids) for r in rollouts)
            of_members = logprobs[members, :width]
            own_entropies = None if entropies is None else entropies[members, :width]
            output = grpo_loss(
                step.recipe.loss,
                collate(rollouts, run.workers.device),
                of_members,
                own_entropies,
                coefficients,
                routing,
            )
            is_last = members is rest or (not rest and members is alone[-1])
            loss = run.scaler.scale(output.loss)
            loss.backward(retain_graph=not is_last)  # type: ignore[no-untyped-call]
            part = parts.take_part()
            if members is rest:
                of_others.append(part)
                continue
            (r,) = rollouts
            g, j = places[id(r)]
            terms = terms_of(step.recipe.loss, r, of_members, own_entropies, of_batch)
            of_completion = Part(part.share, part.norm / run.scaler.get_scale())
            report.completions[g.prompt_index, j] = Explanation(terms, of_completion, r.weight)

    if has_dropout:
        with torch.no_grad():  # which draws random numbers first
            compute = partial(train.forward, run, step, of_batch)
            run.micro_batches.map(compute, batch.entropy_only, run.policy_logprobs)
        run.micro_batches.map(explained, batch.with_gradient, run.policy_logprobs)
    else:
        for r in batch.with_gradient:
            if id(r) in own:
                explained([r])
        others = [r for r in batch.with_gradient if id(r) not in own]
        run.micro_batches.map(explained, others, run.policy_logprobs)
    report.rest = Part(sum(p.share for p in of_others), math.nan)
    for r_id, (g, j) in places.items():
        if (chosen is None or chosen(g, j)) and r_id not in own:
            r = g.rollouts[j]
            terms = without_gradient(run, step, r, of_batch)
            report.completions[g.prompt_index, j] = Explanation(terms, NO_PART, r.weight)


def without_gradient(
    run: Run, step: Step, rollout: Rollout, coefficients: Coefficients
) -> Terms | None:
    """Returns the numbers of a completion that has no gradient; None if nothing in it trains."""
    if not rollout.loss_tokens:
        return None
    with inference(run.policy):
        logprobs, entropies = train.policy_outputs(run, step, coefficients, [rollout])
    return terms_of(step.recipe.loss, rollout, logprobs, entropies, coefficients)


def baselines_of(
    recipe: Recipe, groups: Sequence[Group], step_stats: StepStats
) -> dict[tuple[int, int], tuple[float, float]]:
    """Returns (baseline, divisor) of the advantages that the recipe's rule computes from them."""
    function = BASELINES.get(recipe.advantage.rule)
    if function is None:
        return {}
    weights = {name: reward.weight for name, reward in recipe.reward.items()}
    tensors = reward_tensors(step_stats, weights)
    baseline, divisor = apply(function, tensors, recipe.advantage)
    rows = {p: row for row, p in enumerate(sorted(step_stats))}
    found = {}
    for g in groups:
        for j, r in enumerate(g.rollouts):
            reward = tensors["rewards"][rows[g.prompt_index], j].item()
            own = baseline[rows[g.prompt_index], j].item(), divisor[rows[g.prompt_index], j].item()
            expected = (reward - own[0]) / own[1]
            if abs(expected - r.advantage) <= AGREES * (1 + abs(expected)):
                found[g.prompt_index, j] = own
    return found
