"""Fits lines and power laws to measurements, with the standard error of the slope."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """A fitted line y = intercept + slope * x."""

    slope: float
    error: float  # standard error of the slope; NaN of fewer than three points
    intercept: float

    def text(self) -> str:
        """Returns the slope with its standard error, such as "0.98 ± 0.02"."""
        return f"{self.slope:.2f} ± {self.error:.2f}"


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """Returns the line of ordinary least squares.

    The standard error is sqrt(sum of squared residuals / (n - 2) / sum (x - mean)²). It holds for
    independent residuals: where neighbours are alike, it is too small.

    For example, the points (0, 0), (1, 1), (2, 1) give a slope of 1/2 and an error of sqrt(1/12).
    """
    slope, intercept = statistics.linear_regression(xs, ys)
    if len(xs) < 3:
        return Line(slope, math.nan, intercept)
    middle = statistics.fmean(xs)
    left = sum((y - intercept - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    spread = sum((x - middle) ** 2 for x in xs)
    return Line(slope, math.sqrt(left / (len(xs) - 2) / spread), intercept)


def fit_power(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """Returns the line of the logarithms: its slope is the exponent b of y = a · x^b.

    For example, fit_power([1, 2, 4], [3, 6, 12]).slope is 1.
    """
    return fit_line([math.log(x) for x in xs], [math.log(y) for y in ys])
