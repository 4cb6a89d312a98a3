"""Torch's kernel of rows of unequal length: its offsets, and what it is called with."""

from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_cli.models.attention import usual_kernel
from grpo_cli.models.kernels.flex import Flex
from grpo_cli.models.kernels.plain import ByParts, Plain, by_head, flash, flash_backward
from grpo_cli.models.kernels.varlen import Varlen
from tests.models.kernels.layouts import DTYPES, GROUPS, assert_same, make_heads, make_layout


@dataclass
class Call:
    """The arguments of one call that a test looks at."""

    is_backward: bool
    causal: bool
    scale: float
    key_heads: int


@dataclass
class Calls:
    """Stands in for CUDA's operators of torch 2.11 to 2.13: records calls, computes on the CPU."""

    made: list[Call] = field(default_factory=list)

    def varlen(
        self, query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor,
        max_q: int, max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *,
        scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Returns out [M, Hq, D], lse [Hq, M], and what the operator returns besides."""
        assert not dropout_p
        assert not return_debug_mask
        self.made.append(Call(False, is_causal, scale, key.shape[1]))
        k, v = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
        done = [
            flash(by_head(query[a]), by_head(k[b]), by_head(v[b]), causal=is_causal, scale=scale)
            for a, b in rows_of(cum_seq_q, cum_seq_k, max_q, max_k)
        ]
        out = torch.cat([o[0].transpose(0, 1) for o, _ in done])
        return out, torch.cat([s[0] for _, s in done], -1), torch.empty(0), torch.empty(0)

    def varlen_backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
        logsumexp: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int,
        dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Tensor, *, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert not dropout_p
        assert grad_out.is_contiguous()
        assert logsumexp.is_contiguous()
        self.made.append(Call(True, is_causal, scale, key.shape[1]))
        repeats = query.shape[1] // key.shape[1]
        k, v = (t.repeat_interleave(repeats, 1) for t in (key, value))
        done = []
        for a, b in rows_of(cum_seq_q, cum_seq_k, max_q, max_k):
            rows = [by_head(t) for t in (grad_out[a], query[a], k[b], v[b], out[a])]
            lses = logsumexp[:, a][None]
            done.append(flash_backward(*rows, lses, causal=is_causal, scale=scale))
        dq, dk, dv = (torch.cat([t[0].transpose(0, 1) for t in p]) for p in zip(*done, strict=True))
        return dq, *(t.unflatten(1, (-1, repeats)).sum(2) for t in (dk, dv))


def rows_of(
    q_offsets: Tensor, k_offsets: Tensor, longest_q: int, longest_k: int
) -> list[tuple[slice, slice]]:
    """Returns the queries and the keys of each row."""
    assert q_offsets.dtype == k_offsets.dtype == torch.int32
    a, b = (list(pairwise(offsets.tolist())) for offsets in (q_offsets, k_offsets))
    assert longest_q == max(y - x for x, y in a)
    assert longest_k == max(y - x for x, y in b)
    return [(slice(*x), slice(*y)) for x, y in zip(a, b, strict=True)]


def test_ragged_by_hand() -> None:
    segments, r = make_layout([(3, [2, 1]), (4, [])]).ragged
    assert segments.query_offsets.tolist() == segments.key_offsets.tolist() == [0, 3, 5, 6, 10]
    assert (segments.most_queries, segments.most_keys, segments.causal) == (4, 4, True)
    assert r.query_offsets.dtype == r.key_offsets.dtype == torch.int32
    assert (r.queries.tolist(), r.keys.tolist()) == ([3, 4, 5], [0, 1, 2])
    assert (r.query_offsets.tolist(), r.key_offsets.tolist()) == ([0, 3], [0, 3])
    assert (r.most_queries, r.most_keys, r.causal) == (3, 3, False)
    assert len(make_layout([(4, [])]).ragged) == 1


@DTYPES
@pytest.mark.parametrize("name", GROUPS)
def test_match_softmax(name: str, dtype: torch.dtype, tolerance: float) -> None:
    calls = Calls()
    kernel = Varlen(calls.varlen, calls.varlen_backward)
    assert_same(GROUPS[name], 4, 2, dtype, tolerance, kernel)
    parts = 2 if any(completions for _, completions in GROUPS[name]) else 1
    assert [c.is_backward for c in calls.made] == [False] * parts + [True] * parts
    assert [c.causal for c in calls.made] == [True, False][:parts] * 2, "segments, then prefixes"
    assert {c.scale for c in calls.made} == {0.3}
    assert {c.key_heads for c in calls.made} == {2}, "they are not repeated"


def names(op: Any) -> tuple[list[str], list[str]]:
    """Arguments of an operator: (by place, by name)."""
    arguments = op.default._schema.arguments
    placed = [a.name for a in arguments if not a.kwarg_only]
    return placed, [a.name for a in arguments if a.kwarg_only]


def test_arguments_of_the_cuda_operators() -> None:
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
@pytest.mark.parametrize("kernel", [Varlen, Flex])
@pytest.mark.parametrize("name", GROUPS)
def test_cuda_kernels_match_plain(name: str, kernel: type[ByParts | Flex]) -> None:
    inputs, grad = make_heads(GROUPS[name], 4, 2, torch.bfloat16)
    q, k, v, grad = (t.cuda().repeat(1, 1, 8) for t in (*inputs, grad))  # heads of 64
    found = []
    for each, dtype in ((kernel(), q.dtype), (Plain(), q.dtype), (Plain(), torch.float64)):
        layout = make_layout(GROUPS[name], torch.device("cuda"))
        given = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        out = each.attend(layout, *given, 0.1)
        found.append([out, *torch.autograd.grad(out, given, grad.to(dtype))])
    for mine, plain, right in zip(*found, strict=True):
        assert mine.dtype == plain.dtype
        assert (mine - right).norm() < 3 * (plain - right).norm()


@pytest.mark.parametrize(
    ("device", "dtype", "width", "capability", "kernel"),
    [
        ("cuda", torch.bfloat16, 64, (9, 0), Varlen),
        ("cuda", torch.float16, 64, (7, 5), Flex),
        ("cuda", torch.bfloat16, 512, (9, 0), Flex),
        ("cuda", torch.float32, 64, (9, 0), Plain),
        ("cpu", torch.bfloat16, 64, (9, 0), Plain),
    ],
    ids=str,
)
def test_kernel_of_each_case(
    device: str,
    dtype: torch.dtype,
    width: int,
    capability: tuple[int, int],
    kernel: type[ByParts | Flex],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    query: Any = torch.empty(3, 4, width, dtype=dtype)
    if device == "cuda":
        query = SimpleNamespace(is_cuda=True, dtype=dtype, shape=query.shape, device=device)
    assert type(usual_kernel(query)) is kernel
