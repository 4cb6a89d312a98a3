"""Attention over sequences that share a prefix, as an attention function of transformers.

The tokens of a group lie in one row, N tokens long: its prompt once, then its completions. Causal
attention inside each segment (a prompt, or a completion), and attention of all completions of a
prompt to that prompt, are computed apart and merged by their log-sum-exp; so nothing is padded,
repeated or masked, and nothing of size N x N is made. The backward gives each part the merged
output and log-sum-exp, with which a flash kernel's backward is that part's share of the gradient
(as in Ring Attention, arXiv 2310.01889).

A model is made to call `attend` of whatever is passed to its forward as `attending`, in place of
its own attention: a `Layout` here, a cache in `engine.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "grpo_sdpa"  # of the implementation: transformers' sdpa, unless it is given `attending`
WASTE = 1.25  # rows of one bucket are padded to at most this many times the shortest

# Keyword arguments of attention that change its value and that `attend` does not know.
UNKNOWN = ("softcap", "s_aux", "position_bias", "head_mask")


class UnsupportedModelError(Exception):
    """The model's attention cannot be computed by parts; the message says why."""


class Attending(Protocol):
    """What computes attention in place of the model's own."""

    longest: int  # tokens that a query sees at most

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """The attention's output, [N, Hq, D].

        Args:
            query: [N, Hq, D]. key, value: [N, Hkv, D], Hq a multiple of Hkv.
        """
        ...


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attending: Attending | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention function of transformers: [1, H, N, D] heads to [1, N, Hq, D] outputs.

    Raises:
        UnsupportedModelError: `attending` is given, and the model asks for what it does not do.
    """
    if attending is None:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            sliding_window=sliding_window,
            **kwargs,
        )
        return output
    if dropout:
        raise UnsupportedModelError("its attention has dropout")
    window = window_of(module) if sliding_window is None else sliding_window
    if window is not None and window < attending.longest:
        raise UnsupportedModelError(f"its attention sees {window} tokens and no more")
    for name in UNKNOWN:
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"its attention has {name}")
    heads = (t[0].transpose(0, 1) for t in (query, key, value))  # [N, H, D] each
    q, k, v = heads
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    # Under autocast, rotary embeddings leave queries and keys wider than values.
    return attending.attend(layer, q.to(v.dtype), k.to(v.dtype), v, scale)[None], None


def window_of(module: nn.Module) -> int | None:
    """Tokens that a layer sees at most, by its config: some models tell it to the mask alone.

    Llama 4, Qwen2-MoE and Phi-3.5-MoE do. Rollouts shorter than the window would not show it.
    """
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    kind = kinds[module.layer_idx] if kinds else "sliding_attention"  # type: ignore[index]
    names = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    found: int | None = getattr(config, names.get(kind, ""), None)
    return found


def narrowest_window(model: nn.Module) -> float:
    """Tokens that the layer sees that sees fewest; infinity where all see everything."""
    windows = (window_of(m) for m in model.modules() if hasattr(m, "layer_idx"))
    return min((w for w in windows if w is not None), default=math.inf)


def name_of(model: PreTrainedModel) -> str:
    """The attention that a model is set to use."""
    return str(model.config._attn_implementation)


def install(model: PreTrainedModel) -> bool:
    """Makes a model that uses sdpa take `attending`; False if it cannot."""
    if name_of(model) == NAME:
        return True
    if name_of(model) != "sdpa" or not model._can_set_attn_implementation():
        return False
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return True


def no_mask(device: torch.device) -> Tensor:
    """A mask that transformers takes for a finished one, so that it makes none; nobody reads it."""
    return torch.empty(1, 1, 1, 1, device=device)


@dataclass(frozen=True)
class Prefix:
    """Queries [first, last) see all keys [start, end)."""

    start: int
    end: int
    first: int
    last: int


class Layout:
    """Which tokens of a row of N see which."""

    def __init__(
        self, segments: Sequence[tuple[int, int]], prefixes: Sequence[Prefix], device: torch.device
    ) -> None:
        """segments: [start, end) of each, together all N tokens, causal inside."""
        self.segments = list(segments)
        self.prefixes = list(prefixes)
        self.device = device
        reaches = [(p.first, p.last, p.end - p.start) for p in prefixes]
        self.longest = max(
            end - start + sum(n for first, last, n in reaches if first <= start < last)
            for start, end in segments
        )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:  # its backward sums over the query heads of a key head
            key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
        out: Tensor = _Attention.apply(query, key, value, self, scale)  # type: ignore[no-untyped-call]
        return out

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The segments, those of like length together."""
        chunks: list[list[tuple[int, int]]] = []
        for segment in sorted(self.segments, key=lambda s: s[1] - s[0]):
            length = segment[1] - segment[0]
            if chunks and length <= WASTE * (chunks[-1][0][1] - chunks[-1][0][0]):
                chunks[-1].append(segment)
            else:
                chunks.append([segment])
        return [Bucket.of(chunk, self.device) for chunk in chunks]

    @cached_property
    def ragged(self) -> Ragged:
        """The same for kernels that take rows of unequal length."""
        return Ragged.of(self)


