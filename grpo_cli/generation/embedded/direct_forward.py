"""Computes the forward pass of a decoder without calling its modules, for decoding.

A decoding step of few rows spends more time in Python than in its matrix products: transformers'
modules make about 60 calls per layer. Here a layer is the same operations on the same weights in
the same order, without the module calls. The logits are bitwise the same, except for the rounding
of products with prepacked weights (`Product`). `LAYERS` lists the supported families. For any
other model, and for a model with adapters, quantized or sharded weights or hooks, `of` returns
None.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from grpo_cli.models.attention import Attending, narrowest_window
from grpo_cli.models.families import DYNAMIC_ROPE
from grpo_cli.models.memory import total_memory

# Decoder layers of transformers: pre-norm, rotary positions, a gated feed-forward.
LAYERS = {
    f"transformers.models.{family}.modeling_{family}.{name}DecoderLayer"
    for family, name in (
        ("llama", "Llama"),
        ("mistral", "Mistral"),
        ("qwen2", "Qwen2"),
        ("qwen3", "Qwen3"),
    )
}
# Size of a weight from which oneDNN is faster: its call overhead is 10 µs above `F.linear`'s.
LARGE = 2**17
# Maximum share of memory for the copies. It is a share of total memory, not of free memory, since
# rounding must not depend on what else runs on the machine.
SHARE = 1 / 8
ARCHITECTURES = ("x86_64", "AMD64")  # CPU types on which oneDNN was measured to be faster


@dataclass(frozen=True)
class Product:
    """Multiplies [N, in] by one weight [out, in], or by several together; on the CPU by oneDNN.

    The product of a few rows with a large weight takes at best as long as reading the weight. The
    BLAS behind `F.linear` copies the weight into another layout in each call; oneDNN, which torch
    ships, does so once (`of`). The results equal `F.linear`'s, in float32 except for rounding. In
    float32, with up to 1,024 input features, the result of a row does not depend on the number of
    rows (seen with AVX-512). With more features, and in bfloat16, few rows may differ in the last
    bits.
    """

    weights: tuple[Tensor, ...]  # [out, in] each
    biases: tuple[Tensor | None, ...]
    packed: Tensor | None = None  # all weights together in oneDNN's layout
    packed_bias: Tensor | None = None  # [sum of out]

    @classmethod
    def of(cls, *linears: Any, prepacks: torch.dtype | None) -> Product:
        """Reads the weights of linear layers.

        Args:
            prepacks: dtype in which large weights are copied into oneDNN's layout; None: they are
                not copied.
        """
        weights: tuple[Tensor, ...] = tuple(linear.weight for linear in linears)
        biases: tuple[Tensor | None, ...] = tuple(linear.bias for linear in linears)
        is_large = sum(weight.numel() for weight in weights) >= LARGE
        is_float = all(w.dtype in (torch.float32, prepacks) for w in weights)
        if prepacks is None or not (is_large and is_float):
            return cls(weights, biases)
        together = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(together.to(prepacks))
        if all(bias is None for bias in biases):
            return cls(weights, biases, packed)
        pairs = zip(weights, biases, strict=True)
        full = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in pairs])
        return cls(weights, biases, packed, full.to(prepacks))

    @property
    def fuses(self) -> bool:
        """Whether oneDNN fuses the next operation; in 16 bit this would change the rounding."""
        return self.packed is not None and self.packed.dtype == torch.float32

    def __call__(self, x: Tensor) -> Tensor:
        """Computes [N, in] -> [N, sum of out]."""
        if self.packed is not None:
            return self._packed(x, "none")
        parts = [F.linear(x, *part) for part in zip(self.weights, self.biases, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def silu(self, x: Tensor) -> Tensor:
        """Applies SiLU (arXiv 1606.08415) to the product."""
        return self._packed(x, "swish") if self.fuses else F.silu(self(x))

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """Multiplies the product by another tensor [N, sum of out]."""
        return self._packed(x, "mul", other) if self.fuses else self(x) * other

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """Adds another tensor [N, sum of out] to the product."""
        return self._packed(x, "add", other) if self.fuses else self(x) + other

    def _packed(self, x: Tensor, then: str, other: Tensor | None = None) -> Tensor:
        assert self.packed is not None
        operator, x = torch.ops.mkldnn._linear_pointwise, x.to(self.packed.dtype)
        if other is None:
            product: Tensor = operator.default(x, self.packed, self.packed_bias, then, [], "")
        else:
            product = operator.binary(x, other, self.packed, self.packed_bias, then)
        return product


def packed_dtype(model: PreTrainedModel) -> torch.dtype | None:
    """Returns the dtype to prepack weights in; None if that is no faster or does not fit."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else model.dtype
    prepacks = (
        model.device.type == "cpu"
        and dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and platform.machine() in ARCHITECTURES
        and (dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
        and sum(w.numel() for w in model.parameters()) * dtype.itemsize <= SHARE * total_memory()
    )
    return dtype if prepacks else None


@dataclass(frozen=True)
class Norm:
    """Applies RMSNorm, computed in float32 (arXiv 1910.07467)."""

    weight: Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        """Reads the weight of a module of transformers."""
        return cls(module.weight, module.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32 and x.device.type == "cpu":  # the same operations in one call
            return torch.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Rotary:
    """Computes rotary embeddings (arXiv 2104.09864); on the CPU it caches a table of positions."""

    def __init__(self, module: nn.Module) -> None:
        """module: transformers' own, called as module(x, positions)."""
        self.module = module
        self.is_dynamic = getattr(module, "rope_type", None) in DYNAMIC_ROPE
        self.table: Tensor | None = None  # [P, 2, 1, D] for the positions below P

    def __call__(self, positions: Tensor, longest: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (cosines, sines) of tokens, [N, 1, D] each; the first half of sines is negated.

        Heads are rotated by x * cos + swap(x) * sin, where `swap` exchanges the halves.

        Args:
            positions: [1, N], all of them below `longest`.
            like: a tensor with the dtype of the result.
        """
        if self.is_dynamic or like.device.type != "cpu":
            cos, sin = self._compute(positions, like).unbind(1)
            return cos, sin
        if self.table is None or len(self.table) < longest:
            size = 1 << (longest - 1).bit_length()
            self.table = self._compute(torch.arange(size)[None], like)
        cos, sin = self.table[positions[0]].unbind(1)
        return cos, sin

    def _compute(self, positions: Tensor, like: Tensor) -> Tensor:
        """Returns cosines and sines of positions [1, N], [N, 2, 1, D]."""
        cos, sin = (t[0] for t in self.module(like[None], positions))  # [N, D]
        half = sin.shape[-1] // 2
        return torch.stack((cos, torch.cat((-sin[:, :half], sin[:, half:]), dim=-1)), 1)[:, :, None]


@dataclass(frozen=True)
class Layer:
    """Computes one decoder layer from its weights."""

    number: int
    before_attention: Norm
    query_key_value: Product
    query_norm: Norm | None
    key_norm: Norm | None
    output: Product
    before_feed_forward: Norm
    gate: Product
    up: Product
    down: Product
    activation: Callable[[Tensor], Tensor] | None  # None: SiLU
    head_dim: int
    key_heads: int
    scale: float

    @classmethod
    def of(cls, module: Any, *, prepacks: torch.dtype | None) -> Layer:
        """Reads the weights of a layer of one of `LAYERS`."""
        attn, mlp = module.self_attn, module.mlp
        query_norm, key_norm = (
            None if (norm := getattr(attn, name, None)) is None else Norm.of(norm)
            for name in ("q_norm", "k_norm")
        )
        return cls(
            attn.layer_idx,
            Norm.of(module.input_layernorm),
            Product.of(attn.q_proj, attn.k_proj, attn.v_proj, prepacks=prepacks),
            query_norm,
            key_norm,
            Product.of(attn.o_proj, prepacks=prepacks),
            Norm.of(module.post_attention_layernorm),
            Product.of(mlp.gate_proj, prepacks=prepacks),
            Product.of(mlp.up_proj, prepacks=prepacks),
            Product.of(mlp.down_proj, prepacks=prepacks),
            None if isinstance(mlp.act_fn, nn.SiLU | SiLUActivation) else mlp.act_fn,
            attn.head_dim,
            len(attn.k_proj.weight) // attn.head_dim,
            attn.scaling,
        )

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attending: Attending) -> Tensor:
        """Computes [N, H] -> [N, H]; cos, sin: [N, 1, D] as `Rotary` returns them."""
        # Two functions, so that the tensors of the first are freed before the second.
        return self._feed_forward(self._attention(x, cos, sin, attending))

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor, attending: Attending) -> Tensor:
        heads = self.query_key_value(self.before_attention(x)).view(len(x), -1, self.head_dim)
        qk, v = heads[:, : -self.key_heads], heads[:, -self.key_heads :]
        if self.query_norm is not None and self.key_norm is not None:
            q, k = qk[:, : -self.key_heads], qk[:, -self.key_heads :]
            qk = torch.cat((self.query_norm(q), self.key_norm(k)), dim=1)
        qk = qk * cos + qk.roll(self.head_dim // 2, -1) * sin  # [N, Hq + Hkv, D]
        # Under autocast, rotary embeddings leave queries and keys wider than values.
        qk = qk.to(v.dtype)
        q, k = qk[:, : -self.key_heads], qk[:, -self.key_heads :]
        attended = attending.attend(self.number, q, k, v, self.scale)
        return self.output.plus(attended.reshape(len(x), -1), x)

    def _feed_forward(self, x: Tensor) -> Tensor:
        normed = self.before_feed_forward(x)
        if self.activation is None:
            gate = self.gate.silu(normed)
        else:
            gate = self.activation(self.gate(normed))
        return self.down.plus(self.up.times(normed, gate), x)


@dataclass(frozen=True)
class DirectForward:
    """Computes logits from the decoder weights that `of` has read."""

    embedding: Tensor
    rotary: Rotary
    layers: Sequence[Callable[[Tensor, Tensor, Tensor, Attending], Tensor]]  # `Layer` objects
    norm: Norm
    head: Product
    window: float  # attention window of the narrowest layer, in tokens
    dtype: torch.dtype  # dtype of the hidden states

    @classmethod
    def of(cls, model: PreTrainedModel) -> DirectForward | None:
        """Reads a model's weights; returns None if the model is not supported."""
        decoder: Any = getattr(model, "model", None)
        layers: Any = getattr(decoder, "layers", None)
        head: Any = getattr(model, "lm_head", None)
        if decoder is None or not layers or {*map(class_of, layers)} - LAYERS:
            return None
        family = {type(module).__module__ for module in (model, decoder, *layers)}
        if len(family) > 1 or not all(map(is_plain, model.modules())):
            return None
        prepacks = packed_dtype(model)
        return cls(
            decoder.embed_tokens.weight,
            Rotary(decoder.rotary_emb),
            [Layer.of(layer, prepacks=prepacks) for layer in layers],
            Norm.of(decoder.norm),
            Product.of(head, prepacks=prepacks),
            narrowest_window(model),
            decoder.embed_tokens.weight.dtype,
        )

    def in_float32(self) -> DirectForward:
        """Returns the same forward pass in float32; a layer is cast while it computes."""

        def cast(layer: Any) -> Callable[..., Tensor]:
            return lambda *args: _cast(layer)(*args)

        return replace(
            self,
            rotary=Rotary(self.rotary.module),
            layers=[cast(layer) for layer in self.layers],
            norm=_cast(self.norm),
            head=_cast(self.head),
            dtype=torch.float32,
        )

    def __call__(
        self, ids: Tensor, positions: Tensor, attending: Attending, kept: Tensor | None = None
    ) -> Tensor:
        """Returns the logits of N tokens, [N, V], or only those of the tokens at `kept`.

        Args:
            ids, positions: [1, N].
            kept: indices of the tokens whose logits are returned; None: all tokens.
        """
        x = F.embedding(ids[0], self.embedding).to(self.dtype)  # [N, H]
        cos, sin = self.rotary(positions, attending.longest, x)
        for layer in self.layers:
            x = layer(x, cos, sin, attending)
        return self.head(self.norm(x if kept is None else x[kept]))


def _cast(part: Any) -> Any:
    """Returns a part of a forward pass with all its weights in float32."""
    if isinstance(part, Tensor):
        return part.float()
    if isinstance(part, tuple):
        return tuple(map(_cast, part))
    if isinstance(part, Product):  # without the copies in oneDNN's layout
        return Product(_cast(part.weights), _cast(part.biases))
    if isinstance(part, Norm | Layer):
        return replace(part, **{f.name: _cast(getattr(part, f.name)) for f in fields(part)})
    return part


def class_of(module: nn.Module) -> str:
    """Returns the full name of a module's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def is_plain(module: nn.Module) -> bool:
    """Returns whether a module is torch's or transformers' own, with plain weights and no hooks."""
    ours = class_of(module).startswith(("torch.nn.modules.", "transformers."))
    weights = module._parameters.values()
    return (
        ours
        and all(w is None or type(w) is nn.Parameter for w in weights)
        and not (module._forward_hooks or module._forward_pre_hooks)
        and "forward" not in vars(module)
    )
