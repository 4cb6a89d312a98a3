"""Accumulates sums, means and extremes that are logged while the gradient is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from grpo_cli.distributed.workers import Workers


class MetricSums:
    """Accumulates one process's metrics in one optimizer batch, micro-batch by micro-batch.

    The values stay on the device until `reduced`, to avoid synchronizing with the host.
    """

    def __init__(self) -> None:
        self.sums: dict[str, list[Tensor]] = {}
        self.counts: dict[str, list[Tensor]] = {}
        self.lows: dict[str, list[Tensor]] = {}
        self.highs: dict[str, list[Tensor]] = {}

    def total(self, name: str, value: Tensor) -> None:
        """Adds a scalar to a sum."""
        self.sums.setdefault(name, []).append(value.detach())

    def mean(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Adds the values where `mask` is 1 to a mean; both have one shape."""
        self.total(name, values.detach().masked_fill(mask == 0, 0.0).sum())
        self.counts.setdefault(name, []).append(mask.sum())

    def lowest(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Includes the values where `mask` is 1 in a minimum."""
        inside = values.detach().masked_fill(mask == 0, math.inf)
        self.lows.setdefault(name, []).append(inside.amin())

    def highest(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Includes the values where `mask` is 1 in a maximum."""
        inside = values.detach().masked_fill(mask == 0, -math.inf)
        self.highs.setdefault(name, []).append(inside.amax())

    def add(self, other: MetricSums, only: Collection[str] | None = None) -> None:
        """Adds the measurements of another accumulator.

        Args:
            only: means to add; other names are added with neutral values, so that every process has
                the same names.
        """
        for mine, theirs in ((self.sums, other.sums), (self.counts, other.counts)):
            for name, values in theirs.items():
                counts = only is None or name in only
                added = values if counts else [torch.zeros_like(v) for v in values]
                mine.setdefault(name, []).extend(added)
        for mine, theirs, nothing in (
            (self.lows, other.lows, math.inf),
            (self.highs, other.highs, -math.inf),
        ):
            for name, values in theirs.items():
                added = values if only is None else [torch.full_like(v, nothing) for v in values]
                mine.setdefault(name, []).extend(added)

    def reduced(self, workers: Workers) -> ReducedMetrics:
        """Reduces sums and extremes over all processes, which must have the same names."""
        parts = (self.sums, self.counts, self.lows, self.highs)
        scalars = [value for part in parts for values in part.values() for value in values]
        # A single copy to the host; MPS has no float64.
        wide = torch.float32 if any(s.device.type == "mps" for s in scalars) else torch.float64
        on_host = iter(torch.stack([s.to(wide) for s in scalars]).tolist() if scalars else [])
        sums, counts, lows, highs = (
            {name: [next(on_host) for _ in values] for name, values in part.items()}
            for part in parts
        )
        named = {f"sum {n}": math.fsum(v) for n, v in sums.items()}
        named |= {f"count {n}": math.fsum(v) for n, v in counts.items()}
        added = workers.sum(named)
        extremes = {f"low {n}": -min(v) for n, v in lows.items()}
        extremes |= {f"high {n}": max(v) for n, v in highs.items()}
        largest = workers.maxima(extremes)
        return ReducedMetrics(
            {n: added[f"sum {n}"] for n in sums},
            {n: added[f"count {n}"] for n in counts},
            {n: -largest[f"low {n}"] for n in lows},
            {n: largest[f"high {n}"] for n in highs},
        )


@dataclass
class ReducedMetrics:
    """Sums and extremes of all processes, over one optimizer batch or several."""

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    lows: dict[str, float] = field(default_factory=dict)
    highs: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, batches: Sequence[ReducedMetrics]) -> ReducedMetrics:
        """Merges the measurements of several optimizer batches."""
        return cls(
            _merged([b.sums for b in batches], math.fsum),
            _merged([b.counts for b in batches], math.fsum),
            _merged([b.lows for b in batches], min),
            _merged([b.highs for b in batches], max),
        )

    def mean(self, name: str) -> float:
        """Returns a mean; NaN without values."""
        count = self.counts.get(name, 0.0)
        return self.sums[name] / count if count else math.nan

    @property
    def figures(self) -> dict[str, float]:
        """Returns means (NaN without values), sums without a count, and extremes, by name."""
        means = {
            name: self.mean(name) if name in self.counts else value
            for name, value in self.sums.items()
        }
        return means | self.lows | self.highs


def _merged(
    parts: Sequence[Mapping[str, float]], merge: Callable[[list[float]], float]
) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: merge([part[name] for part in parts if name in part]) for name in names}
