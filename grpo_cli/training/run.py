"""The live objects of a run, and its state: what a checkpoint stores besides weights.

Also an incomplete step, and the last point from which an interrupted run is resumed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from grpo_cli import random_streams
from grpo_cli.algorithm.loss import AdaptiveBeta, AdaptiveEntropyBonus
from grpo_cli.algorithm.metric_sums import ReducedMetrics
from grpo_cli.checkpoints.checkpointer import Checkpointer
from grpo_cli.checkpoints.lock import Lock
from grpo_cli.config.recipe import Recipe
from grpo_cli.data.prompts import PromptStream
from grpo_cli.distributed.stop_signal import Interrupts
from grpo_cli.distributed.workers import Workers
from grpo_cli.environments.sessions import Sessions
from grpo_cli.generation.base import Generator
from grpo_cli.models.policy import Policy
from grpo_cli.records import EpisodeStats, Group, RolloutStats, StepStats
from grpo_cli.reporting.hub import Pusher
from grpo_cli.reporting.reporter import Reporter
from grpo_cli.scoring.bound_reward import TrainerState
from grpo_cli.scoring.scorer import Scorer
from grpo_cli.training.callbacks import Callbacks
from grpo_cli.training.rollouts.credit import ZERO_ADVANTAGE
from grpo_cli.training.rollouts.queue import RolloutQueue
from grpo_cli.training.rollouts.stored_groups import from_entries, to_entries

KL_STEPS = 5  # measurements in a row above stop.max_kl: the KL of one batch is noisy


class Reason(NamedTuple):
    """Why a run ended before its last step."""

    rule: str  # a key of the recipe
    sentence: str


@dataclass
class State:
    """The progress of a run; a checkpoint stores it together with weights and optimizer.

    It is the same on every process, except the times. Of the rules of `stop` it holds the counts,
    and not what they led to: a resumed run judges them by its own limits.
    """

    step: int = 0  # completed steps
    num_tokens: float = 0  # prompt and completion tokens, over all processes
    seconds: float = 0  # over all starts of the run, up to `since`
    since: float = field(default_factory=time.monotonic)
    before: dict[str, float] | None = None  # metrics of the evaluation before the first step
    after: dict[str, float] | None = None  # metrics of the newest evaluation
    after_step: int = 0  # the step of the newest evaluation
    best_step: int | None = None  # the step of the best evaluation
    best_value: float = -math.inf  # the best value of the metric `eval.best`
    worse: int = 0  # evaluations in a row since the best one
    no_gradient: int = 0  # steps in a row in which no completion had an advantage
    hours: float = 0.0  # up to the last step, if there is a limit
    high_kl: int = 0  # measurements in a row at or above stop.max_kl
    stop_reason: str | None = None  # why the run ends before its last step, as a callback says
    beta: AdaptiveBeta = field(default_factory=AdaptiveBeta)
    entropy_bonus: AdaptiveEntropyBonus = field(default_factory=AdaptiveEntropyBonus)
    log_history: list[dict[str, Any]] | None = None  # as logged; None if no reward reads it

    def follow_step(self, recipe: Recipe, metrics: Mapping[str, float], workers: Workers) -> None:
        """Updates the counts of the stop rules with a complete step, before its evaluation."""
        if recipe.stop.hours is not None:  # each process measures, and the longest time counts
            self.hours = workers.max(self.total_seconds) / 3600
        if ZERO_ADVANTAGE in metrics:
            self.no_gradient = self.no_gradient + 1 if metrics[ZERO_ADVANTAGE] == 1 else 0
        kl, limit = metrics.get("kl", math.nan), recipe.stop.max_kl
        if limit is not None and not math.isnan(kl):
            self.high_kl = self.high_kl + 1 if kl >= limit else 0

    @property
    def total_seconds(self) -> float:
        """Seconds of training, evaluating and saving, over all starts of the run."""
        return self.seconds + time.monotonic() - self.since

    def stopped_by(self, recipe: Recipe) -> Reason | None:
        """Returns the rule that has ended the run before its last step; docs/alarms.md lists all.

        None if there is no such rule, or if the last step is complete.
        """
        stop, patience, best = recipe.stop, recipe.eval.patience, f"eval/{recipe.eval.best}"
        at_best = f"{self.best_value:.3f} at step {self.best_step}"
        if self.step >= recipe.steps:
            return None
        if 0 < patience <= self.worse:
            why = f"no better {best} than {at_best} in {self.worse} evaluations"
            return Reason("eval.patience", f"{why} (eval.patience = {patience})")
        if stop.accuracy is not None and self.best_value >= stop.accuracy:
            why = f"{best} is {at_best} (stop.accuracy = {stop.accuracy:g})"
            return Reason("stop.accuracy", why)
        if self.stop_reason is not None:
            rule, _, why = self.stop_reason.partition(": ")
            return Reason(rule, f"{why} ({rule})")
        if 0 < stop.zero_gradient <= self.no_gradient:
            why = f"no completion had an advantage in the last {stop.zero_gradient} steps"
            rule = "stop.zero_gradient"
            return Reason(rule, f"{why} ({rule} = {stop.zero_gradient})")
        if stop.hours is not None and self.hours >= stop.hours:
            why = f"{self.hours:.3g} hours are spent (stop.hours = {stop.hours:g})"
            return Reason("stop.hours", why)
        if stop.max_kl is not None and self.high_kl >= KL_STEPS:
            why = f"the KL to the reference was too high in {KL_STEPS} measurements in a row"
            return Reason("stop.max_kl", f"{why} (stop.max_kl = {stop.max_kl:g})")
        return None


@dataclass
class StepBatch:
    """The groups of a step, with the statistics of all processes."""

    groups: list[Group]  # this process's
    step_stats: StepStats  # of every process's groups
    sampled: StepStats  # of all groups sampled in this step, dropped ones included
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class StepProgress:
    """A step that is not complete: its batch, and the updates that are done.

    A run that is stopped mid-step stores its progress and is resumed there.
    """

    batch: StepBatch
    totals: list[ReducedMetrics] = field(default_factory=list)  # by optimizer step
    norms: list[float] = field(default_factory=list)  # gradient norm by optimizer step
    updates: int = 0  # optimizer steps done, including those with nothing to train on
    coefficients: dict[str, float] = field(default_factory=dict)  # at the first optimizer step

    def shared(self) -> dict[str, Any]:
        """Returns the part that is the same on every process, as plain values."""
        done = self.batch
        return {
            "whole_step": _plain(done.step_stats),
            "sampled": _plain(done.sampled),
            "metrics": done.metrics,
            "totals": [{"metrics": asdict(t)} for t in self.totals],
            "norms": self.norms,
            "updates": self.updates,
            "coefficients": self.coefficients,
        }

    def own(self, fingerprint: str) -> list[dict[str, Any]]:
        """Returns this process's groups as plain values and tensors."""
        return to_entries(self.batch.groups, fingerprint)

    @classmethod
    def restored(
        cls,
        shared: Mapping[str, Any],
        own: Sequence[dict[str, Any]],
        stream: PromptStream,
        fingerprint: str,
    ) -> StepProgress | None:
        """Restores a stored progress; None if the recipe has another fingerprint now."""
        groups = from_entries(own, stream, fingerprint)
        if len(groups) < len(own):
            return None
        stats = (_restored(shared["whole_step"]), _restored(shared["sampled"]))
        batch = StepBatch(groups, *stats, shared["metrics"])
        totals = [ReducedMetrics(**t["metrics"]) for t in shared["totals"]]
        norms, updates = shared["norms"], shared["updates"]
        return cls(batch, totals, norms, updates, shared["coefficients"])


