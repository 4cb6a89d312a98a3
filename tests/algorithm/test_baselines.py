"""Baseline and divisor give the advantages of their rule."""

import math

import pytest
import torch

from grpo_cli.algorithm.advantages import RULES
from grpo_cli.algorithm.baselines import BASELINES
from grpo_cli.algorithm.variants import apply
from grpo_cli.config.schema import Advantage
from tests.tables import table

REWARDS = torch.tensor([[1.0, 0.0, 0.5, math.nan], [2.0, 2.0, 0.0, 1.0]], dtype=torch.float64)
LENGTHS = torch.tensor([[3.0, 5.0, 2.0, 4.0], [1.0, 6.0, 2.0, 2.0]], dtype=torch.float64)


@table(
    ("rule", "settings", "baseline"),  # of the first reward of the first group
    [
        ("group", {"scale": "group"}, 0.5),
        ("group", {"scale": "batch"}, 0.5),
        ("group", {"scale": "none"}, 0.5),
        ("rloo", {}, 0.25),
        ("reinforce_pp", {"baseline": "group"}, 0.5),
        ("reinforce_pp", {"baseline": "none"}, 6.5 / 7),
        ("opo", {}, 0.4),
        ("max_rl", {}, 0.5),
    ],
)
def test_the_terms_of_an_advantage(rule: str, settings: dict[str, str], baseline: float) -> None:
    config = Advantage(rule=rule, **settings)
    tensors = {"rewards": REWARDS, "lengths": LENGTHS}
    own, divisor = apply(BASELINES[rule], tensors, config)
    assert own.shape == divisor.shape == REWARDS.shape
    assert own[0, 0].item() == pytest.approx(baseline)
    expected = ((REWARDS - own) / divisor).nan_to_num().float()
    assert torch.allclose(expected, apply(RULES[rule], tensors, config), atol=1e-6)
