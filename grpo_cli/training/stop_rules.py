"""Ends a run before its last step by the rules of `stop`; docs/alarms.md defines them.

Like alarms, the rules are built from `watches.py`. Every process has the same metrics and rules, so
that all end together. Each measures the time by itself, and the longest time counts. A checkpoint
stores the states of the rules. A rule whose limit is changed starts over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from grpo_cli.config.schema import Stop
from grpo_cli.distributed.workers import Workers
from grpo_cli.evaluation.improvement import Measured, has_improved
from grpo_cli.reporting.watches import Level, Metrics, Watch, Watches, measured
from grpo_cli.training.rollouts.credit import ZERO_ADVANTAGE

HOUR = 3600.0


class Reason(NamedTuple):
    """Why a run ended before its last step."""

    rule: str  # a key of the recipe
    sentence: str


class StopRules:
    """The rules of a run and their states; the same on every process."""

    def __init__(self, config: Stop) -> None:
        self.config = config
        self.rules = {watch.name: watch for watch in rules_of(config)}
        self.watches = Watches()
        self.sentences: dict[str, str] = {}  # by name of the rule that has ended the run
        self.reference: Measured | None = None  # the evaluation that others have to improve on
        self.not_better = 0  # evaluations in a row since then

    @property
    def reason(self) -> Reason | None:
        """The rule that has ended the run, if one has."""
        for name, watch in self.rules.items():
            if self.watches.state_of(watch).holds:
                return Reason(f"stop.{name}", self.sentences[name])
        return None

    def follow_step(self, metrics: Metrics, seconds: float, workers: Workers) -> None:
        """Updates the rules with the metrics of a complete step, before its evaluation.

        Args:
            seconds: time of the run so far, on this process.
        """
        if self.config.hours is not None:
            metrics = {**metrics, "hours": workers.max(seconds) / HOUR}
        self._follow(metrics)

    def follow_evaluation(self, found: Measured) -> None:
        """Counts evaluations in a row that do not improve on the reference evaluation."""
        known = self.reference
        if known is None or math.isnan(known.value) or has_improved(found, known):
            self.reference, self.not_better = found, 0
        else:
            self.not_better += 1
        self._follow({"not_better": float(self.not_better)})

    def _follow(self, metrics: Metrics) -> None:
        for watch, judged in self.watches.follow(list(self.rules.values()), metrics):
            limit = getattr(self.config, watch.name)
            text = SENTENCES[watch.name].format(value=judged.value, steps=watch.rule.steps)
            self.sentences[watch.name] = f"{text} (stop.{watch.name} = {limit:g})"

    def to_state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as plain values."""
        return {
            "watches": self.watches.to_state(),
            "sentences": self.sentences,
            "reference": None if self.reference is None else asdict(self.reference),
            "not_better": self.not_better,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restores a state that `to_state` returned."""
        self.watches.restore(saved["watches"], self.rules.values())
        self.sentences = dict(saved["sentences"])
        reference = saved["reference"]
        self.reference = None if reference is None else Measured(**reference)
        self.not_better = saved["not_better"]


SENTENCES = {
    "zero_gradient": "no completion had an advantage in the last {steps} steps",
    "hours": "{value:.3g} hours are spent",
    "plateau": "no improvement beyond its interval in the last {value:.0f} evaluations",
    "max_kl": "the KL to the reference is {value:.3g} nats a token, the last of {steps} above",
}
KL_STEPS = 5  # measurements in a row above max_kl: the KL of one batch is noisy


def rules_of(config: Stop) -> Iterator[Watch]:
    """Yields the rules that a recipe has set."""
    if config.zero_gradient:
        rule = Level(above=1.0, steps=config.zero_gradient)
        yield Watch("zero_gradient", rule, measured(ZERO_ADVANTAGE))
    if config.hours is not None:
        yield Watch("hours", Level(above=config.hours), measured("hours"))
    if config.plateau:
        yield Watch("plateau", Level(above=config.plateau), measured("not_better"))
    if config.max_kl is not None:
        yield Watch("max_kl", Level(above=config.max_kl, steps=KL_STEPS), measured("kl"))