def _plain(step_stats: StepStats) -> list[tuple[int, list[dict[str, Any]]]]:
    return [
        (p, [{**o._asdict(), "episode": o.episode and o.episode._asdict()} for o in group])
        for p, group in step_stats.items()
    ]


def _restored(saved: Sequence[tuple[int, list[dict[str, Any]]]]) -> StepStats:
    def stats(values: Mapping[str, Any]) -> RolloutStats:
        episode = values["episode"]
        return RolloutStats(**{**values, "episode": episode and EpisodeStats(**episode)})

    return {p: [stats(o) for o in group] for p, group in saved}


@dataclass
class Recovery:
    """Tracks the point from which an interrupted run is resumed, which may be mid-step.

    It is the last point at which everything was complete: a complete step, a step whose rollouts
    are scored, or an optimizer step. A resumed run continues there with the same random streams, so
    that it is bit-identical.
    """

    progress: StepProgress | None = None  # the current step's, once it is scored
    unreported: dict[str, float] | None = None  # metrics of a step before its evaluation
    random_streams: dict[str, Any] | None = None  # at the last complete point
    saved_step: int = -1  # newest checkpoint since the run was started or resumed
    interrupted: Path | None = None  # the checkpoint of an interrupted step
    _before: tuple[Any, ...] = ()  # the queue before the step's rollouts were sampled

    def mark(self) -> None:
        """Makes the current state the point to resume from."""
        self.random_streams = random_streams.rng_state()

    def begin_step(self, queue: RolloutQueue) -> None:
        """Takes the snapshot that `rollback` restores if the rollouts cannot be completed."""
        self._before = queue.snapshot()
        self.mark()

    def end_step(self, metrics: dict[str, float]) -> None:
        """Forgets the current step, which is complete except for its evaluation."""
        self.progress, self._before, self.unreported = None, (), metrics
        self.mark()

    def rollback(self, run: Run) -> None:
        """Restores the last complete point."""
        run.policy.zero_grad()
        if self.progress is None and self._before:
            run.queue.rollback(self._before)


