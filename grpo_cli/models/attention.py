"""Attention over sequences that share a prefix, as an attention function of transformers.

A group is one row of N tokens: the prompt once, then its completions. Two parts are computed
separately and merged by their log-sum-exp: causal attention inside each segment (a prompt or a
completion), and attention of all completions of a prompt to that prompt. Nothing is padded,
repeated or masked, and no tensor of size N x N exists. The backward passes the merged output and
log-sum-exp to each part, and a flash kernel's backward then returns that part's share of the
gradient (as in Ring Attention, arXiv 2310.01889).

Example: a prompt p of 3 tokens with completions a of 2 tokens and b of 1 token, N = 6

          p0 p1 p2 a0 a1 b0
    p0    x                     segments  [0, 3), [3, 5), [5, 6)
    p1    x  x                  prefixes  Prefix(start=0, end=3, first=3, last=6):
    p2    x  x  x                         queries 3, 4, 5 also see keys 0, 1, 2
    a0    x  x  x  x
    a1    x  x  x  x  x         a1 attends to (a0, a1): output o, log-sum-exp s; and to
    b0    x  x  x        x      (p0, p1, p2): o', s'; merged (e^s o + e^s' o') / (e^s + e^s')

Instead of its own attention, a model calls `attend` of the object that its forward gets as
`attending`: a `Layout` from this file, or a batch of `generation/embedded/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo_cli.errors import typed_line
from grpo_cli.models.families import ATTENTION_EXTRAS, SPARSE, WINDOWS
from grpo_cli.models.kernels.flex import Flex, block_mask
from grpo_cli.models.kernels.plain import Bucket, ByParts, Plain
from grpo_cli.models.kernels.plain import flash as flash  # for the embedded engine
from grpo_cli.models.kernels.plain import merge as merge
from grpo_cli.models.kernels.varlen import HALVES, Ragged, Varlen
from grpo_cli.models.memory import is_out_of_memory

NAME = "grpo_sdpa"  # registered implementation; equals sdpa unless `attending` is passed
MAX_PADDING = 1.25  # maximum ratio of the longest to the shortest row of a bucket
WIDEST = 256  # maximum head dimension of flash attention
AMPERE = (8, 0)  # compute capability of the first GPUs that flash attention supports

NOT_PASSED_ON = "it passes no further arguments to its attention"  # so that `attending` is lost


class UnsupportedModelError(Exception):
    """Raised when a model's attention cannot be computed by parts; the message says why."""


def mismatch(attempt: Callable[[], object]) -> str | None:
    """Runs an attempt with a model's own code; returns why it fails, or None.

    Raises:
        Exception: the attempt runs out of memory; the caller can retry with fewer tokens.
    """
    try:
        attempt()
    except UnsupportedModelError as error:
        return str(error)
    except Exception as error:  # a model's code may raise anything
        if is_out_of_memory(error):
            raise
        return typed_line(error)
    return None


class Attending(Protocol):
    """Replaces the model's own attention."""

    longest: int  # the largest number of tokens that a query attends to

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Returns the attention's output, [N, Hq, D].

        Args:
            layer: index of the decoder layer.
            query: [N, Hq, D]. key, value: [N, Hkv, D], Hq a multiple of Hkv.
            scale: factor for the scores, usually D ** -0.5.
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
    """Computes attention with transformers' interface: heads [1, H, N, D] -> [1, N, Hq, D].

    Raises:
        UnsupportedModelError: `attending` is passed, and the model's attention has dropout, a
            window shorter than the rows, or an argument that `attending` does not support.
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


# Not compiled, since each batch's layout would be recompiled.
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
    width = v.shape[-1]
    if q.shape[-1] > width:  # latent attention; kernels take heads of one size
        v = nn.functional.pad(v, (0, q.shape[-1] - width))
    # Under autocast, rotary embeddings leave queries and keys wider than values.
    return attending.attend(layer, q.to(v.dtype), k.to(v.dtype), v, scale)[None, ..., :width]


def window_of(module: nn.Module) -> int | None:
    """Returns the attention window of a layer, in tokens, by its config; None: no window.

    Llama 4, Qwen2-MoE and Phi-3.5-MoE pass the window only to the mask, so a check on rollouts
    shorter than the window would not detect it.
    """
    config: Any = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    layer_type = types[module.layer_idx] if types else "sliding_attention"  # type: ignore[index]
    window: int | None = getattr(config, WINDOWS.get(layer_type, ""), None)
    return window


def narrowest_window(model: nn.Module) -> float:
    """Returns the smallest attention window of a model's layers in tokens; inf without windows."""
    windows = (window_of(m) for m in model.modules() if hasattr(m, "layer_idx"))
    return min((w for w in windows if w is not None), default=math.inf)


