"""Attention over sequences that share a prefix, as an attention function of transformers.

The tokens of a group lie in one row of N tokens: the prompt once, then its completions. Two parts
are computed separately and merged by their log-sum-exp: causal attention inside each segment (a
prompt or a completion), and attention of all completions of a prompt to that prompt. Nothing is
padded, repeated or masked, and no tensor of size N x N exists. The backward gives each part the
merged output and log-sum-exp, with which a flash kernel's backward returns that part's share of the
gradient (as in Ring Attention, arXiv 2310.01889).

Example: a prompt p of 3 tokens with completions a of 2 tokens and b of 1 token, N = 6

          p0 p1 p2 a0 a1 b0
    p0    x                     segments  [0, 3), [3, 5), [5, 6)
    p1    x  x                  prefixes  Prefix(start=0, end=3, first=3, last=6):
    p2    x  x  x                         queries 3, 4, 5 also see keys 0, 1, 2
    a0    x  x  x  x
    a1    x  x  x  x  x         a1 attends to (a0, a1): output o, log-sum-exp s; and to
    b0    x  x  x        x      (p0, p1, p2): o', s'; merged (e^s o + e^s' o') / (e^s + e^s')

A model calls `attend` of the object that its forward gets as `attending`, in place of its own
attention: a `Layout` from this file, or the cache of `generation/engine.py`.
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

from grpo_cli.models.families import ATTENTION_EXTRAS, window_of

NAME = "grpo_sdpa"  # the implementation's name: transformers' sdpa unless `attending` is passed
MAX_PADDING = 1.25  # rows of one bucket are padded to at most this many times the shortest


NOT_PASSED_ON = "it passes no further arguments to its attention"  # so that `attending` is lost


class UnsupportedModelError(Exception):
    """Raised when a model's attention cannot be computed by parts; the message says why."""


class Attending(Protocol):
    """An object that computes attention in place of the model's own."""

    longest: int  # the largest number of tokens that a query sees

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Returns the attention's output, [N, Hq, D].

        Args:
            layer: index of the decoder layer.
            query: [N, Hq, D]. key, value: [N, Hkv, D], Hq a multiple of Hkv.
            scale: factor of the scores, usually D ** -0.5.
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
    """Computes attention as transformers calls it: [1, H, N, D] heads to [1, N, Hq, D] outputs.

    Raises:
        UnsupportedModelError: `attending` is passed, and the model's attention has dropout, a
            window shorter than the rows or an argument that `attending` does not compute.
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
    options = {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window, **kwargs}
    return _attend(attending, module, query, key, value, options), None


# The sequences differ from batch to batch, and would be compiled anew.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend(
    attending: Attending,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Returns the attention's output, [1, N, Hq, D]."""
    if options["dropout"]:
        raise UnsupportedModelError("its attention has dropout")
    window = options["sliding_window"]
    window = window_of(module) if window is None else window
    if window is not None and window < attending.longest:
        raise UnsupportedModelError(f"its attention sees {window} tokens and no more")
    for name in ATTENTION_EXTRAS:
        if options.get(name) is not None:
            raise UnsupportedModelError(f"its attention has {name}")
    heads = (t[0].transpose(0, 1) for t in (query, key, value))  # [N, H, D] each
    q, k, v = heads
    scale = q.shape[-1] ** -0.5 if options["scaling"] is None else options["scaling"]
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    # Under autocast, rotary embeddings leave queries and keys wider than values.
    return attending.attend(layer, q.to(v.dtype), k.to(v.dtype), v, scale)[None]


def narrowest_window(model: nn.Module) -> float:
    """Returns the smallest attention window of a model's layers in tokens; infinity without one."""
    windows = (window_of(m) for m in model.modules() if hasattr(m, "layer_idx"))
    return min((w for w in windows if w is not None), default=math.inf)


def name_of(model: PreTrainedModel) -> str:
    """Returns the name of the attention implementation that a model uses."""
    return str(model.config.get_text_config(decoder=True)._attn_implementation)


