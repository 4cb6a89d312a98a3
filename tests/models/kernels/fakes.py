"""Stands in for CUDA's varlen operators: records arguments, and computes the result on the CPU."""

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from grpo_cli.models.kernels.arithmetic import by_head, flash, flash_backward


@dataclass
class Call:
    """The arguments of one call that a test looks at."""

    is_backward: bool
    causal: bool
    scale: float
    key_heads: int


@dataclass
class Calls:
    """Records calls of the operators of torch 2.11 to 2.13."""

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
