"""GRPO (DeepSeekMath, arXiv 2402.03300): the loop and the optimizer step, to be read in order.

Sample G completions for each of P prompts, score them, take each reward relative to its group as
the advantage, and ascend a clipped surrogate, less β times a KL to a frozen reference. No critic.

    objective       −min(ρA, clip(ρ, 1−ε, 1+ε_high)A) + β·k3(π ‖ π_ref), on each completion token
    normalisation   one sum over the whole optimizer batch and all processes, divided by one count
                    that is taken before the first backward: micro-batches and ranks change nothing
    on-policy       with one update a step, old_logprobs are the current ones and ρ = 1 in value
    off-policy      with num_iterations · minibatches > 1, they are computed before the first update

    grpo train recipe=gsm8k_tiny
    torchrun --nproc-per-node 8 --no-python grpo train recipe=math_qwen
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from grpo_cli import losses, policy
from grpo_cli.advantages import group_relative
from grpo_cli.errors import TrainingError
from grpo_cli.generation import sample
from grpo_cli.metrics import Clock, WholeStep, add, outcomes, reward_matrix, rollout_metrics
from grpo_cli.rollouts import Batch, Group, Rollout, collate, micro_batches, placeholder
from grpo_cli.run import Run
from grpo_cli.schedules import learning_rate


def train(run: Run) -> None:
    """Runs the recipe from where `run` stands to its last step, or until it is told to stop."""
    recipe, workers = run.recipe, run.workers
    if run.state.step == 0 and run.evaluation_is_due(0):
        run.evaluate(step=0)
    for step in range(run.state.step, recipe.steps):
        clock = Clock(workers.device)
        with clock.stage("generate"):
            groups = sample(
                run.generator,
                run.tokenizer,
                run.prompts(step),
                recipe.generation.num_generations,
                run.sampling,
                recipe.seed,
            )
        rollouts = [r for g in groups for r in g.rollouts]
        with clock.stage("reward"), workers.together():
            run.scorer.score(rollouts)
        whole_step = {p: o for part in workers.gather(outcomes(groups)) for p, o in part}
        assign_advantages(groups, whole_step, recipe.advantage.scale)

        if recipe.update.num_iterations * recipe.update.minibatches > 1:
            with clock.stage("old_logprobs"):
                for r, logprobs in logprobs_of(run.policy, rollouts, run):
                    r.old_logprobs = logprobs
        if run.reference is not None:
            with clock.stage("ref_logprobs"):
                for r, logprobs in logprobs_of(run.reference, rollouts, run):
                    r.ref_logprobs = logprobs
        with clock.stage("update"):
            metrics = update(run, groups, step)
        with clock.stage("weights"):
            run.generator.update_weights(run.policy)

        metrics |= rollout_metrics(whole_step) | clock.metrics(whole_step)
        metrics |= run.advance(whole_step)
        if run.evaluation_is_due(step + 1):
            metrics |= run.evaluate(step + 1)
        run.reporter.step(step + 1, metrics, groups)
        stopping = run.stop_requested() and step + 1 < recipe.steps
        if stopping or run.checkpoint_is_due(step + 1):
            run.save()
        if stopping:
            return
    run.finish()


def assign_advantages(groups: Sequence[Group], whole_step: WholeStep, scale: str) -> None:
    """Computes the advantages of the whole step; each process takes those of its own groups."""
    advantages = group_relative(reward_matrix(whole_step), scale=scale)  # [P, G]
    rows = dict(zip(sorted(whole_step), advantages.tolist(), strict=True))
    for g in groups:
        for r, advantage in zip(g.rollouts, rows[g.position], strict=True):
            r.advantage = advantage


def logprobs_of(
    model: nn.Module, rollouts: Sequence[Rollout], run: Run
) -> Iterator[tuple[Rollout, Tensor]]:
    """(rollout, log-probabilities of its completion tokens under `model`, [C]), no gradient."""
    with policy.inference(model):
        for micro in micro_batches(rollouts, run.recipe.update.tokens_per_micro_batch):
            batch = collate(micro, run.workers.device)
            logprobs, _ = policy.score(model, batch, run.recipe.generation.temperature)
            for r, row in zip(micro, logprobs.cpu(), strict=True):
                yield r, row[: len(r.completion.ids)]


def update(run: Run, groups: Sequence[Group], step: int) -> dict[str, float]:
    """Every optimizer step on one batch of rollouts; returns the metrics of the update.

    Raises:
        TrainingError: a loss or a gradient is not finite; its optimizer step was not taken.
    """
    recipe, workers = run.recipe, run.workers
    rate = learning_rate(recipe.optimizer, step, recipe.steps)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    totals: dict[str, float] = {}
    norms: list[float] = []
    worst = 0.0  # largest |old − sampling| log-probability
    for _ in range(recipe.update.num_iterations):
        for own in minibatches(groups, recipe.prompts_per_step, recipe.update.minibatches):
            trained = [r.loss_tokens for r in own if r.loss_tokens]
            counts = workers.sum({"tokens": sum(trained), "completions": len(trained)})
            sums: dict[str, float] = {}
            budget = recipe.update.tokens_per_micro_batch
            # Without advantage and KL a rollout has no gradient: it is measured and counted only.
            silent = [r for r in own if r.advantage == 0 and not recipe.loss.beta]
            with torch.no_grad():
                for micro in micro_batches(silent, budget):
                    batch = collate(micro, workers.device)
                    _, parts, difference = objective(run, run.policy, batch, counts)
                    add(sums, parts)
                    worst = max(worst, difference)
            speaking = [r for r in own if r.advantage != 0 or recipe.loss.beta]
            # A process with nothing to train on still takes part in the sum of gradients.
            micros = list(micro_batches(speaking, budget)) or [[placeholder()]]
            for i, micro in enumerate(micros, start=1):
                batch = collate(micro, workers.device)
                with workers.accumulate(run.model, last=i == len(micros)):
                    loss, parts, difference = objective(run, run.model, batch, counts)
                    workers.backward(loss)
                add(sums, parts)
                worst = max(worst, difference)
            sums = workers.sum(sums)
            norm = nn.utils.clip_grad_norm_(
                run.policy.parameters(), recipe.optimizer.max_grad_norm
            ).item()
            if not (math.isfinite(sums["loss"]) and math.isfinite(norm)):
                raise TrainingError(
                    f"step {step + 1}: the loss is {sums['loss']:g} and the gradient norm "
                    f"{norm:g}; stopped before the optimizer step."
                )
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=True)
            add(totals, sums)
            norms.append(norm)
    tokens = max(totals.pop("tokens"), 1.0)
    return {
        "loss": totals.pop("loss") / len(norms),
        "grad_norm": sum(norms) / len(norms),
        "learning_rate": rate,
        **{name: value / tokens for name, value in totals.items()},
        "sampling/sampling_logp_difference/max": workers.max(worst),
    }


def minibatches(
    groups: Sequence[Group], prompts_per_step: int, number: int
) -> Iterator[list[Rollout]]:
    """This process's rollouts of each of the step's minibatches.

    A minibatch is a stretch of the step's positions, so that what is trained on together does not
    depend on the number of processes.
    """
    for m in range(number):
        yield [
            r
            for g in groups
            if g.position % prompts_per_step * number // prompts_per_step == m
            for r in g.rollouts
        ]


def objective(
    run: Run, model: nn.Module, batch: Batch, counts: dict[str, float]
) -> tuple[Tensor, dict[str, float], float]:
    """One micro-batch's part of the loss.

    Args:
        model: the policy, wrapped for several processes where a backward follows.
        counts: tokens and completions that train, over the optimizer batch and all processes.

    Returns:
        (loss, its metrics as sums over tokens, the largest |old − sampling| log-probability).
    """
    config, mask = run.recipe.loss, batch.loss_mask  # mask: [B, C]
    logprobs, entropy = policy.score(
        model, batch, run.recipe.generation.temperature, entropy=True
    )  # [B, C]
    assert entropy is not None
    logprobs = batch.masked(logprobs)
    old = batch.old_logprobs
    old_logprobs = logprobs.detach() if old is None else batch.masked(old)
    clip = (config.epsilon, config.epsilon_high)
    per_token = losses.POLICY[config.policy](logprobs, old_logprobs, batch.advantages, *clip)
    measured = {"entropy": batch.masked(entropy)}
    if config.beta:
        assert batch.ref_logprobs is not None, "computed for every rollout before the update"
        kl = losses.k3(logprobs, batch.masked(batch.ref_logprobs))
        per_token = per_token + config.beta * kl
        measured["kl"] = kl.detach()
    loss = (per_token * losses.token_weights(mask, config.normalize, counts)).sum()

    low, high = losses.clip_flags(logprobs.detach(), old_logprobs, batch.advantages, *clip)
    difference = (old_logprobs - batch.masked(batch.sampling_logprobs)).abs()
    measured |= {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low | high,
        "sampling/sampling_logp_difference/mean": difference,
    }
    sums = {name: torch.sum(value * mask).item() for name, value in measured.items()}
    sums |= {"loss": loss.item(), "tokens": mask.sum().item()}
    return loss, sums, difference.max().item()
