"""Kernels of rows of unequal length: their offsets, and what each is called with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_cli.models.kernels import flash_attn
from grpo_cli.models.kernels.base import ByParts
from grpo_cli.models.kernels.flash_attn import Flash2, Flash3
from grpo_cli.models.kernels.plain import Plain
from grpo_cli.models.kernels.ragged import RaggedKernel
from grpo_cli.models.kernels.varlen import RepeatedVarlen, Varlen
from tests.models.kernels.fakes import Calls
from tests.models.kernels.layouts import DTYPES, GROUPS, assert_same, make_heads, make_layout


def test_ragged_by_hand() -> None:
    segments, r = make_layout([(3, [2, 1]), (4, [])]).ragged
    assert segments.query_offsets.tolist() == segments.key_offsets.tolist() == [0, 3, 5, 6, 10]
    assert (segments.most_queries, segments.most_keys, segments.causal) == (4, 4, True)
    assert r.query_offsets.dtype == r.key_offsets.dtype == torch.int32
    assert (r.queries.tolist(), r.keys.tolist()) == ([3, 4, 5], [0, 1, 2])
    assert (r.query_offsets.tolist(), r.key_offsets.tolist()) == ([0, 3], [0, 3])
    assert (r.most_queries, r.most_keys, r.causal) == (3, 3, False)
    assert len(make_layout([(4, [])]).ragged) == 1


def kernels(calls: Calls) -> dict[str, RaggedKernel]:
    """Each kernel with functions that record their arguments and compute the right result."""
    return {
        "varlen": Varlen(calls.varlen, calls.varlen_backward),
        "repeated varlen": RepeatedVarlen(calls.varlen, calls.varlen_backward),
        "flash2": Flash2(calls.flash2, calls.flash2_backward),
        "flash3": Flash3(calls.flash3, calls.flash3_backward),
    }


@DTYPES
@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("kernel", kernels(Calls()))
def test_each_kernel_gives_one_softmax(
    kernel: str, name: str, dtype: torch.dtype, tolerance: float
) -> None:
    calls = Calls()
    assert_same(GROUPS[name], 4, 2, dtype, tolerance, kernels(calls)[kernel])
    parts = 2 if any(completions for _, completions in GROUPS[name]) else 1
    assert [c.is_backward for c in calls.made] == [False] * parts + [True] * parts
    assert [c.causal for c in calls.made] == [True, False][:parts] * 2, "segments, then prefixes"
    assert {c.scale for c in calls.made} == {0.3}
    # Only where the operator may refuse groups are key heads repeated.
    assert {c.key_heads for c in calls.made} == {4 if kernel == "repeated varlen" else 2}


def test_the_hubs_kernel_is_flash2(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    asked: list[str] = []

    class Interface:  # the module flash_attn_interface of the loaded kernel
        _flash_attn_varlen_forward = staticmethod(calls.flash2)
        _flash_attn_varlen_backward = staticmethod(calls.flash2_backward)

    class Loaded:
        flash_attn_varlen_func = SimpleNamespace(__module__="loaded.interface")

    class Hub:
        @staticmethod
        def get_kernel(repository: str) -> Any:
            asked.append(repository)
            return Loaded

    monkeypatch.setitem(flash_attn.sys.modules, "kernels", Hub)
    monkeypatch.setitem(flash_attn.sys.modules, "loaded.interface", Interface)
    assert_same(GROUPS["both"], 4, 2, torch.float32, 1e-4, Flash2.of_hub())
    assert asked == ["kernels-community/flash-attn2"]
    assert calls.made


def names(op: Any) -> tuple[list[str], list[str]]:
    """Arguments of an operator: (by place, by name)."""
    arguments = op.default._schema.arguments
    placed = [a.name for a in arguments if not a.kwarg_only]
    return placed, [a.name for a in arguments if a.kwarg_only]


def test_cudas_kernels_take_what_they_are_given() -> None:
    offsets = ["cum_seq_q", "cum_seq_k", "max_q", "max_k"]
    placed, named = names(torch.ops.aten._flash_attention_forward)
    forward = ["query", "key", "value", *offsets, "dropout_p", "is_causal", "return_debug_mask"]
    assert placed == forward
    assert "scale" in named
    returns = torch.ops.aten._flash_attention_forward.default._schema.returns
    assert [r.name for r in returns][:2] == ["output", "softmax_logsumexp"]
    placed, named = names(torch.ops.aten._flash_attention_backward)
    assert placed == [
        "grad_out", "query", "key", "value", "out", "logsumexp", *offsets, "dropout_p", "is_causal",
        "rng_state", "unused",
    ]  # fmt: skip
    assert "scale" in named
    assert len(torch.ops.aten._flash_attention_backward.default._schema.returns) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [Varlen, RepeatedVarlen])
@pytest.mark.parametrize("name", GROUPS)
def test_cudas_kernels_give_what_buckets_give(name: str, kernel: type[Varlen]) -> None:
    inputs, grad = make_heads(GROUPS[name], 4, 2, torch.bfloat16)
    q, k, v, grad = (t.cuda().repeat(1, 1, 8) for t in (*inputs, grad))  # heads of 64
    found = []
    for each in (kernel(), Plain()):
        assert isinstance(each, ByParts)
        layout = make_layout(GROUPS[name], torch.device("cuda"), each)
        given = [t.clone().requires_grad_() for t in (q, k, v)]
        out = layout.attend(0, *given, 0.1)
        found.append([out, *torch.autograd.grad(out, given, grad)])
    for mine, theirs in zip(*found, strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - theirs).abs().max() < 0.02 * theirs.abs().max().clamp(min=1)
