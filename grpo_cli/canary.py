"""The canary: engine and trainer must say the same of a few fixed tokens after every update.

That an update was received does not mean that it is what the engine computes with: a tied head kept
in a packed copy, a sleeping engine that woke with its old weights, a layer that no name matched.
What both say of the same tokens tells.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from grpo_cli.errors import TrainingError

PROMPTS, TOKENS = 4, 24  # how many, and how much of each: few, for this is done in every step
FACTOR = 4.0  # the tolerance is so many times the difference at the start
FLOOR = {"float32": 5e-5}  # and at least this, by the engine's dtype
FLOOR_16_BIT = 5e-3
LARGEST_AT_START = {"float32": 1e-3}  # a larger difference is no rounding
LARGEST_AT_START_16_BIT = 0.5


@dataclass
class Canary:
    """Fixed tokens, what the trainer says of them now, and how far an engine may be from it."""

    rows: list[list[int]]  # token ids, at least two each
    of_trainer: Callable[[], list[list[float]]]  # log-probabilities of each row's tokens but one
    dtype: str  # of the engine's arithmetic
    tolerance: float | None = None  # None: found at the start
    measured: dict[str, float] = field(default_factory=dict)  # by engine, at the start

    def difference(self, trainer: list[list[float]], engine: list[list[float]]) -> float:
        """Mean over tokens of |difference of log-probabilities|; NaN counts as no agreement."""
        pairs = zip(itertools.chain(*trainer), itertools.chain(*engine), strict=True)
        found = [abs(a - b) for a, b in pairs]
        mean = math.fsum(found) / len(found)
        return mean if math.isfinite(mean) else math.inf

    def allowed(self, engine: str) -> float:
        """The largest mean difference of an engine that is rounding."""
        if self.tolerance is not None:
            return self.tolerance
        floor = FLOOR.get(self.dtype, FLOOR_16_BIT)
        return max(floor, FACTOR * self.measured.get(engine, 0.0))

    def agrees(self, engine: str, difference: float) -> bool:
        """Whether an engine has the weights; its first difference is what others are held to.

        Raises:
            TrainingError: already the first is more than rounding: it is not the same model.
        """
        if engine in self.measured:
            return difference <= self.allowed(engine)
        limit = LARGEST_AT_START.get(self.dtype, LARGEST_AT_START_16_BIT)
        if self.tolerance is not None:
            limit = self.tolerance
        if difference > limit:
            raise TrainingError(
                f"{engine} and the trainer differ by {difference:.3g} (mean difference of the "
                f"log-probabilities of the same tokens) with the same weights, in {self.dtype}; at "
                f"most {limit:g} is rounding. Another model, or engine arguments that change what "
                "it computes?"
            )
        self.measured[engine] = difference
        return True

    def stale(self, engine: str, difference: float, version: int) -> TrainingError:
        """What is raised when the second try did not help either."""
        return TrainingError(
            f"{engine} does not compute with the weights of step {version}: the log-probabilities "
            f"of the same tokens differ by {difference:.3g} in the mean, at most "
            f"{self.allowed(engine):.3g} is rounding. It was sent them twice."
        )


def timed(compare: Callable[[], float]) -> dict[str, float]:
    """What is logged of a comparison: the difference that it finds, and its seconds."""
    begin = time.monotonic()
    difference = compare()
    seconds = time.monotonic() - begin
    return {"weights/canary_difference": difference, "weights/canary_seconds": seconds}


def fixed_rows(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The canary's tokens: the ends of the first prompts, whose beginnings may be all the same."""
    rows = [list(p[-TOKENS:]) for p in prompts if len(p) > 1][:PROMPTS]
    return rows or [[*prompts[0], *prompts[0]]]
