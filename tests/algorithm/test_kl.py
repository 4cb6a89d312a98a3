import math

import pytest
import torch
from torch import Tensor

from grpo_cli.algorithm.loss import ESTIMATORS


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


# Averages over the policy, exactly: each token of a small vocabulary by its probability.

REF = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64).log()


def policy() -> tuple[Tensor, Tensor]:
    """(logits, log-probabilities), with gradient."""
    logits = torch.tensor([0.5, -0.3, 0.2], dtype=torch.float64, requires_grad=True)
    return logits, logits.log_softmax(-1)


def kl_of(logprobs: Tensor) -> Tensor:
    """KL(π ‖ π_ref), by its definition."""
    return (logprobs.exp() * (logprobs - REF)).sum()


@pytest.mark.parametrize(
    ("name", "is_kl", "has_its_gradient"),
    [("k1", True, False), ("k2", False, True), ("k3", True, False)],
)
def test_estimators_on_average(name: str, is_kl: bool, has_its_gradient: bool) -> None:
    logits, logprobs = policy()
    sampled = (logprobs.detach().exp() * ESTIMATORS[name](logprobs, REF)).sum()
    assert (sampled.item() == pytest.approx(kl_of(logprobs).item())) == is_kl
    (found,) = torch.autograd.grad(sampled, logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(kl_of(logprobs), logits)
    assert torch.allclose(found, wanted) == has_its_gradient
    if name == "k1":  # as its docstring has it
        assert torch.allclose(found, torch.zeros_like(found))


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_times_the_ratio_they_have_the_gradient_of_the_kl(name: str) -> None:
    """Sampled by an old policy, with `loss.kl_bias_correction`."""
    logits, logprobs = policy()
    old = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    ratio = logprobs.exp() / old
    sampled = (old * ratio * ESTIMATORS[name](logprobs, REF)).sum()
    (found,) = torch.autograd.grad(sampled, logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(kl_of(logprobs), logits)
    torch.testing.assert_close(found, wanted)
