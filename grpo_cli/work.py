"""A step under way: what was collected for it, and how far its updates are.

A run that is told to end in the middle of a step keeps this, and goes on there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_cli.carried import packed, unpacked
from grpo_cli.data import PromptStream
from grpo_cli.outcomes import Outcome, WholeStep
from grpo_cli.rollouts import Group
from grpo_cli.tally import Totals


@dataclass
class Collected:
    """What a step trains on."""

    groups: list[Group]  # this process's
    whole_step: WholeStep  # outcomes of every process's groups
    sampled: WholeStep  # outcomes of all that was sampled in this step, dropped or not
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class Work:
    """What is known of a step before it is done."""

    collected: Collected
    totals: list[Totals] = field(default_factory=list)  # of each optimizer step done
    norms: list[float] = field(default_factory=list)  # of their gradients
    updates: int = 0  # optimizer steps done, those with nothing to train on among them
    coefficients: dict[str, float] = field(default_factory=dict)  # that the first of them had

    def shared(self) -> dict[str, Any]:
        """What is the same on every process, as plain values."""
        done = self.collected
        return {
            "whole_step": _plain(done.whole_step),
            "sampled": _plain(done.sampled),
            "metrics": done.metrics,
            "totals": [dataclasses.asdict(t) for t in self.totals],
            "norms": self.norms,
            "updates": self.updates,
            "coefficients": self.coefficients,
        }

    def own(self, how: str) -> list[dict[str, Any]]:
        """This process's groups as plain values and tensors.

        Args:
            how: says by what they were drawn and scored.
        """
        entries = packed(self.collected.groups, how)
        for entry in entries:  # a KL may have been taken off it since
            outcomes = self.collected.whole_step[entry["position"]]
            for values, outcome in zip(entry["rollouts"], outcomes, strict=True):
                values["outcome"] = outcome.outcome
        return entries


def restored(
    shared: Mapping[str, Any], own: Sequence[dict[str, Any]], stream: PromptStream, how: str
) -> Work | None:
    """The same from a checkpoint; None if the recipe draws or scores otherwise by now."""
    groups = unpacked(own, stream, how)
    if len(groups) < len(own):
        return None
    collected = Collected(
        groups, _outcomes(shared["whole_step"]), _outcomes(shared["sampled"]), shared["metrics"]
    )
    totals = [Totals(**t) for t in shared["totals"]]
    norms, coefficients = list(shared["norms"]), dict(shared["coefficients"])
    return Work(collected, totals, norms, shared["updates"], coefficients)


def _plain(whole_step: WholeStep) -> list[tuple[int, list[dict[str, Any]]]]:
    return [(p, [o._asdict() for o in group]) for p, group in whole_step.items()]


def _outcomes(saved: Sequence[tuple[int, list[dict[str, Any]]]]) -> WholeStep:
    return {p: [Outcome(**o) for o in group] for p, group in saved}
