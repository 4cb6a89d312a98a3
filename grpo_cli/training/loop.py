"""GRPO (DeepSeekMath, arXiv 2402.03300): the loop and the optimizer step, to be read in order.

Sample G completions for each of P prompts, score them, take each reward relative to its group as
the advantage, and ascend a clipped surrogate, less β times a KL to a reference. No critic.

    objective       −min(ρA, clip(ρ, 1−ε, 1+ε_high)A) + β·KL(π ‖ π_ref) − entropy bonus, on each
                    completion token; every term and its variants are switches of `loss`
    normalisation   one sum over the optimizer batch and all processes, divided by one count
                    taken before the first backward: micro-batches and ranks do not matter
    on-policy       with one update a step, old_logprobs are the current ones and ρ = 1 in value
    off-policy      with num_iterations · minibatches > 1, they are computed before the first update
    prefetched      rollouts that were sampled during an earlier step keep the sampler's
                    log-probabilities as their old_logprobs

    grpo train recipe=gsm8k_tiny
    torchrun --nproc-per-node 8 --no-python grpo train recipe=math_qwen
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch

from grpo_cli.algorithm.batch import collate
from grpo_cli.algorithm.loss import (
    TRAINED_ENTROPY,
    Coefficients,
    LossOutput,
    every_rollout_has_gradient,
    grpo_loss,
)
from grpo_cli.algorithm.losses import loss_function
from grpo_cli.algorithm.metric_sums import MetricSums
from grpo_cli.algorithm.settings import Loss
from grpo_cli.algorithm.variants import traits_of
from grpo_cli.distributed.fsdp import zero_gradients
from grpo_cli.distributed.stop_signal import Interrupted
from grpo_cli.models.flops import rollout_flops
from grpo_cli.models.policy import Policy
from grpo_cli.records import TrainingGroup, TrainingSample, WeightedSample, regrouped
from grpo_cli.training import ending, logprob_passes, resume
from grpo_cli.training.rollouts.collect import collect, gathered, minibatch_of
from grpo_cli.training.rollouts.credit import subtract_kl, weigh_samples, with_advantages
from grpo_cli.training.run import Run, StepBatch
from grpo_cli.training.step import Step, learning_rate, steps


def train(run: Run) -> None:
    """Trains from the run's current step to the last one, or until the run is asked to stop."""
    try:
        run.callbacks.call(run, "on_start")
        for step in steps(run):
            if not step.is_complete:
                take_step(run, step)
            step.log()
            stopping = run.should_stop()
            if stopping or run.should_save:
                resume.save(run, wait=not stopping)
            if stopping:
                return
    except Interrupted:  # mid-step, with no time left to finish it
        resume.save_interrupted(run)
        return
    ending.finish(run)


def take_step(run: Run, step: Step) -> None:
    """Takes one step, from prompts to new weights (Algorithm 1, lines 5 to 11).

    Raises:
        Interrupted: the run has to end before the step could be finished.
    """
    batch = step.batch  # None, unless the step was interrupted after sampling
    if batch is None:
        batch = step.keep(collect(run, step.clock))  # sample and score
    run.callbacks.call(run, "on_rollouts", groups=tuple(batch.groups))
    run.queue.prefetch(step.number)
    run.generator.offload()
    groups = make_samples(run, step, batch)
    step.metrics |= update_policy(run, step, groups)
    with step.clock.stage("weights"):
        step.metrics |= run.generator.update_weights(run.policy.model, step.number + 1)
        refresh_reference(run, step)
    step.finish()


