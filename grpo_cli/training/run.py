"""The live objects of a run, and its state."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_cli.algorithm.controllers import AdaptiveBeta, AdaptiveEntropyBonus
from grpo_cli.checkpoints.checkpointer import Checkpointer
from grpo_cli.checkpoints.lock import Lock
from grpo_cli.config.recipe import Recipe
from grpo_cli.distributed.interrupts import Interrupts
from grpo_cli.distributed.workers import Workers
from grpo_cli.environments.sessions import Sessions
from grpo_cli.evaluation.evaluator import Evaluator
from grpo_cli.generation.base import Generator
from grpo_cli.models.policy import Policy
from grpo_cli.reporting.hub import Pusher
from grpo_cli.reporting.reporter import Reporter, readable
from grpo_cli.scoring.registry import TrainerState
from grpo_cli.scoring.scorer import Scorer
from grpo_cli.training.callbacks import Callbacks
from grpo_cli.training.contents import Contents
from grpo_cli.training.plan import PlanRecord
from grpo_cli.training.recovery import Recovery
from grpo_cli.training.rollouts.queue import RolloutQueue
from grpo_cli.training.settings import Stop
from grpo_cli.training.stop_rules import Reason, StopRules


@dataclass
class State:
    """The progress of a run; a checkpoint stores it together with weights and optimizer."""

    step: int = 0  # completed steps
    num_tokens: float = 0  # prompt and completion tokens, over all processes
    seconds: float = 0  # over all starts of the run
    before: dict[str, float] | None = None  # metrics of the evaluation before the first step
    after: dict[str, float] | None = None  # metrics of the newest evaluation
    after_step: int = 0  # the step of the newest evaluation
    best_step: int | None = None  # the step of the best evaluation
    best_value: float = -math.inf  # the best value of the metric `eval.best`
    worse: int = 0  # evaluations in a row since the best one
    stop_reason: str | None = None  # why the run ends before its last step, as a callback says
    tracker_ids: dict[str, str] = field(default_factory=dict)  # the run's id by tracker


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
    evaluator: Evaluator | None
    reporter: Reporter
    checkpointer: Checkpointer
    pusher: Pusher
    state: State = field(default_factory=State)
    recovery: Recovery = field(default_factory=Recovery)
    beta: AdaptiveBeta = field(default_factory=AdaptiveBeta)
    entropy_bonus: AdaptiveEntropyBonus = field(default_factory=AdaptiveEntropyBonus)
    stop_rules: StopRules = field(default_factory=lambda: StopRules(Stop()))
    log_history: list[dict[str, Any]] | None = None  # as logged; None if no reward reads it
    sessions: Sessions | None = None  # opens the environments of rollouts
    callbacks: Callbacks = field(default_factory=Callbacks)
    contents: Contents = field(default_factory=dict)  # hashes of files read; main process only
    plan: PlanRecord | None = None  # memory and time; main process only
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds of training, evaluating and saving, over all starts of the run."""
        return self.state.seconds + time.monotonic() - self.started

    @property
    def is_over(self) -> bool:
        """Whether the last step is complete, or a rule has ended the run before it."""
        return self.state.step >= self.recipe.steps or self.stopped_by is not None

    @property
    def stopped_by(self) -> Reason | None:
        """The rule that has ended the run before its last step, if one has."""
        state, patience = self.state, self.recipe.eval.patience
        if state.step >= self.recipe.steps:
            return None
        if 0 < patience <= state.worse:
            return Reason(
                "eval.patience",
                f"no better eval/{self.recipe.eval.best} than {state.best_value:.3f} at step "
                f"{state.best_step} in {state.worse} evaluations (eval.patience = {patience})",
            )
        wanted = self.recipe.stop.accuracy
        if wanted is not None and state.best_value >= wanted:
            return Reason(
                "stop.accuracy",
                f"eval/{self.recipe.eval.best} is {state.best_value:.3f} at step "
                f"{state.best_step} (stop.accuracy = {wanted:g})",
            )
        if state.stop_reason is not None:
            rule, _, why = state.stop_reason.partition(": ")
            return Reason(rule, f"{why} ({rule})")
        return self.stop_rules.reason

    def evaluated_before(self) -> dict[str, Any] | None:
        """Returns the metrics of the evaluation before the first step, for status.json."""
        return readable(self.state.before) if self.state.before else None

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
            log_history=list(self.log_history or ()),
        )

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
        self.generator.close()
        self.scorer.executor.close()
        if self.sessions is not None:
            self.sessions.close()
        if self.lock is not None:
            self.lock.release()
