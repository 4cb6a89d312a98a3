"""Rules that judge a metric step by step, from which alarms are built. Pure code.

A rule holds once its condition is met in `steps` measurements in a row. It holds until the metric
has been back in its usual range for as many measurements. That range is narrower than the
condition, so that a metric that swings around the limit causes one episode, not many. A step in
which the metric was not measured changes nothing.

    Level   the value is beyond a fixed limit
    Shift   the value is far from the median of earlier steps of this run
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

Metrics = Mapping[str, float]
Value = Callable[[Metrics], float | None]  # the number of a step; None: it was not measured


@dataclass(frozen=True)
class Judgement:
    """A measured value against the limits of its rule."""

    value: float
    is_beyond: bool
    is_usual: bool  # far enough from the limit for the episode to end
    usual: float = math.nan  # the median of earlier steps, for a Shift


@dataclass
class State:
    """The progress of a rule, which a checkpoint stores."""

    rule: str = ""  # its parameters; a rule with other ones starts over
    values: list[float] = field(default_factory=list)  # earlier values, for a Shift
    beyond: int = 0  # measurements in a row
    usual: int = 0
    holds: bool = False


@dataclass(frozen=True)
class Level:
    """A value is beyond a fixed limit: at or above `above`, or at or below `below`.

    Args:
        calm: limit that ends an episode when the value crosses it; None: the limit itself.
        steps: measurements in a row.
    """

    above: float = math.inf
    below: float = -math.inf
    calm: float | None = None
    steps: int = 1

    def judge(self, value: float, state: State) -> Judgement:
        """Compares a value with the limit."""
        limit = self.above if self.above < math.inf else self.below
        calm = limit if self.calm is None else self.calm
        if self.above < math.inf:
            return Judgement(value, value >= limit, value < calm)
        return Judgement(value, value <= limit, value > calm)


@dataclass(frozen=True)
class Shift:
    """A value is far from the median of earlier values.

    The limit is the larger of median · factor and median + added. With a factor below 1 it is
    median · factor, and smaller values are beyond it. An episode ends half way back to the median.
    Values beyond the limit do not enter the window, since a lasting change would then become usual.

    Args:
        added: smallest difference to the median, in the metric's unit.
        window: number of earlier values.
        first: the window holds the first values of the run rather than the last ones.
        least: number of earlier values below which nothing is judged.
        steps: measurements in a row.
    """

    factor: float
    added: float = 0.0
    window: int = 50
    first: bool = False
    least: int = 10
    steps: int = 3

    def judge(self, value: float, state: State) -> Judgement | None:
        """Compares a value with the limit; returns None if earlier values give no limit."""
        usual = median(state.values) if len(state.values) >= self.least else math.nan
        if math.isnan(usual) or (usual == 0 and not self.added):  # no multiple of 0 is a limit
            return None
        if self.factor < 1:
            limit = usual * self.factor
            return Judgement(value, value < limit, value > (usual + limit) / 2, usual)
        limit = max(usual * self.factor, usual + self.added)
        return Judgement(value, value > limit, value < (usual + limit) / 2, usual)


@dataclass(frozen=True)
class Watch:
    """A rule for one number of a step."""

    name: str
    rule: Level | Shift
    value: str | Value  # a metric, or a number that is computed from several
    text: str = ""  # sentence of an alarm, in which {value} and {usual} are filled in

    def follow(self, state: State, metrics: Metrics) -> Judgement | None:
        """Follows one step; returns the judgement if an episode begins, else None."""
        value = metrics.get(self.value) if isinstance(self.value, str) else self.value(metrics)
        if value is None or math.isnan(value):
            return None
        judged = self.rule.judge(value, state)
        is_beyond = judged is not None and judged.is_beyond
        if isinstance(rule := self.rule, Shift) and math.isfinite(value) and not is_beyond:
            if not rule.first:
                state.values = [*state.values, value][-rule.window :]
            elif len(state.values) < rule.window:
                state.values.append(value)
        if judged is None:
            return None
        state.beyond = state.beyond + 1 if judged.is_beyond else 0
        state.usual = state.usual + 1 if judged.is_usual else 0
        if state.holds:
            state.holds = state.usual < self.rule.steps
            return None
        state.holds = state.beyond >= self.rule.steps
        return judged if state.holds else None
