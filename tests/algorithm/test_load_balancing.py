"""The load-balancing loss against numbers by hand, against transformers, and split in parts."""

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from grpo_cli.algorithm.load_balancing import ExpertLoad, Routing


def load_of(routing: Routing) -> ExpertLoad:
    return ExpertLoad(routing.assigned.tolist(), routing.tokens.item())


def test_by_hand() -> None:
    # Two experts, one layer, k = 1: probabilities (3/4, 1/4), (3/4, 1/4), (1/2 - , 1/2 + ), padding
    logits = torch.tensor([[3.0, 1.0], [3.0, 1.0], [1.0, 3.0], [9.0, 1.0]]).log()
    routing = Routing.of([logits], 1, torch.tensor([1.0, 1.0, 1.0, 0.0]))
    assert routing.assigned.tolist() == [2, 1]
    assert routing.probability.tolist() == pytest.approx([7 / 4, 5 / 4])
    assert routing.tokens == 3
    # 2 · (2/3 · 7/12 + 1/3 · 5/12)
    assert load_of(routing).loss(routing).item() == pytest.approx(2 * (14 / 36 + 5 / 36))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_it_is_transformers_loss_and_the_parts_add_up(k: int) -> None:
    random = torch.Generator().manual_seed(k)
    layers = [torch.randn(12, 5, generator=random, requires_grad=True) for _ in range(3)]
    mask = (torch.rand(12, generator=random) < 0.7).float()
    expected = load_balancing_loss_func(tuple(layers), 5, k, mask)
    whole = Routing.of(layers, k, mask)
    load = load_of(whole)
    torch.testing.assert_close(load.loss(whole), expected)
    gradient = torch.autograd.grad(expected, layers)
    parts = [
        Routing.of([layer[rows] for layer in layers], k, mask[rows])
        for rows in (slice(0, 1), slice(1, 8), slice(8, 12))
    ]
    total = torch.stack([load.loss(part) for part in parts]).sum()
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(torch.autograd.grad(total, layers), gradient)