def make_samples(run: Run, step: Step, batch: StepBatch) -> list[TrainingGroup]:
    """Turns the batch's rollouts into training samples: log-probabilities, then advantages.

    The log-probabilities of the old and of the reference policy are computed if the loss needs
    them. With `loss.kl_in=reward` the KL is subtracted from the rewards first.
    """
    recipe, loss = step.recipe, step.recipe.loss
    kl_in_reward = run.policy.reference is not None and loss.kl_in == "reward"
    samples = [r.as_kind(TrainingSample) for g in batch.groups for r in g.rollouts]
    needs = attrgetter("is_scored" if kl_in_reward else "loss_tokens")
    if step.num_updates > 1 or kl_in_reward:
        with step.clock.stage("old_logprobs"):
            samples = logprob_passes.with_old_logprobs(run, samples, needs)
    if run.policy.reference is not None:
        with step.clock.stage("ref_logprobs"):
            temperature = recipe.generation.temperature
            samples = logprob_passes.with_ref_logprobs(run.policy, samples, needs, temperature)
    groups, step_stats = regrouped(batch.groups, samples), batch.step_stats
    if kl_in_reward:
        beta = run.state.beta.value(loss)
        penalized = [subtract_kl(s, loss.kl_estimator, beta) for s in samples]
        step_stats = gathered(run.workers, regrouped(groups, penalized))
    credited, metrics = with_advantages(recipe, groups, step_stats, step.number)
    batch.groups = [*credited]  # for callbacks and checkpoints
    step.metrics |= metrics
    return credited


def update_policy(run: Run, step: Step, groups: Sequence[TrainingGroup]) -> dict[str, float]:
    """Takes every optimizer step on the step's samples; returns the metrics of the update.

    Raises:
        TrainingError: a loss or a gradient is not finite; its optimizer step was not taken.
    """
    rate = learning_rate(step.recipe.optimizer, step.number, step.recipe.steps)
    for param_group in run.policy.optimizer.param_groups:
        param_group["lr"] = rate
    for update in step.updates():  # num_iterations × minibatches
        optimizer_step(run, step, minibatch(step, groups, update), update)
    metrics = step.update_metrics()
    run.state.beta.update(step.recipe.loss, step.measured_kl)
    return {"learning_rate": rate} | metrics


def optimizer_step(run: Run, step: Step, groups: Sequence[TrainingGroup], update: int) -> None:
    """Accumulates the gradient of one optimizer batch, and takes the optimizer step with it."""
    if update == 0 and step.has_entropy_bonus:
        coefficient = run.state.entropy_bonus.value(step.recipe.loss)
        step.progress.coefficients = {"entropy_coef": coefficient}
    with step.clock.stage("forward_backward"):
        batch = optimizer_batch(run, step, groups, update)
        sums = None if batch is None else accumulate(run.policy, step.recipe.loss, batch)
    if sums is not None:  # some process has something to train on
        apply_gradient(run, step, sums)


def apply_gradient(run: Run, step: Step, sums: MetricSums) -> None:
    """Sums the gradient over processes, clips and checks it, and takes the optimizer step.

    Args:
        sums: the measurements of this process in the optimizer batch.
    """
    with step.clock.waiting():  # for the slowest process
        run.workers.barrier()
    with step.clock.stage("optimizer"):
        measured = sums.reduced(run.workers)
        norm = run.policy.gradient_norm(step.recipe.optimizer.max_grad_norm)
        step.check(measured, norm)
        run.policy.step()
    run.state.entropy_bonus.update(step.recipe.loss, measured.mean(TRAINED_ENTROPY))
    step.add(measured, norm)


def minibatch(step: Step, groups: Sequence[TrainingGroup], update: int) -> list[TrainingGroup]:
    """Returns this process's groups of one of the step's minibatches."""
    minibatches = step.recipe.update.minibatches
    part = minibatch_of(step.progress.batch.step_stats, minibatches)
    return [g for g in groups if part[g.prompt_index] == update % minibatches]


class OptimizerBatch(NamedTuple):
    """This process's samples of one optimizer step, with the coefficients of its loss."""

    coefficients: Coefficients
    temperature: float  # at which the completions were sampled
    with_gradient: list[WeightedSample]
    entropy_only: list[WeightedSample]  # no gradient; only their entropy is logged
    measures_entropy: bool


