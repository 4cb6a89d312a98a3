"""GRPO (DeepSeekMath, arXiv 2402.03300): the loop and the optimizer step, to be read in order.

Sample G completions for each of P prompts, score them, take each reward relative to its group as
the advantage, and ascend a clipped surrogate, less β times a KL to a reference. No critic.

    objective       −min(ρA, clip(ρ, 1−ε, 1+ε_high)A) + β·KL(π ‖ π_ref) − entropy bonus, on each
                    completion token; every term and its variants are switches of `loss`
    normalisation   one sum over the whole optimizer batch and all processes, divided by one count
                    that is taken before the first backward: micro-batches and ranks change nothing
    on-policy       with one update a step, old_logprobs are the current ones and ρ = 1 in value
    off-policy      with num_iterations · minibatches > 1, they are computed before the first update
    begun ahead     of completions sampled during the step before, they are the sampler's own

    grpo train recipe=gsm8k_tiny
    torchrun --nproc-per-node 8 --no-python grpo train recipe=math_qwen
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_cli import normalization, saving, survey
from grpo_cli.balance import minibatch_of
from grpo_cli.clock import Clock
from grpo_cli.collect import collect
from grpo_cli.config import Recipe
from grpo_cli.credit import assign_advantages, penalize
from grpo_cli.errors import TrainingError
from grpo_cli.flops import FORWARD_BACKWARD
from grpo_cli.metrics import rollout_metrics
from grpo_cli.objective import (
    DIFFERENCE,
    DRIFT,
    ENTROPIES,
    Coefficients,
    Terms,
    logged,
    loss_of,
    none_is_silent,
)
from grpo_cli.outcomes import gathered
from grpo_cli.report import rows_of_all
from grpo_cli.rollouts import Group, Rollout, collate
from grpo_cli.run import Run
from grpo_cli.schedules import at_step, learning_rate
from grpo_cli.sharding import norm_of
from grpo_cli.stop import Interrupted
from grpo_cli.tally import Tally, Totals
from grpo_cli.work import Work


def train(run: Run) -> None:
    """Runs the recipe from where `run` stands to its last step, or until it is told to stop."""
    try:
        if run.state.step == 0 and run.state.before is None and run.evaluation_is_due(0):
            run.evaluate(step=0)
        # A step that was done just before the run had to end is still to be evaluated.
        if run.unreported is not None and report(run, run.unreported, []):
            return
        while not run.is_over:
            metrics, groups = take_step(run, run.state.step)
            if report(run, metrics, groups):
                return
    except Interrupted:  # in the middle of a step, which there is no time to finish
        run.stop_requested()
        run.left_at = saving.save_interrupted(run)
        return
    run.finish()


def take_step(run: Run, step: int) -> tuple[dict[str, float], list[Group]]:
    """One batch of completions, from prompts to new weights; returns its metrics and groups.

    Raises:
        Interrupted: the run has to end before the step could be finished.
    """
    recipe, metrics = at_step(run.recipe, step)
    clock = run.clock()
    run.begin_step()
    if run.work is None:
        run.work = Work(collect(run, recipe, clock))
        run.mark()
    collected = run.work.collected
    groups, whole_step = collected.groups, collected.whole_step
    run.sample_ahead(step)
    run.generator.rest()
    kl_in_reward = run.reference is not None and recipe.loss.kl_in == "reward"
    rollouts = [r for g in groups for r in g.rollouts if r.loss_tokens or kl_in_reward]

    if recipe.update.num_iterations * recipe.update.minibatches > 1 or kl_in_reward:
        with clock.stage("old_logprobs"):
            survey.fill_old_logprobs(run, recipe, rollouts)
    if run.reference is not None:
        with clock.stage("ref_logprobs"):
            survey.fill_ref_logprobs(run, recipe, rollouts)
    if kl_in_reward:
        penalize(rollouts, recipe.loss.kl_estimator, run.beta(recipe))
        whole_step = gathered(run.workers, groups)
    assign_advantages(recipe, groups, whole_step, step)
    metrics |= update(run, recipe, run.work, list(whole_step), step, clock)
    with clock.stage("weights"):
        metrics |= run.generator.update_weights(run.policy, step + 1)
        run.refresh_reference(step + 1)

    metrics |= collected.metrics | rollout_metrics(collected.sampled)
    metrics |= clock.metrics(collected.sampled) | run.advance(collected.sampled)
    return metrics, groups


def report(run: Run, metrics: dict[str, float], groups: Sequence[Group]) -> bool:
    """After a step: evaluates, writes its metrics, saves; all where due. True if told to stop."""
    step = run.state.step
    run.unreported = metrics
    if run.reporter.keeps_completions(step):  # an evaluation that is broken off does not keep them
        run.reporter.completions(step, rows_of_all(run.workers, step, groups))
    if run.evaluation_is_due(step):
        metrics |= run.evaluate(step)
    run.reporter.step(step, metrics)
    run.unreported = None
    run.mark()  # rewards may draw random numbers in an evaluation too
    stopping = run.stop_requested() and not run.is_over
    if stopping or run.checkpoint_is_due(step):
        saving.save(run, wait=not stopping)
    return stopping


def update(
    run: Run,
    recipe: Recipe,
    work: Work,
    positions: Sequence[int],
    step: int,
    clock: Clock,
) -> dict[str, float]:
    """Every optimizer step on one batch of rollouts; returns the metrics of the update.

    Args:
        work: the step's; begins after the optimizer steps that it has had.
        positions: those of every process's groups.

    Raises:
        TrainingError: a loss or a gradient is not finite; its optimizer step was not taken.
    """
    groups = work.collected.groups
    rate = learning_rate(recipe.optimizer, step, recipe.steps)
    for parameters in run.optimizer.param_groups:
        parameters["lr"] = rate
    every = recipe.log.entropy_every
    bonus = recipe.loss.entropy_coef > 0 or recipe.loss.entropy_target is not None
    entropy = bonus or (every > 0 and (step == 0 or (step + 1) % every == 0))
    if bonus and not work.updates:
        work.coefficients = {"entropy_coef": run.entropy_coef(recipe)}
    done, norms = work.totals, work.norms
    updates = recipe.update.num_iterations * recipe.update.minibatches
    for number in range(work.updates, updates):
        own = minibatch(groups, positions, number % recipe.update.minibatches, recipe)
        with clock.stage("forward_backward"):
            tally = accumulate(run, recipe, own, step * updates + number, entropy, clock)
        if tally is None:  # nothing trains, on any process
            work.updates += 1
            continue
        with run.waiting(clock):  # for the slowest process
            run.workers.barrier()
        with clock.stage("optimizer"):
            totals = tally.reduced(run.workers)
            run.workers.sum_gradients(run.policy.parameters())
            loss = totals.sums["loss"]
            norm = norm_of(run.policy.parameters(), recipe.optimizer.max_grad_norm)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise TrainingError(
                    f"step {step + 1}: the loss is {loss:g} and the gradient norm {norm:g}; "
                    "stopped before the optimizer step."
                )
            # Of completions begun ahead the old log-probabilities are the sampler's own.
            sampler_gap = totals.figures[DRIFT if run.overlap else DIFFERENCE]
            check_sampler(recipe.generation.max_logp_difference, sampler_gap, step)
            run.optimizer.step()
            run.clear_gradients()
        run.adapt_entropy(recipe, totals.figures)
        done.append(totals)
        norms.append(norm)
        work.updates += 1
        run.mark()
    if not done:
        return {"learning_rate": rate}
    metrics = Totals.of(done).figures
    coefficients = work.coefficients | run.adapt_beta(recipe, metrics)
    averages = {name: metrics[name] / len(done) for name in ("loss", "policy_loss")}
    averages |= {"grad_norm": sum(norms) / len(norms), "learning_rate": rate}
    if not run.overlap:
        del metrics[DRIFT]
    return logged(recipe.loss, metrics | averages) | coefficients


def check_sampler(limit: float | None, found: float, step: int) -> None:
    """Raises a TrainingError if the sampler was another policy than the trainer's.

    Args:
        limit: generation.max_logp_difference. found: mean |difference of log-probabilities|.
    """
    if limit is not None and found > limit:
        raise TrainingError(
            f"step {step + 1}: the sampler's log-probabilities differ from the trainer's by "
            f"{found:.3g} in the mean, more than generation.max_logp_difference = {limit:g}; "
            "stopped before the optimizer step."
        )


def minibatch(
    groups: Sequence[Group], positions: Sequence[int], number: int, recipe: Recipe
) -> list[Group]:
    """This process's groups of one of the step's minibatches."""
    part = minibatch_of(positions, recipe.update.minibatches)
    return [g for g in groups if part[g.position] == number]


def accumulate(
    run: Run, recipe: Recipe, groups: Sequence[Group], number: int, entropy: bool, clock: Clock
) -> Tally | None:
    """This process's gradient of one optimizer batch, summed over micro-batches.

    Args:
        groups: this process's. number: of the optimizer step. entropy: whether to measure it.

    Returns:
        What was measured on this process; None if there is nothing to train on, on any process.
    """
    rollouts = [r for g in groups for r in g.rollouts if r.loss_tokens]
    counts = weigh(run, recipe, groups)
    if not counts["tokens"]:
        return None
    trained = counts["tokens"]
    if survey.is_needed(recipe.loss):
        survey.select_tokens(run, recipe, groups, number)
        if recipe.loss.top_entropy < 1:
            chosen = [r.high_entropy.sum().item() for r in rollouts if r.high_entropy is not None]
            trained = run.workers.sum({"trained": sum(chosen)})["trained"]
    coefficients = Coefficients(run.beta(recipe), run.entropy_coef(recipe), max(trained, 1.0))

    def measured_loss(micro: Sequence[Rollout], tally: Tally) -> Tensor:
        logprobs, entropies = run.likelihood(
            micro,
            recipe.generation.temperature,
            entropy=entropy,
            entropy_gradient=coefficients.entropy > 0,
        )
        batch = collate(micro, run.workers.device)
        return loss_of(recipe.loss, Terms.of(batch, logprobs, entropies), coefficients, tally)

    # Without advantage, KL and entropy a rollout has no gradient. It counts in what the others are
    # divided by, and is computed only where its entropy is to be logged.
    all_speak = none_is_silent(recipe, run.reference is not None, coefficients.entropy)
    speaking = [r for r in rollouts if all_speak or r.advantages.any()]
    silent = [r for r in rollouts if not (all_speak or r.advantages.any())] if entropy else []
    if not (speaking or silent):  # every process measures the same things
        silent = [run.filler]
    run.get_ready(recipe, rollouts or silent)

    clock.count("forward_backward", FORWARD_BACKWARD * run.flops(speaking) + run.flops(silent))

    def attempt(max_tokens: int) -> Tally:
        tally, of_silent = Tally(), Tally()
        with torch.no_grad():
            for micro in run.micro_batches(run.likelihood, silent, max_tokens):
                measured_loss(micro, of_silent)
        tally.take(of_silent, ENTROPIES)
        for micro in run.micro_batches(run.likelihood, speaking, max_tokens):
            run.workers.backward(measured_loss(micro, tally))
        if not speaking:  # a gradient of 0 is one: the optimizer's momentum goes on
            run.zero_gradients()
        return tally

    return run.fitted(run.likelihood, attempt, speaking + silent, run.clear_gradients)


def weigh(run: Run, recipe: Recipe, groups: Sequence[Group]) -> dict[str, float]:
    """Sets what each rollout's tokens are multiplied by; returns the optimizer batch's counts."""
    lengths = {g.position: sum(r.loss_tokens for r in g.rollouts) for g in groups}
    counts = run.workers.sum(
        {
            "tokens": float(sum(lengths.values())),
            "completions": float(sum(len(g.rollouts) for g in groups)),
            "prompts": float(len(groups)),
        }
    )
    for g in groups:
        for r in g.rollouts:
            if r.loss_tokens:
                r.weight = normalization.token_weight(
                    recipe.loss.normalize,
                    r.loss_tokens,
                    lengths[g.position],
                    counts,
                    recipe.generation.max_completion_tokens,
                )
    return counts
