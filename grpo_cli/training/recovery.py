"""Tracks the point from which an interrupted run is resumed, which may be mid-step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_cli import random_streams

if TYPE_CHECKING:
    from grpo_cli.training.run import Run
    from grpo_cli.training.step_progress import StepProgress


class Recovery:
    """Stores the last point at which everything was complete.

    Such a point is a complete step, a step whose rollouts are scored, or an optimizer step. A
    resumed run continues there with the same random streams, so that it is bit-identical.
    """

    def __init__(self) -> None:
        self.progress: StepProgress | None = None  # the present step's, once it is scored
        self.unreported: dict[str, float] | None = None  # metrics of a step before its evaluation
        self.random_streams: dict[str, Any] | None = None  # at the last complete point
        self.saved_step = -1  # newest checkpoint since the run was started or resumed
        self.interrupted: Path | None = None  # the checkpoint of an interrupted step
        self._before: tuple[Any, ...] = ()  # the queue before the step's rollouts were sampled

    def mark(self) -> None:
        """Makes the present state the point to resume from."""
        self.random_streams = random_streams.rng_state()

    def begin_step(self, run: Run) -> None:
        """Takes the snapshot that `rollback` restores if the rollouts cannot be completed."""
        self._before = run.queue.snapshot()
        self.mark()

    def end_step(self) -> None:
        """Forgets the present step, which is complete."""
        self.progress, self._before = None, ()
        self.mark()

    def rollback(self, run: Run) -> None:
        """Restores the last complete point."""
        run.policy.zero_grad()
        if self.progress is None and self._before:
            run.queue.rollback(self._before)
