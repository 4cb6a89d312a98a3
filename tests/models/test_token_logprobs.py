import math

import pytest
import torch
from torch import Tensor

from grpo_cli.models.token_logprobs import token_entropy, token_logprobs


@pytest.fixture
def logits() -> Tensor:
    return 3 * torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def targets() -> Tensor:
    return torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_token_logprobs_are_log_softmax_at_the_targets(
    logits: Tensor, targets: Tensor, temperature: float
) -> None:
    expected = (logits / temperature).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(token_logprobs(logits, targets, temperature), expected)


def test_token_logprobs_by_hand() -> None:
    logits = torch.tensor([[[0.5, 0.25, 0.25]]]).log()
    assert token_logprobs(logits, torch.tensor([[1]])).item() == pytest.approx(math.log(0.25))
    # at temperature 1/2 probabilities go as their squares: 1/16 of 1/4 + 1/16 + 1/16
    assert token_logprobs(logits, torch.tensor([[1]]), 0.5).item() == pytest.approx(math.log(1 / 6))


def test_gradient_is_one_hot_minus_softmax_over_temperature(
    logits: Tensor, targets: Tensor
) -> None:
    logits.requires_grad_()
    token_logprobs(logits, targets, 0.7).sum().backward()
    one_hot = torch.nn.functional.one_hot(targets, 11)
    torch.testing.assert_close(logits.grad, (one_hot - (logits / 0.7).softmax(-1)) / 0.7)


def test_bfloat16_logits_are_worked_on_in_float32(logits: Tensor, targets: Tensor) -> None:
    half = logits.bfloat16()
    for given, exact in [
        (token_logprobs(half, targets, 0.7), token_logprobs(half.double(), targets, 0.7)),
        (token_entropy(half, 0.7), token_entropy(half.double(), 0.7)),
    ]:
        assert given.dtype == torch.float32
        torch.testing.assert_close(given, exact.float())


@pytest.mark.parametrize("size", [2, 7, 1000])
def test_entropy_of_a_uniform_distribution_is_log_of_its_size(size: int) -> None:
    entropy = token_entropy(torch.full((1, 3, size), 2.5), 0.7)
    torch.testing.assert_close(entropy, torch.full((1, 3), math.log(size)))


def test_entropy_by_hand() -> None:
    logits = torch.tensor([[[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]]).log()
    # 0.5 · ln 2 + 2 · 0.25 · ln 4 = 1.5 ln 2; a certain token has none
    assert token_entropy(logits)[0].tolist() == pytest.approx([1.5 * math.log(2), 0.0])
    # at temperature 1/2: 2/3, 1/6, 1/6
    by_hand = 2 / 3 * math.log(3 / 2) + 1 / 3 * math.log(6)
    assert token_entropy(logits, 0.5)[0, 0].item() == pytest.approx(by_hand)


def test_a_logit_of_minus_infinity_gives_no_nan(logits: Tensor, targets: Tensor) -> None:
    ruled_out = (targets + 1) % 11
    logits.scatter_(-1, ruled_out[..., None], -torch.inf).requires_grad_()
    logprobs = token_logprobs(logits, targets)
    logprobs.sum().backward()
    assert logprobs.isfinite().all()
    assert token_entropy(logits).isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert token_logprobs(logits, ruled_out).eq(-torch.inf).all()