@dataclass
class Run:
    """The live objects of a run, by the names that the loop uses."""

    recipe: Recipe
    folder: Path
    lock: Lock | None  # on the folder; the main process holds it
    workers: Workers
    interrupts: Interrupts
    policy: Policy
    generator: Generator
    queue: RolloutQueue
    scorer: Scorer
    reporter: Reporter
    checkpointer: Checkpointer
    pusher: Pusher
    sessions: Sessions | None = None  # opens the environments of rollouts
    state: State = field(default_factory=State)
    recovery: Recovery = field(default_factory=Recovery)
    callbacks: Callbacks = field(default_factory=Callbacks)

    @property
    def is_over(self) -> bool:
        """Whether the last step is complete, or a rule has ended the run before it."""
        return self.state.step >= self.recipe.steps or self.stopped_by is not None

    @property
    def stopped_by(self) -> Reason | None:
        """The rule that has ended the run before its last step, if one has."""
        return self.state.stopped_by(self.recipe)

    def trainer_state(self) -> TrainerState:
        """Returns the progress of the run for reward functions that take `trainer_state`."""
        state = self.state
        return TrainerState(
            global_step=state.step,
            max_steps=self.recipe.steps,
            epoch=self.queue.epoch,
            num_input_tokens_seen=int(state.num_tokens),
            best_metric=None if state.best_step is None else state.best_value,
            best_global_step=state.best_step,
            log_history=list(state.log_history or ()),
        )

    @property
    def should_save(self) -> bool:
        """Whether to save after the current step: on schedule, at the end, or at a new best."""
        every, step = self.recipe.checkpoint.every, self.state.step
        return self.is_over or (every > 0 and (step % every == 0 or step == self.state.best_step))

    def check_folder(self) -> None:
        """Raises a TrainingError if the run's folder was renamed or removed meanwhile."""
        if self.lock is not None:
            self.lock.check_folder()

    def should_stop(self) -> bool:
        """Whether the run is asked to stop before its last step; the same on every process."""
        return self.interrupts.find_signal() is not None and not self.is_over

    def close(self, error: BaseException | None = None) -> None:
        """Releases the run's resources, also after a failure.

        Args:
            error: the error that ended the run; None without one.
        """
        if error is not None:
            self.reporter.status.end_with(error)
        else:
            is_complete = self.is_over and self.recovery.interrupted is None
            self.reporter.status.end("ended" if is_complete else "stopped")
        self.interrupts.stop.release()
        self.pusher.close()
        self.reporter.close()
        self.callbacks.close()
        self.generator.close()
        self.scorer.executor.close()
        if self.sessions is not None:
            self.sessions.close()
        if self.lock is not None:
            self.lock.release()
