"""The number of steps that are prefetched, adapted to how stale their completions are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from grpo_cli.config.schema import Vllm

CALM_SHARE = 0.5  # of the limit, below which one more step is prefetched
CALM_STEPS = 5  # in a row
MOST_CALM_STEPS = 80  # after several raises that did not hold


class PrefetchDepth:
    """Counts the steps to prefetch: always `most`, or with prefetch=auto between 0 and `most`.

    A step whose `staleness/logp_difference` is above the limit lowers it by 1, and CALM_STEPS steps
    in a row below half of the limit raise it by 1. After a change as many steps are passed over as
    were prefetched before it, since only those after them have the new age. Where one more step
    always takes the difference from below half of the limit to above it, the number would swing for
    ever: a raise that is taken back at once doubles the calm steps that the next one needs. The
    difference is over all processes, so that these decide alike.
    """

    def __init__(self, most: int, vllm: Vllm) -> None:
        self.most = self.steps = most
        is_auto = most > 0 and vllm.prefetch == "auto"
        self.limit = vllm.prefetch_max_difference if is_auto else None
        self.passing = 0  # steps to pass over
        self.calm = 0  # steps in a row
        self.calm_needed = CALM_STEPS  # to raise the number
        self.held = MOST_CALM_STEPS  # steps measured since the last raise

    @property
    def adapts(self) -> bool:
        """Whether the number can change."""
        return self.limit is not None

    def follow(self, difference: float | None) -> None:
        """Follows a step.

        Args:
            difference: its `staleness/logp_difference`; None if nothing was trained on.
        """
        if self.limit is None:
            return
        if self.passing > 0:
            self.passing -= 1
            return
        if difference is None or math.isnan(difference):
            return
        self.held = min(self.held + 1, MOST_CALM_STEPS)
        self.calm = self.calm + 1 if difference < CALM_SHARE * self.limit else 0
        if difference > self.limit and self.steps > 0:
            was_too_early = self.held <= self.calm_needed
            self.calm_needed = (
                min(2 * self.calm_needed, MOST_CALM_STEPS) if was_too_early else CALM_STEPS
            )
            self._change(-1)
        elif self.calm >= self.calm_needed and self.steps < self.most:
            self.held = 0
            self._change(+1)

    def _change(self, by: int) -> None:
        self.passing = max(self.steps, self.steps + by)
        self.steps, self.calm = self.steps + by, 0

    def to_state(self) -> dict[str, Any]:
        """Returns what a checkpoint stores."""
        return dict(vars(self))

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Restores what `to_state` has returned, unless the settings have changed since.

        Args:
            saved: None in a checkpoint of an earlier version.
        """
        if saved is not None and (saved["most"], saved["limit"]) == (self.most, self.limit):
            vars(self).update(saved)