def name_of(model: PreTrainedModel) -> str:
    """Returns the name of the attention implementation that a model uses."""
    return str(model.config.get_text_config(decoder=True)._attn_implementation)


def install(model: PreTrainedModel) -> bool:
    """Makes a model that uses sdpa accept `attending`.

    Returns:
        False, with the model unchanged, if it uses another attention or cannot change it.
    """
    if name_of(model) == NAME:
        return True
    text = model.config.get_text_config(decoder=True)
    is_sparse = any(getattr(text, name, None) for name in SPARSE)
    if name_of(model) != "sdpa" or is_sparse or not model._can_set_attn_implementation():
        return False
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    # Only in the decoder: layers of a vision tower have no index, and are not causal.
    part = next((n for n in model.config.sub_configs if getattr(model.config, n, None) is text), "")
    model.set_attn_implementation({part: NAME} if part else NAME)
    return True


def no_mask(device: torch.device) -> Tensor:
    """Returns a [1, 1, 1, 1] mask, which keeps transformers from building a mask of its own."""
    return torch.empty(1, 1, 1, 1, device=device)


@dataclass(frozen=True)
class Prefix:
    """Keys [start, end) of a prompt that all queries [first, last) attend to."""

    start: int
    end: int
    first: int
    last: int


class Layout:
    """Describes which tokens of a packed row attend to which; the file's example shows one."""

    def __init__(
        self,
        segments: Sequence[tuple[int, int]],
        prefixes: Sequence[Prefix],
        device: torch.device,
    ) -> None:
        """Describes a row of N tokens.

        Args:
            segments: [start, end) of each segment, with causal attention; they cover all N tokens.
            prefixes: prompts that other segments also attend to.
            device: device of the index tensors for the kernels.
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
        return usual_kernel(query).attend(self, query, key, value, scale)

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The segments, grouped by similar length to reduce padding."""
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
        """The segments, and the prefixes if there are any, for varlen kernels."""
        segments = sorted(self.segments)
        parts = [Ragged.of(segments, segments, self.device, causal=True)]
        if self.prefixes:
            queries = [(p.first, p.last) for p in self.prefixes]
            keys = [(p.start, p.end) for p in self.prefixes]
            parts.append(Ragged.of(queries, keys, self.device, causal=False))
        return parts

    @cached_property
    def block_mask(self) -> BlockMask:
        """The block mask for FlexAttention."""
        return block_mask(self)


def usual_kernel(query: Tensor) -> ByParts | Flex:
    """Returns the fastest kernel for the device, dtype and heads of queries [N, Hq, D].

    If it fails or is wrong, the self-check of the forward mode finds that, and rows are padded.
    """
    if not query.is_cuda or query.dtype not in HALVES:
        return Plain()  # in float32 Flex would compile for longer than a short run takes
    width = query.shape[-1]
    has_flash = torch.cuda.get_device_capability(query.device) >= AMPERE
    return Varlen() if has_flash and width % 8 == 0 and width <= WIDEST else Flex()
