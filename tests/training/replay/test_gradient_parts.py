"""The parts of a gradient, compared with all of it."""

import math

import pytest
import torch
from torch import nn

from grpo_cli.training.replay.gradient_parts import GradientParts


def test_the_shares_of_three_parts() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))])
    a, b = model
    losses = [3 * a[0], 4 * a[1] + 2 * b[0], -a[0]]  # g = (2, 4 | 2), |g|² = 24
    sum(losses).backward(retain_graph=True)
    gradient = a.grad
    parts = GradientParts(model)
    found = []
    with parts.watching():
        for loss in losses:
            loss.backward()
            found.append(parts.take_part())
    assert a.grad is None and b.grad is None  # noqa: PT018
    assert [p.share for p in found] == pytest.approx([6 / 24, 20 / 24, -2 / 24])
    assert [p.norm for p in found] == pytest.approx([3, math.sqrt(20), 1])
    assert parts.difference == 0
    with parts.watching():
        (2 * b[0]).backward()
    assert parts.difference == pytest.approx(2 / math.sqrt(24))
    parts.restore()
    assert a.grad is gradient
    (5 * a[0]).backward()
    assert a.grad.tolist() == [7, 4], "nothing watches any more"


def test_no_gradient() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(2))])
    parts = GradientParts(model)
    assert math.isnan(parts.take_part().share)
    with parts.watching():
        model[0].sum().backward()
    assert parts.take_part().norm == pytest.approx(math.sqrt(2))
    assert math.isnan(parts.difference)
    parts.restore()
    assert model[0].grad is None
