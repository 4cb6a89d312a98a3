"""Which kernel is chosen, and what becomes of one that fails or is wrong."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_cli.models.kernels.choice import TABLE, Needs, Row, choose
from grpo_cli.models.kernels.plain import Plain
from grpo_cli.models.kernels.varlen import RepeatedVarlen, Varlen
from tests.conftest import CPU
from tests.models.kernels.fakes import Calls

CUDA = torch.device("cuda")
HALF = Needs(CUDA, torch.bfloat16, 64, 4, 2)
HERE = Needs(CPU, torch.float32, 16, 4, 2)  # where kernels of these tests are really run


@pytest.mark.parametrize(
    ("needs", "names"),
    [
        (HALF, ["varlen", "varlen", "flex", "plain"]),
        (replace(HALF, key_heads=4), ["varlen", "flex", "plain"]),
        (replace(HALF, head_dim=512), ["flex", "plain"]),
        (replace(HALF, dtype=torch.float32), ["plain"]),
        (replace(HALF, device=CPU), ["plain"]),
        (HERE, ["plain"]),
    ],
    ids=str,
)
def test_the_order_of_each_case(needs: Needs, names: list[str]) -> None:
    assert [r.name for r in TABLE if r.fits(needs)] == names


class Off(Plain):
    """Multiplies one result by 1.1: 0 the output, 1 to 3 the gradients."""

    def __init__(self, which: int) -> None:
        self.which = which

    def forward(self, layout: Any, scale: float, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(layout, scale, *tensors)
        return out * (1.1 if self.which == 0 else 1), lse

    def backward(self, layout: Any, scale: float, *tensors: Tensor) -> tuple[Tensor, ...]:
        grads = super().backward(layout, scale, *tensors)
        return tuple(g * (1.1 if self.which == i else 1) for i, g in enumerate(grads, 1))


class Broken(Plain):
    def forward(self, layout: Any, scale: float, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no kernel image is available\nmore")


def row(name: str, kernel: Any) -> Row:
    return Row(name, lambda: kernel, lambda needs: True)


def outcome(*rows: Row) -> tuple[Any, list[str]]:
    notes: list[str] = []
    return choose(HERE, say=notes.append, table=[*rows, TABLE[-1]]), notes


def test_first_passing_kernel_is_taken() -> None:
    calls = Calls()
    right = Varlen(calls.varlen, calls.varlen_backward)
    kernel, notes = outcome(row("first", right), row("second", Plain()))
    assert (kernel, notes) == (right, [])
    assert {c.key_heads for c in calls.made} == {2}


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (Off(0), "its output differs by 1.0e-01 from float64, more than 1e-04"),
        (Off(1), "its gradient of queries differs by 1.0e-01"),
        (Off(2), "its gradient of keys differs by 1.0e-01"),
        (Off(3), "its gradient of values differs by 1.0e-01"),
        (Broken(), "RuntimeError: no kernel image is available)"),
    ],
    ids=["output", "dq", "dk", "dv", "fails"],
)
def test_rejected_kernel_is_noted(kernel: Any, why: str) -> None:
    taken, notes = outcome(row("new", kernel))
    assert type(taken) is Plain
    (note,) = notes
    assert note.startswith(f"note: attention kernel new is not used ({why}")


def test_grouped_heads_fall_back_to_repeated_ones() -> None:
    calls = Calls()

    def ungrouped(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        if query.shape[1] != key.shape[1]:
            raise RuntimeError("heads")
        return calls.varlen(query, key, *args, **kwargs)

    rows = [
        row("varlen", kind(ungrouped, calls.varlen_backward)) for kind in (Varlen, RepeatedVarlen)
    ]
    kernel, notes = outcome(*rows)
    assert (type(kernel), len(notes)) == (RepeatedVarlen, 1)


def test_processes_agree_on_the_kernel() -> None:
    reasons = iter(["on process 1"])
    asked: list[str | None] = []

    def agree_on(reason: str | None) -> str | None:
        asked.append(reason)
        return next(reasons)

    kernel = choose(
        HERE, say=lambda text: None, agree_on=agree_on, table=[row("new", Plain()), TABLE[-1]]
    )
    assert (type(kernel), asked) == (Plain, [None])


def test_heads_and_precision_are_read_from_the_model(model: Any) -> None:
    config = model.config
    config.num_key_value_heads = 2
    expected = Needs(CPU, torch.float32, config.hidden_size // config.num_attention_heads,
                     config.num_attention_heads, 2)  # fmt: skip
    assert Needs.of(model, CPU) == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert Needs.of(model, CPU).dtype == torch.bfloat16
