"""Sums, means and extremes of what is measured while the gradient is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_cli.distributed import Workers


class Tally:
    """What one process measures in one optimizer batch, micro-batch by micro-batch.

    It stays on the device until `reduced`, so that measuring does not make the host wait.
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
        """Adds values to a mean over what `mask` is 1 on; both of one shape."""
        self.total(name, values.masked_fill(mask == 0, 0.0).sum())
        self.counts.setdefault(name, []).append(mask.sum())

    def lowest(self, name: str, values: Tensor, mask: Tensor) -> None:
        """The smallest value that `mask` is 1 on."""
        inside = values.detach().masked_fill(mask == 0, math.inf)
        self.lows.setdefault(name, []).append(inside.amin())

    def highest(self, name: str, values: Tensor, mask: Tensor) -> None:
        """The largest value that `mask` is 1 on."""
        inside = values.detach().masked_fill(mask == 0, -math.inf)
        self.highs.setdefault(name, []).append(inside.amax())

    def take(self, other: Tally, names: Sequence[str]) -> None:
        """Adds some of another's means; of its other names, that they exist and nothing counts."""
        for mine, theirs in ((self.sums, other.sums), (self.counts, other.counts)):
            for name, values in theirs.items():
                taken = values if name in names else [torch.zeros_like(v) for v in values]
                mine.setdefault(name, []).extend(taken)
        for mine, theirs, nothing in (
            (self.lows, other.lows, math.inf),
            (self.highs, other.highs, -math.inf),
        ):
            for name, values in theirs.items():
                mine.setdefault(name, []).extend(torch.full_like(v, nothing) for v in values)

    def reduced(self, workers: Workers) -> Totals:
        """The same over all processes; every process has measured the same names."""
        parts = (self.sums, self.counts, self.lows, self.highs)
        scalars = [value for part in parts for values in part.values() for value in values]
        # One copy to the host for all of them; MPS has no float64.
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
        return Totals(
            {n: added[f"sum {n}"] for n in sums},
            {n: added[f"count {n}"] for n in counts},
            {n: -largest[f"low {n}"] for n in lows},
            {n: largest[f"high {n}"] for n in highs},
        )


@dataclass
class Totals:
    """What all processes have measured, in one optimizer batch or in several."""

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    lows: dict[str, float] = field(default_factory=dict)
    highs: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, batches: Sequence[Totals]) -> Totals:
        """Several optimizer batches together."""
        return cls(
            _merged([b.sums for b in batches], math.fsum),
            _merged([b.counts for b in batches], math.fsum),
            _merged([b.lows for b in batches], min),
            _merged([b.highs for b in batches], max),
        )

    @property
    def figures(self) -> dict[str, float]:
        """Means, NaN of nothing; sums of what is not counted; and the extremes."""
        means = {
            name: (value / self.counts[name] if self.counts[name] else math.nan)
            if name in self.counts
            else value
            for name, value in self.sums.items()
        }
        return means | self.lows | self.highs


def _merged(
    parts: Sequence[Mapping[str, float]], merge: Callable[[list[float]], float]
) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: merge([part[name] for part in parts if name in part]) for name in names}
