import math

import pytest
import torch

from grpo_cli.algorithm.metric_sums import MetricSums, ReducedMetrics
from tests.conftest import ALONE


def tally_of(values: list[list[float]], mask: list[list[float]]) -> MetricSums:
    metric_sums, v, m = MetricSums(), torch.tensor(values), torch.tensor(mask)
    metric_sums.total("sum", v.sum())
    metric_sums.mean("mean", v, m)
    metric_sums.lowest("of/min", v, m)
    metric_sums.highest("of/max", v, m)
    return metric_sums


FIRST = ([[1.0, 2.0, 9.0], [4.0, -9.0, 9.0]], [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
SECOND = ([[5.0, 100.0]], [[1.0, 0.0]])
FIRST_ALONE = {"sum": 16.0, "mean": 7 / 3, "of/min": 1.0, "of/max": 4.0}
TOGETHER = {"sum": 121.0, "mean": 3.0, "of/min": 1.0, "of/max": 5.0}


def test_optimizer_batches_are_merged_as_if_they_had_been_one() -> None:
    # Not a mean of the means, (7/3 + 5) / 2: the first has three values and the second one.
    first, second = (tally_of(*given).reduced(ALONE) for given in (FIRST, SECOND))
    assert ReducedMetrics.of([first, second]).figures == pytest.approx(TOGETHER)
    assert ReducedMetrics.of([first]).figures == pytest.approx(FIRST_ALONE)
    assert second.figures["mean"] == 5.0, "what was merged in is left as it was"


def test_only_what_is_named_is_taken_from_another_tally() -> None:
    mine, other = MetricSums(), MetricSums()
    for metric_sums, value in ((mine, 1.0), (other, 5.0)):
        values, mask = torch.tensor([value, value + 1]), torch.tensor([1.0, 1.0])
        metric_sums.mean("wanted", values, mask)
        metric_sums.mean("not", values, mask)
        metric_sums.highest("high", values, mask)
        metric_sums.lowest("low", -values, mask)
    mine.add(other, only=["wanted"])
    figures = mine.reduced(ALONE).figures
    assert figures == {"wanted": 3.5, "not": 1.5, "high": 2.0, "low": -2.0}
    nothing = MetricSums()  # as on a process that has nothing to train on
    nothing.add(other, only=[])
    found = nothing.reduced(ALONE)
    assert found.counts == {"wanted": 0.0, "not": 0.0}
    assert found.figures["high"] == -math.inf


def test_a_tally_keeps_no_graph() -> None:
    weight = torch.ones(2, requires_grad=True)
    metric_sums = MetricSums()
    metric_sums.total("t", (weight * 2).sum())
    metric_sums.mean("m", weight * 2, torch.ones(2))
    metric_sums.lowest("e/low", weight * 2, torch.ones(2))
    metric_sums.highest("e/high", weight * 2, torch.ones(2))
    kept = [
        t
        for part in (metric_sums.sums, metric_sums.counts, metric_sums.highs, metric_sums.lows)
        for t in part.values()
    ]
    assert [t.requires_grad for tensors in kept for t in tensors] == [False] * 5
    assert metric_sums.reduced(ALONE).figures == {"t": 4.0, "m": 2.0, "e/low": 2.0, "e/high": 2.0}


def test_sums_are_in_float64() -> None:
    # In float32 the half would be lost.
    metric_sums = MetricSums()
    for value in (torch.tensor(1e8), torch.tensor(0.5), torch.tensor(1.0, dtype=torch.bfloat16)):
        metric_sums.total("t", value)
    assert metric_sums.reduced(ALONE).figures["t"] == 100000001.5
