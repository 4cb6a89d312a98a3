"""Attention by parts with PyTorch's own operations against one softmax."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_cli.models.kernels import plain
from grpo_cli.models.kernels.plain import flash, flash_backward
from tests.models.kernels.layouts import DTYPES, GROUPS, assert_same, make_layout


def off_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, for which no device is the CPU."""
    code = function.__code__
    assert "cpu" in code.co_consts
    constants = tuple("none" if c == "cpu" else c for c in code.co_consts)
    changed = FunctionType(code.replace(co_consts=constants), function.__globals__)
    changed.__kwdefaults__ = function.__kwdefaults__
    return changed


@pytest.fixture(params=["cpu kernel", "plain"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain":
        for function in (flash, flash_backward):
            monkeypatch.setattr(plain, function.__name__, off_cpu(function))


@pytest.mark.usefixtures("_kernel")
@DTYPES
@pytest.mark.parametrize(
    ("name", "heads", "key_heads"),
    [*((name, 4, 2) for name in GROUPS), ("uneven", 4, 4), ("both", 6, 1)],
)
def test_plain_kernel_matches_softmax(
    name: str, heads: int, key_heads: int, dtype: torch.dtype, tolerance: float
) -> None:
    assert_same(GROUPS[name], heads, key_heads, dtype, tolerance)


def test_buckets() -> None:
    buckets = {name: make_layout(groups).buckets for name, groups in GROUPS.items()}
    assert [b.padding is None for b in buckets["even"]] == [True, True]
    (own, prompt) = buckets["one group"]
    assert own.padding.tolist() == [[False] * 4 + [True]] * 2 + [[False] * 5]
    assert own.index.tolist() == [[7, 8, 9, 10, 7], [16, 17, 18, 19, 16], [11, 12, 13, 14, 15]]
    assert prompt.index.tolist() == [[*range(7)]]
    for name, groups in GROUPS.items():
        widths = [b.index.shape[1] for b in buckets[name]]
        assert widths == sorted(widths)
        real = [i for b in buckets[name] for i in b.index[real_places(b)].tolist()]
        assert sorted(real) == list(range(sum(p + sum(c) for p, c in groups))), "each token once"
        for b in buckets[name]:
            shortest = real_places(b).sum(-1).min().item()
            assert b.index.shape[1] <= 1.25 * shortest


def real_places(b: plain.Bucket) -> Tensor:
    return torch.ones_like(b.index, dtype=torch.bool) if b.padding is None else ~b.padding