def optimizer_batch(
    run: Run, step: Step, groups: Sequence[TrainingGroup], update: int
) -> OptimizerBatch | None:
    """Prepares an optimizer batch, and counts its loss tokens over all processes before backward.

    Returns:
        None if no process has anything to train on.
    """
    loss, temperature = step.recipe.loss, step.recipe.generation.temperature
    samples, tokens = weigh_samples(step.recipe, groups, run.workers)
    if not tokens:
        return None
    if loss.top_entropy < 1 or traits_of(loss_function(loss)).select_tokens is not None:
        number = step.number * step.num_updates + update
        samples, tokens = logprob_passes.select_tokens(run, samples, number, tokens)
    beta, entropy, router = run.state.beta, run.state.entropy_bonus, run.policy.router_coef
    coefficients = Coefficients(beta.value(loss), entropy.value(loss), max(tokens, 1.0), router)
    with_gradient, entropy_only = split_by_gradient(run, step, samples, coefficients)
    run.policy.micro_batches.calibrate(samples or entropy_only, temperature)
    flops = partial(rollout_flops, run.policy.model)
    step.clock.count("forward_backward", lambda: flops(with_gradient, backward=True))
    step.clock.count("forward_backward", lambda: flops(entropy_only))
    if coefficients.router:  # experts are counted over all processes before the first backward
        load = logprob_passes.load_of_experts(run.policy, with_gradient, temperature)
        coefficients = replace(coefficients, load=load)
    return OptimizerBatch(
        coefficients, temperature, with_gradient, entropy_only, step.measures_entropy
    )


def accumulate(policy: Policy, loss: Loss, batch: OptimizerBatch) -> MetricSums:
    """Accumulates this process's gradient of one optimizer batch over micro-batches.

    Returns:
        The measurements of this process.
    """
    compute_loss = partial(micro_batch_loss, policy, loss, batch)

    def forward_backward(micro_batch: list[WeightedSample]) -> MetricSums:
        output = compute_loss(micro_batch)
        policy.backward(output.loss)
        return output.metrics

    sums = MetricSums()
    with torch.no_grad():
        for output in policy.micro_batches.map(compute_loss, batch.entropy_only, policy.logprobs):
            sums.add(output.metrics, only=("entropy", TRAINED_ENTROPY))
    for metrics in policy.micro_batches.map(
        forward_backward, batch.with_gradient, policy.logprobs, undo=policy.zero_grad
    ):
        sums.add(metrics)
    if not batch.with_gradient:  # the optimizer skips a weight whose gradient is None, not one of 0
        zero_gradients(policy.model)
    policy.micro_batches.drop_dummy_gradients(batch.with_gradient)
    return sums


def micro_batch_loss(
    policy: Policy, loss: Loss, batch: OptimizerBatch, micro_batch: list[WeightedSample]
) -> LossOutput:
    """Computes the loss of a micro-batch."""
    coefficients = batch.coefficients
    logprobs, entropies = policy.logprobs(
        micro_batch,
        batch.temperature,
        entropy=batch.measures_entropy,
        entropy_gradient=coefficients.entropy > 0,
    )
    rows = collate(micro_batch, policy.workers.device)
    return grpo_loss(loss, rows, logprobs, entropies, coefficients, policy.logprobs.routing)


def split_by_gradient(
    run: Run, step: Step, samples: Sequence[WeightedSample], coefficients: Coefficients
) -> tuple[list[WeightedSample], list[WeightedSample]]:
    """Splits samples into those with a gradient and those needed only for the entropy metric.

    A sample with neither advantage, KL nor entropy bonus has no gradient. It still counts in the
    divisor of the loss, but its forward pass runs only if its entropy is logged.
    """
    every = every_rollout_has_gradient(
        step.recipe.loss,
        has_reference=run.policy.reference is not None,
        entropy_coef=coefficients.entropy,
        router_coef=coefficients.router,
    )
    with_gradient, without = list[WeightedSample](), list[WeightedSample]()
    for s in samples:
        (with_gradient if every or s.advantages.any() else without).append(s)
    entropy_only = without if step.measures_entropy else []
    if not (with_gradient or entropy_only):  # every process needs the same metrics to reduce
        entropy_only = [run.policy.micro_batches.dummy]
    return with_gradient, entropy_only


def refresh_reference(run: Run, step: Step) -> None:
    """Moves the reference to the policy, or part of the way, every N steps (iterative GRPO)."""
    loss = run.recipe.loss
    due = loss.reference_every > 0 and (step.number + 1) % loss.reference_every == 0
    if run.policy.reference is not None and due:
        run.policy.reference.refresh(run.policy.model, loss.reference_alpha)
