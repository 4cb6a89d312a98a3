"""Functions are given what their parameters name."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_cli.algorithm import advantages, losses
from grpo_cli.algorithm.variants import apply, readers
from grpo_cli.config.schema import Advantage

TENSORS = {"rewards": torch.tensor(2.0), "lengths": torch.tensor(3.0), "mask": torch.tensor(5.0)}


def difference(rewards: Tensor, lengths: Tensor, *, k: int, scale: str) -> Tensor:
    assert scale == "none"
    return rewards - k * lengths


def swapped(lengths: Tensor, rewards: Tensor) -> Tensor:
    return lengths - rewards


def knobs_only(*, k: int) -> Tensor:
    return torch.tensor(float(k))


@pytest.mark.parametrize(
    "settings", [Advantage(args={"k": 10}, scale="none"), SimpleNamespace(k=10, scale="none")]
)
def test_apply_passes_by_name(settings: Any) -> None:
    backwards = dict(reversed(TENSORS.items()))
    for tensors in (TENSORS, backwards):
        assert apply(difference, tensors, settings).item() == 2.0 - 30.0
        assert apply(swapped, tensors, settings).item() == 1.0
        assert apply(knobs_only, tensors, settings).item() == 10.0


@pytest.mark.parametrize("function", [*losses.POLICY.values(), *advantages.RULES.values()])
def test_a_loss_and_its_metrics_agree_on_the_defaults(function: Any) -> None:
    defaults: dict[str, Any] = {}
    for reader in readers(function):
        for name, p in inspect.signature(reader).parameters.items():
            assert defaults.setdefault(name, p.default) == p.default, name