def install(model: PreTrainedModel) -> bool:
    """Makes a model that uses sdpa accept `attending`.

    Returns:
        False if the model uses another attention or cannot change it; it is then unchanged.
    """
    if name_of(model) == NAME:
        return True
    if name_of(model) != "sdpa" or not model._can_set_attn_implementation():
        return False
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    # Of the decoder alone: the layers of a vision tower have no number, and see all of an image.
    text = model.config.get_text_config(decoder=True)
    part = next((n for n in model.config.sub_configs if getattr(model.config, n, None) is text), "")
    model.set_attn_implementation({part: NAME} if part else NAME)
    return True


def no_mask(device: torch.device) -> Tensor:
    """Returns a [1, 1, 1, 1] mask that transformers takes for a finished one, so it makes none."""
    return torch.empty(1, 1, 1, 1, device=device)


@dataclass(frozen=True)
class Prefix:
    """Keys [start, end) of a prompt that all queries [first, last) see."""

    start: int
    end: int
    first: int
    last: int


class Layout:
    """The tokens that each token of a row of N sees; see the example at the top of this file."""

    def __init__(
        self, segments: Sequence[tuple[int, int]], prefixes: Sequence[Prefix], device: torch.device
    ) -> None:
        """Describes a row.

        Args:
            segments: [start, end) of each segment, together all N tokens; causal inside.
            prefixes: prompts that other segments see as well.
            device: where the indices for the kernels are made.
        """
        self.segments = list(segments)
        self.prefixes = list(prefixes)
        self.device = device
        self.is_used = False  # whether a model has called `attend`
        reaches = [(p.first, p.last, p.end - p.start) for p in prefixes]
        self.longest = max(
            end - start + sum(n for first, last, n in reaches if first <= start < last)
            for start, end in segments
        )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Returns the attention's output [N, Hq, D]; see `Attending`. Differentiable once."""
        self.is_used = True
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:  # its backward sums over the query heads of a key head
            key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
        out: Tensor = _Attention.apply(query, key, value, self, scale)  # type: ignore[no-untyped-call]
        return out

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The segments, grouped by similar length so that little is padded."""
        chunks: list[list[tuple[int, int]]] = []
        for segment in sorted(self.segments, key=lambda s: s[1] - s[0]):
            length = segment[1] - segment[0]
            if chunks and length <= MAX_PADDING * (chunks[-1][0][1] - chunks[-1][0][0]):
                chunks[-1].append(segment)
            else:
                chunks.append([segment])
        return [Bucket.of(chunk, self.device) for chunk in chunks]

    @cached_property
    def ragged(self) -> list[Ragged]:
        """The segments, and the prefixes if there are any, for kernels of unequal rows."""
        segments = sorted(self.segments)
        parts = [Ragged.of(segments, segments, self.device, causal=True)]
        if self.prefixes:
            queries = [(p.first, p.last) for p in self.prefixes]
            keys = [(p.start, p.end) for p in self.prefixes]
            parts.append(Ragged.of(queries, keys, self.device, causal=False))
        return parts


@dataclass(frozen=True)
class Bucket:
    """n segments as rows of W columns, padded on the right, where causality hides the padding."""

    index: Tensor  # [n, W] index of each token in the row of N; padding: the segment's first token
    padding: Tensor | None  # [n, W] True on padding; None without padding

    @classmethod
    def of(cls, segments: Sequence[tuple[int, int]], device: torch.device) -> Bucket:
        """Builds the bucket of n segments [start, end)."""
        starts = torch.tensor([[start] for start, _ in segments], device=device)
        lengths = torch.tensor([[end - start] for start, end in segments], device=device)
        columns = torch.arange(int(lengths.max()), device=device)
        padding = columns >= lengths
        index = starts + columns.masked_fill(padding, 0)
        return cls(index, padding if bool(padding.any()) else None)

    def take(self, flat: Tensor) -> Tensor:
        """Gathers [N, H, ...] -> [n, H, W, ...]."""
        return flat[self.index].transpose(1, 2)

    def put(self, flat: Tensor, rows: Tensor) -> None:
        """Writes rows [n, H, W, ...] into flat [N, H, ...], except padding."""
        rows = rows.transpose(1, 2)
        if self.padding is None:
            flat[self.index.flatten()] = rows.flatten(0, 1)
        else:
            flat[self.index[~self.padding]] = rows[~self.padding]

    def blank(self, rows: Tensor, value: float) -> Tensor:
        """Returns rows [n, H, W, ...] with `value` on the padding."""
        if self.padding is None:
            return rows
        mask = self.padding[:, None].reshape(len(rows), 1, -1, *[1] * (rows.ndim - 3))
        return rows.masked_fill(mask, value)


class _Attention(torch.autograd.Function):
    """Maps queries, keys and values [N, H, D] to outputs [N, H, D] by a layout."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float
    ) -> Tensor:
        kernel = _Varlen if _has_varlen(query) else _Bucketed
        out, lse = kernel.forward(layout, scale, query, key, value)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scale, ctx.kernel = layout, scale, kernel
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.kernel.backward(ctx.layout, ctx.scale, grad, *ctx.saved_tensors)
        return (*grads, None, None)


