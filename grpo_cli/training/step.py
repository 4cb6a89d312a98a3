"""One training step, with everything that makes it resumable."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from grpo_cli.algorithm.loss import SAMPLER_GAP, STALENESS, logged
from grpo_cli.algorithm.metric_sums import ReducedMetrics
from grpo_cli.checkpoints import paths
from grpo_cli.config.recipe import Recipe
from grpo_cli.data.prompts import MixtureStream
from grpo_cli.data.stored_completions import rows_of_all
from grpo_cli.distributed import heartbeat
from grpo_cli.errors import TrainingError, listed
from grpo_cli.generation.settings import Generation
from grpo_cli.models.settings import Optimizer
from grpo_cli.reporting.reporter import metrics_line
from grpo_cli.reporting.rollout_metrics import mixture_metrics, rollout_metrics
from grpo_cli.reporting.stage_clock import Clock, possible_stages
from grpo_cli.training.run import Run, StepBatch, StepProgress

ENTROPY_EVERY = 10  # steps; the metric costs a softmax over the vocabulary
DECAY_SHARE = 0.1  # of a run's steps, at its end, in wsd (MiniCPM, arXiv 2404.06395, section 4)


@dataclass
class Step:
    """One step, from prompts to new weights. A resumed step skips what it has done before."""

    run: Run
    number: int  # counted from 0
    clock: Clock
    metrics: dict[str, float] = field(default_factory=dict)  # logged once, when the step is done
    batch: StepBatch | None = None  # its rollouts, once they are scored
    is_complete: bool = False

    @property
    def recipe(self) -> Recipe:
        """The run's recipe."""
        return self.run.recipe

    @property
    def num_updates(self) -> int:
        """Optimizer steps on the step's rollouts."""
        return self.recipe.update.num_iterations * self.recipe.update.minibatches

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether the loss has an entropy bonus."""
        return self.recipe.loss.entropy_coef > 0 or self.recipe.loss.entropy_target is not None

    @property
    def measures_entropy(self) -> bool:
        """Whether the entropy is measured at this step, which costs a softmax."""
        is_logged = self.number == 0 or (self.number + 1) % ENTROPY_EVERY == 0
        return self.has_entropy_bonus or is_logged

    @property
    def progress(self) -> StepProgress:
        """The progress of the step's updates."""
        assert self.run.recovery.progress is not None, "there are no rollouts yet"
        return self.run.recovery.progress

    def keep(self, batch: StepBatch) -> StepBatch:
        """Keeps the step's rollouts: an interrupted step continues with them."""
        self.batch, self.run.recovery.progress = batch, StepProgress(batch)
        self.run.recovery.mark()
        return batch

    def updates(self) -> Iterator[int]:
        """Yields the number of each optimizer step that is still to be taken."""
        progress = self.progress
        while progress.updates < self.num_updates:
            yield progress.updates
            progress.updates += 1
            self.run.recovery.mark()

    def check(self, measured: ReducedMetrics, norm: float) -> None:
        """Checks loss, gradient norm and sampler mismatch before the optimizer step.

        With mixed_precision=fp16 a norm that is not finite is no error while the loss is scaled:
        the scaler skips the optimizer step and halves the scale.

        Args:
            norm: the norm of the gradient.

        Raises:
            TrainingError: the loss or the norm is not finite, or the sampler's policy was too
                different from the trainer's (generation.max_logp_difference).
        """
        is_scaled = self.run.policy.scaler.get_scale() > 1  # 1 if the scaler is disabled
        loss = measured.sums["loss"]
        if not (math.isfinite(loss) and (math.isfinite(norm) or is_scaled)):
            cause = ""
            if self.run.policy.scaler.is_enabled() and math.isfinite(loss):
                cause = (
                    " Gradients overflow float16 with a loss scale of 1 too: use "
                    "mixed_precision=bf16 or mixed_precision=no."
                )
            folder = self.run.folder
            saved = paths.steps_saved(folder)
            last = paths.shown(paths.checkpoint_path(folder, saved[-1])) if saved else "none"
            rate = self.recipe.optimizer.learning_rate
            raise TrainingError(
                f"step {self.number + 1}: the loss is {loss:g} and the gradient norm "
                f"{norm:g}, with optimizer.learning_rate = {rate:g}; stopped before the optimizer "
                f"step. The last checkpoint is {last}.{cause}"
            )
        # The old log-probabilities of prefetched rollouts are the sampler's own: compare the
        # current ones with these.
        prefetched = self.run.queue.prefetch_steps > 0
        gap = measured.mean(STALENESS if prefetched else SAMPLER_GAP)
        check_sampler(self.recipe.generation, gap, self.number)

    def add(self, measured: ReducedMetrics, norm: float) -> None:
        """Keeps the measurements of an optimizer step and the norm of its gradient."""
        self.progress.totals.append(measured)
        self.progress.norms.append(norm)

    @property
    def measured_kl(self) -> float:
        """The mean KL over the tokens of all optimizer steps; NaN if none was measured."""
        return ReducedMetrics.of(self.progress.totals).mean("kl")

    def update_metrics(self) -> dict[str, float]:
        """Returns the metrics over all optimizer steps, with the coefficients that were used."""
        run, loss, done = self.run, self.recipe.loss, self.progress.totals
        if not done:
            return {}
        metrics = ReducedMetrics.of(done).figures
        summed = {"loss", "policy_loss", "aux_loss"} & set(metrics)
        averages = {name: metrics[name] / len(done) for name in summed}
        norms = [norm for norm in self.progress.norms if math.isfinite(norm)]
        averages["grad_norm"] = sum(norms) / len(norms) if norms else math.nan
        if run.policy.scaler.is_enabled():
            averages["loss_scale"] = run.policy.scaler.get_scale()
            averages["skipped_updates"] = float(len(done) - len(norms))
        if not run.queue.prefetch_steps:
            del metrics[STALENESS]
        coefficients = dict(self.progress.coefficients)
        if loss.kl_target is not None and math.isfinite(self.measured_kl):
            coefficients["beta"] = run.state.beta.value(loss)
        return logged(loss, metrics | averages) | coefficients

    def finish(self) -> None:
        """Completes the metrics and advances the run; only evaluation and logging are left."""
        run, batch = self.run, self.progress.batch
        self.metrics |= batch.metrics | rollout_metrics(batch.sampled)
        if self.recipe.dataset.mixture:
            stream = cast(MixtureStream, run.queue.stream)
            names = {p: stream.name_of[group[0].row] for p, group in batch.sampled.items()}
            self.metrics |= mixture_metrics(batch.sampled, names)
        self.metrics |= self.clock.metrics(batch.sampled)
        run.state.step += 1
        run.state.num_tokens += sum(
            o.prompt_tokens + o.tokens for group in batch.sampled.values() for o in group
        )
        self.metrics |= {"num_tokens": run.state.num_tokens, "epoch": run.queue.epoch}
        run.state.follow_step(run.recipe, self.metrics, run.workers)
        run.recovery.end_step(self.metrics)
        self.is_complete = True

    def log(self) -> None:
        """Logs completions and metrics, once; callbacks may add metrics of an evaluation."""
        run, number = self.run, self.number + 1
        groups = self.batch.groups if self.batch else []
        run.check_folder()
        rows: list[dict[str, Any]] = []
        if run.reporter.keeps_completions(number):  # stored before an evaluation interrupts
            rows = rows_of_all(run.workers, number, groups, run.queue.stream)
            run.reporter.completions(number, rows)
        run.callbacks.step(run, self.metrics, groups)
        run.reporter.step(number, self.metrics)
        if run.state.log_history is not None:  # times differ by process: all keep the main one's
            line = metrics_line(number, self.metrics)
            run.state.log_history.append(run.workers.gather(line)[0])
        run.callbacks.call(run, "on_log", completions=rows)
        run.recovery.unreported = None
        run.recovery.mark()  # rewards may draw random numbers in an evaluation too


