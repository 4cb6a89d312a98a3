"""The number of steps that are prefetched, adapted to how stale their completions are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from grpo_cli.config.schema import Vllm

CALM_SHARE = 0.5  # of the limit, below which one more step is prefetched
CALM_STEPS = 5  # in a row


class PrefetchDepth:
    """Counts the steps to prefetch: always `most`, or with prefetch=auto between 0 and `most`.

    A step whose `staleness/logp_difference` is above the limit lowers it by 1, and CALM_STEPS steps
    in a row below half of the limit raise it by 1. After a change as many steps are passed over as
    were prefetched before it, since only those after them have the new age. The difference is over
    all processes, so that these decide alike.
    """

    def __init__(self, most: int, vllm: Vllm) -> None:
        self.most = self.steps = most
        is_auto = most > 0 and vllm.prefetch == "auto"
        self.limit = vllm.prefetch_max_difference if is_auto else None
        self.passing = 0  # steps to pass over
        self.calm = 0  # steps in a row

    @property
    def adapts(self) -> bool:
        """Whether the number can change."""
        return self.limit is not None

    def follow(self, difference: float | None) -> None:
        """Follows a step.

        Args:
            difference: its `staleness/logp_difference`; None if nothing was trained on.
        """
        if self.limit is None or difference is None or math.isnan(difference):
            return
        if self.passing > 0:
            self.passing -= 1
            return
        self.calm = self.calm + 1 if difference < CALM_SHARE * self.limit else 0
        before = self.steps
        if difference > self.limit:
            self.steps = max(before - 1, 0)
        elif self.calm >= CALM_STEPS:
            self.steps = min(before + 1, self.most)
        if self.steps != before:
            self.passing, self.calm = max(before, self.steps), 0

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