class _Bucketed:
    """Computes segments in padded buckets and prefixes one by one, on any device in any dtype."""

    @staticmethod
    def forward(layout: Layout, scale: float, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (out, lse) of tensors (query, key, value)."""
        query, key, value = tensors
        out = torch.empty_like(query)  # [N, H, D]
        lse = query.new_empty(query.shape[:2], dtype=wide(query.dtype))  # [N, H]
        for bucket in layout.buckets:
            rows = (bucket.take(t) for t in (query, key, value))
            part, part_lse = flash(*rows, causal=True, scale=scale)
            bucket.put(out, part)
            bucket.put(lse, part_lse)
        for p in layout.prefixes:
            queries = slice(p.first, p.last)
            k, v = (by_head(t[p.start : p.end]) for t in (key, value))
            part, part_lse = flash(by_head(query[queries]), k, v, scale=scale)
            out[queries], lse[queries] = merge(
                out[queries], lse[queries], part[0].transpose(0, 1), part_lse[0].transpose(0, 1)
            )
        return out, lse

    @staticmethod
    def backward(layout: Layout, scale: float, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients of tensors (grad, query, key, value, out, lse) 1 to 3."""
        grad, query, key, value, out, lse = tensors
        grads = [torch.empty_like(t) for t in (query, key, value)]
        for bucket in layout.buckets:
            q, k, v, o = (bucket.take(t) for t in (query, key, value, out))
            # No gradient comes from padding, and exp(score − inf) is 0 there.
            do, part_lse = bucket.blank(bucket.take(grad), 0), bucket.blank(bucket.take(lse), inf)
            parts = flash_backward(do, q, k, v, o, part_lse, causal=True, scale=scale)
            for total, part in zip(grads, parts, strict=True):
                bucket.put(total, part)
        for p in layout.prefixes:
            keys, queries = slice(p.start, p.end), slice(p.first, p.last)
            q, o, do = (by_head(t[queries]) for t in (query, out, grad))
            k, v = (by_head(t[keys]) for t in (key, value))
            part_lse = lse[queries].transpose(0, 1)[None]
            parts = flash_backward(do, q, k, v, o, part_lse, causal=False, scale=scale)
            for total, rows, part in zip(grads, (queries, keys, keys), parts, strict=True):
                total[rows] += part[0].transpose(0, 1)
        return tuple(grads)


@dataclass(frozen=True)
class Ragged:
    """Ranges of queries that each see a range of keys, as offsets: the form that kernels take."""

    queries: Tensor | slice  # [M] indices of the tokens; a slice: all of them
    keys: Tensor | slice  # [K]
    query_offsets: Tensor  # [ranges + 1] int32
    key_offsets: Tensor  # [ranges + 1] int32
    most_queries: int
    most_keys: int
    causal: bool

    @classmethod
    def of(
        cls,
        queries: Sequence[tuple[int, int]],
        keys: Sequence[tuple[int, int]],
        device: torch.device,
        *,
        causal: bool,
    ) -> Ragged:
        """Builds the offsets of ranges [start, end); causal: of segments, which are all tokens."""

        def tokens(ranges: Sequence[tuple[int, int]]) -> Tensor | slice:
            if causal:
                return slice(None)
            return torch.cat([torch.arange(*r, device=device) for r in ranges])

        def offsets(lengths: Sequence[int]) -> Tensor:
            return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)

        m, n = [b - a for a, b in queries], [b - a for a, b in keys]
        return cls(tokens(queries), tokens(keys), offsets(m), offsets(n), max(m), max(n), causal)

    @property
    def ranges(self) -> tuple[Tensor, Tensor, int, int]:
        """The arguments of a kernel that say which rows belong together."""
        return self.query_offsets, self.key_offsets, self.most_queries, self.most_keys