def steps(run: Run) -> Iterator[Step]:
    """Yields the steps of a run; first a complete one whose evaluation was interrupted."""
    if run.recovery.unreported is not None:
        metrics = run.recovery.unreported
        clock = make_clock(run)
        yield Step(run, run.state.step - 1, clock, metrics, is_complete=True)
    while not run.is_over:
        yield begin(run)


def begin(run: Run) -> Step:
    """Begins the run's next step, or resumes an interrupted one."""
    clock = make_clock(run)
    heartbeat.at("generate", run.state.step + 1)
    run.interrupts.begin_step()
    run.recovery.begin_step(run.queue)
    progress = run.recovery.progress
    batch = progress.batch if progress else None
    return Step(run, run.state.step, clock, batch=batch)


def make_clock(run: Run) -> Clock:
    """Returns the clock of a new step."""
    stages = possible_stages(run.recipe, run.policy.reference is not None, run.workers.size)
    return Clock(run.workers.device, stages, run.policy.peak_flops, meter=run.reporter.meter)


def check_sampler(config: Generation, gap: float, step: int) -> None:
    """Raises a TrainingError if the sampler's policy was too different from the trainer's.

    Args:
        config: the step's generation settings, with `max_logp_difference`.
        gap: mean absolute difference between their log-probabilities.
        step: counted from 0.
    """
    limit = config.max_logp_difference
    if limit is not None and gap > limit:
        cause = (
            f" {listed(config.changed_by)} (of generation) change what is sampled and not what is "
            "trained: set generation.max_logp_difference to null, or these back."
            if config.changed_by
            else ""
        )
        raise TrainingError(
            f"step {step + 1}: the sampler's log-probabilities differ from the trainer's by "
            f"{gap:.3g} in the mean, more than generation.max_logp_difference = {limit:g}; "
            f"stopped before the optimizer step.{cause}"
        )


def learning_rate(config: Optimizer, step: int, steps: int) -> float:
    """Returns a step's learning rate: linear warm-up, then the schedule.

    Args:
        step: counted from 0. steps: the run's number of steps.
    """
    begin = config.warmup_steps
    if step < begin:
        return config.learning_rate * (step + 1) / begin
    if config.schedule == "wsd":
        begin = max(begin, steps - math.ceil(DECAY_SHARE * steps))
    if config.schedule == "constant" or step < begin:
        return config.learning_rate
    done = (step - begin) / max(1, steps - begin)  # in [0, 1)
    left = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1 - done
    last = config.min_learning_rate
    return last + (config.learning_rate - last) * left