@dataclass(frozen=True)
class Bucket:
    """n segments side by side, padded behind to W columns; causality hides the padding."""

    index: Tensor  # [n, W] token of each place; of padding, its segment's first
    padding: Tensor | None  # [n, W] True there; None if there is none

    @classmethod
    def of(cls, segments: Sequence[tuple[int, int]], device: torch.device) -> Bucket:
        starts = torch.tensor([[start] for start, _ in segments], device=device)
        lengths = torch.tensor([[end - start] for start, end in segments], device=device)
        columns = torch.arange(int(lengths.max()), device=device)
        padding = columns >= lengths
        index = starts + columns.masked_fill(padding, 0)
        return cls(index, padding if bool(padding.any()) else None)

    def take(self, flat: Tensor) -> Tensor:
        """[N, H, ...] -> [n, H, W, ...]."""
        return flat[self.index].transpose(1, 2)

    def put(self, flat: Tensor, rows: Tensor) -> None:
        """flat[N, H, ...] = rows [n, H, W, ...], where they are no padding."""
        rows = rows.transpose(1, 2)
        if self.padding is None:
            flat[self.index.flatten()] = rows.flatten(0, 1)
        else:
            flat[self.index[~self.padding]] = rows[~self.padding]

    def blank(self, rows: Tensor, value: float) -> Tensor:
        """Rows [n, H, W, ...] with `value` on the padding."""
        if self.padding is None:
            return rows
        mask = self.padding[:, None].reshape(len(rows), 1, -1, *[1] * (rows.ndim - 3))
        return rows.masked_fill(mask, value)


class _Attention(torch.autograd.Function):
    """[N, H, D] queries, keys and values to outputs, by a layout."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float
    ) -> Tensor:
        kernel = _Varlen if _has_varlen(query) else _Bucketed
        out, lse = kernel.forward(query, key, value, layout, scale)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scale, ctx.kernel = layout, scale, kernel
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.kernel.backward(grad, *ctx.saved_tensors, ctx.layout, ctx.scale)
        return (*grads, None, None)


class _Bucketed:
    """Segments in padded buckets, prefixes one by one. Any device, any dtype."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(query)  # [N, H, D]
        lse = query.new_empty(query.shape[:2], dtype=wide(query.dtype))  # [N, H]
        for bucket in layout.buckets:
            rows = (bucket.take(t) for t in (query, key, value))
            part, part_lse = flash(*rows, causal=True, scale=scale)
            bucket.put(out, part)
            bucket.put(lse, part_lse)
        for p in layout.prefixes:
            queries = slice(p.first, p.last)
            part, part_lse = flash(
                by_head(query[queries]),
                by_head(key[p.start : p.end]),
                by_head(value[p.start : p.end]),
                causal=False,
                scale=scale,
            )
            out[queries], lse[queries] = merge(
                out[queries], lse[queries], part[0].transpose(0, 1), part_lse[0].transpose(0, 1)
            )
        return out, lse

    @staticmethod
    def backward(
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        layout: Layout,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = [torch.empty_like(t) for t in (query, key, value)]
        for bucket in layout.buckets:
            q, k, v, o = (bucket.take(t) for t in (query, key, value, out))
            # No gradient comes from padding, and exp(score − inf) is 0 there.
            do, part_lse = bucket.blank(bucket.take(grad), 0), bucket.blank(bucket.take(lse), inf)
            parts = flash_backward(do, q, k, v, o, part_lse, causal=True, scale=scale)
            for whole, part in zip(grads, parts, strict=True):
                bucket.put(whole, part)
        for p in layout.prefixes:
            keys, queries = slice(p.start, p.end), slice(p.first, p.last)
            q, o, do = (by_head(t[queries]) for t in (query, out, grad))
            k, v = (by_head(t[keys]) for t in (key, value))
            part_lse = lse[queries].transpose(0, 1)[None]
            parts = flash_backward(do, q, k, v, o, part_lse, causal=False, scale=scale)
            for whole, rows, part in zip(grads, (queries, keys, keys), parts, strict=True):
                whole[rows] += part[0].transpose(0, 1)
        return grads[0], grads[1], grads[2]


@dataclass(frozen=True)
class Ragged:
    """A layout's segments and prefixes as offsets, int32 as the kernels want them."""

    segments: Tensor  # [segments + 1] offsets of the N tokens
    longest_segment: int
    queries: Tensor  # [M] tokens that see a prefix
    keys: Tensor  # [K] tokens of the prefixes
    query_offsets: Tensor  # [prefixes + 1]
    key_offsets: Tensor  # [prefixes + 1]
    most_queries: int
    longest_prefix: int

    @classmethod
    def of(cls, layout: Layout) -> Ragged:
        device = layout.device

        def offsets(lengths: Sequence[int]) -> Tensor:
            return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)

        def tokens(ranges: Sequence[tuple[int, int]]) -> Tensor:
            parts = [torch.arange(a, b, device=device) for a, b in ranges]
            return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long, device=device)

        ordered = sorted(layout.segments)
        lengths = [end - start for start, end in ordered]
        queries = [(p.first, p.last) for p in layout.prefixes]
        keys = [(p.start, p.end) for p in layout.prefixes]
        of_queries, of_keys = [b - a for a, b in queries], [b - a for a, b in keys]
        return cls(
            segments=offsets(lengths),
            longest_segment=max(lengths),
            queries=tokens(queries),
            keys=tokens(keys),
            query_offsets=offsets(of_queries),
            key_offsets=offsets(of_keys),
            most_queries=max(of_queries, default=0),
            longest_prefix=max(of_keys, default=0),
        )


