"""Reads the metrics of a run as columns, short enough to draw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

MOST_POINTS = 2_500  # points of a curve; a longer run is drawn as means over steps


def columns(metrics: Sequence[Mapping[str, Any]], most: int = MOST_POINTS) -> dict[str, Any]:
    """Returns the metrics of a run as columns over its steps.

    For example, {"steps": [1, 2], "every": 1, "columns": {"reward": [0.1, 0.2]}}.

    A run of more than `most` steps is drawn as means of `every` steps in a row, at the last of
    them. Missing values do not count.
    """
    names = dict.fromkeys(key for line in metrics for key in line if key != "step")

    def mean(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
        values = [v for line in lines if isinstance(v := line.get(name), int | float)]
        return rounded(sum(values) / len(values)) if values else None

    every = max(1, math.ceil(len(metrics) / most))
    parts = [metrics[i : i + every] for i in range(0, len(metrics), every)]
    return {
        "steps": [part[-1]["step"] for part in parts],
        "every": every,
        "columns": {name: [mean(part, name) for part in parts] for name in names},
    }


def rounded(value: float, digits: int = 5) -> float | None:
    """Returns a value with a number of significant digits; None for NaN and infinity."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
