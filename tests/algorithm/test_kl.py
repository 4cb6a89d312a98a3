from __future__ import annotations

import math

import pytest
import torch

from grpo_cli.algorithm.kl import ESTIMATORS


@pytest.mark.parametrize(
    ("name", "log_ratio", "value", "grad"),  # log π_ref − log π; the gradient by log π
    [
        ("k1", 0.0, 0.0, 1.0),
        ("k1", 1.5, -1.5, 1.0),
        ("k1", -1.0, 1.0, 1.0),
        ("k2", 0.0, 0.0, 0.0),
        ("k2", 1.5, 1.125, -1.5),
        ("k2", -1.0, 0.5, 1.0),
        ("k3", 0.0, 0.0, 0.0),
        ("k3", 1.0, 0.71828183, 1 - math.e),
        ("k3", -1.0, 0.36787944, 1 - 1 / math.e),
        ("k3", math.log(2), 0.30685282, -1.0),
    ],
)
def test_estimators_by_hand(name: str, log_ratio: float, value: float, grad: float) -> None:
    logprobs = torch.tensor([[-2.0]], dtype=torch.float64, requires_grad=True)
    out = ESTIMATORS[name](logprobs, logprobs.detach() + log_ratio)
    (found,) = torch.autograd.grad(out.sum(), logprobs)
    assert out.item() == pytest.approx(value)
    assert found.item() == pytest.approx(grad)