class _Varlen:
    """PyTorch's flash attention for rows of unequal length: CUDA, half precision."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float
    ) -> tuple[Tensor, Tensor]:
        r = layout.ragged
        out, lse = _Varlen._part(
            query, key, value, r.segments, r.segments, r.longest_segment, r.longest_segment,
            True, scale,
        )  # fmt: skip
        if layout.prefixes:
            part, part_lse = _Varlen._part(
                query[r.queries], key[r.keys], value[r.keys], r.query_offsets, r.key_offsets,
                r.most_queries, r.longest_prefix, False, scale,
            )  # fmt: skip
            merged = merge(out[r.queries], lse[r.queries], part, part_lse)
            out[r.queries], lse[r.queries] = merged
        return out, lse

    @staticmethod
    def _part(
        q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor,
        longest_q: int, longest_k: int, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, q_offsets, k_offsets, longest_q, longest_k, 0.0, causal, False, scale=scale
        )
        return out, lse.transpose(0, 1).contiguous()  # [N, H, D], [N, H]

    @staticmethod
    def backward(
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        layout: Layout,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        r = layout.ragged
        grads = _Varlen._part_backward(
            grad, query, key, value, out, lse, r.segments, r.segments, r.longest_segment,
            r.longest_segment, True, scale,
        )  # fmt: skip
        if layout.prefixes:
            parts = _Varlen._part_backward(
                grad[r.queries], query[r.queries], key[r.keys], value[r.keys], out[r.queries],
                lse[r.queries], r.query_offsets, r.key_offsets, r.most_queries, r.longest_prefix,
                False, scale,
            )  # fmt: skip
            for whole, rows, part in zip(grads, (r.queries, r.keys, r.keys), parts, strict=True):
                whole.index_add_(0, rows, part)
        return grads

    @staticmethod
    def _part_backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        q_offsets: Tensor, k_offsets: Tensor, longest_q: int, longest_k: int,
        causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), q, k, v, out, lse.transpose(0, 1).contiguous(), q_offsets,
            k_offsets, longest_q, longest_k, 0.0, causal, no_dropout, no_dropout, scale=scale,
        )  # fmt: skip
        return grads


inf = float("inf")


def _has_varlen(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What a log-sum-exp is kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def by_head(flat: Tensor) -> Tensor:
    """[M, H, D] -> [1, H, M, D]."""
    return flat.transpose(0, 1)[None]


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to two sets of keys as attention to both: outputs [..., D], log-sum-exps [...]."""
    both = torch.logaddexp(lse, other_lse)
    share, other_share = (lse - both).exp()[..., None], (other_lse - both).exp()[..., None]
    return (out * share + other * other_share).to(out.dtype), both


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention with its log-sum-exp: queries [n, H, M, D] -> ([n, H, M, D], [n, H, M]).

    Args:
        mask: [n, 1, 1, K] added to the scores.
    """
    if query.device.type == "cpu":
        pair: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
        return pair
    scores = _scores(query, key, causal, scale)
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(value.dtype) @ value, lse


def flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values; `out` and `lse` may be of more keys than these."""
    if query.device.type == "cpu":
        grads: tuple[Tensor, Tensor, Tensor] = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, query, key, value, out, lse, 0.0, causal, scale=scale
            )
        )
        return grads
    scores = _scores(query, key, causal, scale)
    grad, out, q, k, v = (t.to(scores.dtype) for t in (grad, out, query, key, value))
    p = (scores - lse[..., None]).exp()  # [n, H, M, K]
    of_scores = p * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scale
    parts = of_scores @ k, of_scores.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad
    dq, dk, dv = (part.to(query.dtype) for part in parts)
    return dq, dk, dv


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    """[n, H, M, K], −inf where a query does not see a key."""
    scores = (query @ key.transpose(-1, -2)).to(wide(query.dtype)) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -inf)
    return scores
