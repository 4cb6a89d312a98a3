"""Ends a run before its last step by the rules of `stop`; docs/alarms.md defines them.

Every process has the same metrics and rules, so that all end together. Each measures the time by
itself, and the longest time counts. A checkpoint stores the counts, and not what they led to: a
resumed run judges them by its own limits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from grpo_cli.distributed.workers import Workers
from grpo_cli.training.rollouts.credit import ZERO_ADVANTAGE
from grpo_cli.training.settings import Stop

KL_STEPS = 5  # measurements in a row above max_kl: the KL of one batch is noisy


class Reason(NamedTuple):
    """Why a run ended before its last step."""

    rule: str  # a key of the recipe
    sentence: str


@dataclass
class StopRules:
    """The rules of a run with their counts; the same on every process."""

    config: Stop
    no_gradient: int = 0  # steps in a row in which no completion had an advantage
    hours: float = 0.0  # up to the last step
    high_kl: int = 0  # measurements in a row at or above max_kl

    @property
    def reason(self) -> Reason | None:
        """The rule that has ended the run, if one has."""
        config = self.config
        if 0 < config.zero_gradient <= self.no_gradient:
            why = f"no completion had an advantage in the last {config.zero_gradient} steps"
            return Reason(
                "stop.zero_gradient", f"{why} (stop.zero_gradient = {config.zero_gradient})"
            )
        if config.hours is not None and self.hours >= config.hours:
            why = f"{self.hours:.3g} hours are spent (stop.hours = {config.hours:g})"
            return Reason("stop.hours", why)
        if config.max_kl is not None and self.high_kl >= KL_STEPS:
            why = f"the KL to the reference was too high in {KL_STEPS} measurements in a row"
            return Reason("stop.max_kl", f"{why} (stop.max_kl = {config.max_kl:g})")
        return None

    def follow_step(self, metrics: Mapping[str, float], seconds: float, workers: Workers) -> None:
        """Updates the counts with the metrics of a complete step, before its evaluation.

        Args:
            seconds: time of the run so far, on this process.
        """
        if self.config.hours is not None:
            self.hours = workers.max(seconds) / 3600
        if ZERO_ADVANTAGE in metrics:
            self.no_gradient = self.no_gradient + 1 if metrics[ZERO_ADVANTAGE] == 1 else 0
        kl, limit = metrics.get("kl", math.nan), self.config.max_kl
        if limit is not None and not math.isnan(kl):
            self.high_kl = self.high_kl + 1 if kl >= limit else 0

    def to_state(self) -> dict[str, Any]:
        """Returns the counts for a checkpoint, as plain values."""
        return {name: value for name, value in asdict(self).items() if name != "config"}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restores the counts that `to_state` returned."""
        for name, value in saved.items():
            if hasattr(self, name):
                setattr(self, name, value)