class _Varlen:
    """Calls PyTorch's flash attention for rows of unequal length: CUDA, half precision."""

    @staticmethod
    def forward(layout: Layout, scale: float, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (out, lse) of tensors (query, key, value)."""
        query, key, value = tensors
        segments, *prefixes = layout.ragged
        out, lse = _Varlen.part(segments, scale, query, key, value)
        for r in prefixes:
            part, part_lse = _Varlen.part(r, scale, query[r.queries], key[r.keys], value[r.keys])
            merged = merge(out[r.queries], lse[r.queries], part, part_lse)
            out[r.queries], lse[r.queries] = merged
        return out, lse

    @staticmethod
    def part(
        r: Ragged, scale: float, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *r.ranges, 0.0, r.causal, False, scale=scale
        )
        return out, lse.transpose(0, 1).contiguous()  # [N, H, D], [N, H]

    @staticmethod
    def backward(layout: Layout, scale: float, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients of tensors (grad, query, key, value, out, lse) 1 to 3."""
        grad, query, key, value, out, lse = tensors
        segments, *prefixes = layout.ragged
        grads = _Varlen.part_backward(segments, scale, *tensors)
        for r in prefixes:
            do, q, o, s = (t[r.queries] for t in (grad, query, out, lse))
            parts = _Varlen.part_backward(r, scale, do, q, key[r.keys], value[r.keys], o, s)
            for total, rows, part in zip(grads, (r.queries, r.keys, r.keys), parts, strict=True):
                total.index_add_(0, rows, part)  # type: ignore[arg-type]
        return grads

    @staticmethod
    def part_backward(r: Ragged, scale: float, *tensors: Tensor) -> tuple[Tensor, ...]:
        grad, query, key, value, out, lse = tensors
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
        grads: tuple[Tensor, ...] = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), query, key, value, out, lse.transpose(0, 1).contiguous(), *r.ranges,
            0.0, r.causal, no_dropout, no_dropout, scale=scale,
        )  # fmt: skip
        return grads


inf = float("inf")


def _has_varlen(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a log-sum-exp: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def by_head(flat: Tensor) -> Tensor:
    """Reshapes [M, H, D] -> [1, H, M, D]."""
    return flat.transpose(0, 1)[None]


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merges attention to two sets of keys into attention to both.

    Args:
        out, other: outputs [..., D]. lse, other_lse: their log-sum-exps [...].

    Returns:
        (output [..., D], log-sum-exp [...]).
    """
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
    """Computes attention and its log-sum-exp.

    Args:
        query: [n, H, M, D]. key, value: [n, H, K, D].
        mask: [n, 1, 1, K], added to the scores.

    Returns:
        (output [n, H, M, D], log-sum-exp [n, H, M]).
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
    """Returns the gradients of queries [n, H, M, D], keys and values [n, H, K, D].

    `grad`, `out` [n, H, M, D] and `lse` [n, H, M] may belong to attention over more keys than
    these: then the result is the share of these keys.
    """
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
    ds = p * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scale
    parts = ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad
    dq, dk, dv = (part.to(query.dtype) for part in parts)
    return dq, dk, dv


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    """Returns scores [n, H, M, K], −inf where a query does not see a key."""
    scores = (query @ key.transpose(-1, -2)).to(wide(query.dtype)) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -inf)
    return scores
