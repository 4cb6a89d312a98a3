"""Keeps an incomplete step, and the last point from which an interrupted run is resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_cli import random_streams
from grpo_cli.algorithm.metric_sums import ReducedMetrics
from grpo_cli.data.prompts import PromptStream
from grpo_cli.records import EpisodeStats, Group, RolloutStats, StepStats
from grpo_cli.training.rollouts.queue import RolloutQueue
from grpo_cli.training.rollouts.stored_groups import from_entries, to_entries

if TYPE_CHECKING:
    from grpo_cli.training.run import Run


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
