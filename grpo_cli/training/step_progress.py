"""The progress of a step: its batch, and the updates that are done.

A run that is stopped mid-step stores its progress and is resumed there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_cli.algorithm.loss import MeasuredUpdate
from grpo_cli.data import PromptStream
from grpo_cli.records import EpisodeStats, Group, RolloutStats, StepStats
from grpo_cli.training.rollouts.stored_groups import from_entries, to_entries


@dataclass
class StepBatch:
    """The groups of a step, with the outcomes of all processes."""

    groups: list[Group]  # this process's
    step_stats: StepStats  # outcomes of every process's groups
    sampled: StepStats  # outcomes of all groups sampled in this step, dropped ones included
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class StepProgress:
    """The state of a step that is not complete."""

    collected: StepBatch
    totals: list[MeasuredUpdate] = field(default_factory=list)  # by optimizer step
    norms: list[float] = field(default_factory=list)  # gradient norm by optimizer step
    updates: int = 0  # optimizer steps done, including those with nothing to train on
    coefficients: dict[str, float] = field(default_factory=dict)  # at the first optimizer step

    def shared(self) -> dict[str, Any]:
        """Returns the part that is the same on every process, as plain values."""
        done = self.collected
        return {
            "whole_step": _plain(done.step_stats),
            "sampled": _plain(done.sampled),
            "metrics": done.metrics,
            "totals": [t.to_state() for t in self.totals],
            "norms": self.norms,
            "updates": self.updates,
            "coefficients": self.coefficients,
        }

    def own(self, fingerprint: str) -> list[dict[str, Any]]:
        """Returns this process's groups as plain values and tensors."""
        entries = to_entries(self.collected.groups, fingerprint)
        for entry in entries:  # the rollout's own value may have a KL subtracted
            rollout_stats = self.collected.step_stats[entry["position"]]
            for values, outcome in zip(entry["rollouts"], rollout_stats, strict=True):
                values["outcome_reward"] = outcome.outcome_reward
        return entries


def from_state(
    shared: Mapping[str, Any], own: Sequence[dict[str, Any]], stream: PromptStream, fingerprint: str
) -> StepProgress | None:
    """Restores the progress from a checkpoint; None if the recipe has another fingerprint now."""
    groups = from_entries(own, stream, fingerprint)
    if len(groups) < len(own):
        return None
    collected = StepBatch(
        groups, _outcomes(shared["whole_step"]), _outcomes(shared["sampled"]), shared["metrics"]
    )
    totals = [MeasuredUpdate.from_state(t) for t in shared["totals"]]
    norms, coefficients = list(shared["norms"]), dict(shared["coefficients"])
    return StepProgress(collected, totals, norms, shared["updates"], coefficients)


def _plain(step_stats: StepStats) -> list[tuple[int, list[dict[str, Any]]]]:
    return [
        (p, [{**o._asdict(), "episode": o.episode and o.episode._asdict()} for o in group])
        for p, group in step_stats.items()
    ]


def _outcomes(saved: Sequence[tuple[int, list[dict[str, Any]]]]) -> StepStats:
    return {p: [_stats(o) for o in group] for p, group in saved}


def _stats(saved: Mapping[str, Any]) -> RolloutStats:
    values = dict(saved)
    episode = values.pop("episode", None)
    return RolloutStats(**values, episode=None if episode is None else EpisodeStats(**episode))
