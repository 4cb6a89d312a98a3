"""Computes the forward pass of a decoder without the calls of its modules, for decoding.

A step that decodes few rows takes longer in Python than in its products: transformers' modules make
about 60 calls a layer. Here a layer is the same operations on the same weights in the same order,
so that the logits are the same to the last bit; only what surrounds them is left out. The families
in `LAYERS` are computed so. For any other model, and where a part of the model is not what
transformers made it (adapters, quantized or sharded weights, hooks), `of` returns None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_cli.models.attention import Attending, narrowest_window

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
Product = tuple[Tensor, Tensor | None]  # weight and bias


@dataclass(frozen=True)
class Norm:
    """Divides by the root mean square in float32 (RMSNorm, arXiv 1910.07467)."""

    weight: Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        """Reads the weight of a module of transformers."""
        return cls(module.weight, module.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


@dataclass(frozen=True)
class Layer:
    """Computes one decoder layer from its weights."""

    number: int
    before_attention: Norm
    query: Product
    key: Product
    value: Product
    query_norm: Norm | None
    key_norm: Norm | None
    output: Product
    before_feed_forward: Norm
    gate: Product
    up: Product
    down: Product
    activation: Callable[[Tensor], Tensor]
    head_dim: int
    scale: float

    @classmethod
    def of(cls, module: Any) -> Layer:
        """Reads the weights of a layer of one of `LAYERS`."""
        attn, mlp = module.self_attn, module.mlp
        query_norm, key_norm = (
            None if (norm := getattr(attn, name, None)) is None else Norm.of(norm)
            for name in ("q_norm", "k_norm")
        )
        query, key, value, output, gate, up, down = (
            (linear.weight, linear.bias)
            for linear in (
                *(attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj),
                *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
            )
        )
        return cls(
            attn.layer_idx,
            Norm.of(module.input_layernorm),
            query,
            key,
            value,
            query_norm,
            key_norm,
            output,
            Norm.of(module.post_attention_layernorm),
            gate,
            up,
            down,
            mlp.act_fn,
            attn.head_dim,
            attn.scaling,
        )

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attending: Attending) -> Tensor:
        """Computes [N, H] -> [N, H]; cos, sin: [N, 1, D]."""
        normed = self.before_attention(x)
        heads = (len(x), -1, self.head_dim)
        q = F.linear(normed, *self.query).view(heads)  # [N, Hq, D]
        k = F.linear(normed, *self.key).view(heads)
        v = F.linear(normed, *self.value).view(heads)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        half = self.head_dim // 2
        q, k = (t * cos + torch.cat((-t[..., half:], t[..., :half]), dim=-1) * sin for t in (q, k))
        # Under autocast, rotary embeddings leave queries and keys wider than values.
        attended = attending.attend(self.number, q.to(v.dtype), k.to(v.dtype), v, self.scale)
        x = x + F.linear(attended.reshape(len(x), -1), *self.output)
        normed = self.before_feed_forward(x)
        gated = self.activation(F.linear(normed, *self.gate)) * F.linear(normed, *self.up)
        return x + F.linear(gated, *self.down)


@dataclass(frozen=True)
class DirectForward:
    """Computes logits from a decoder's weights as they were when `of` has read them."""

    embedding: Tensor
    rotary: nn.Module
    layers: list[Layer]
    norm: Norm
    head: Product
    window: float  # tokens that the narrowest layer sees

    @classmethod
    def of(cls, model: PreTrainedModel) -> DirectForward | None:
        """Reads a model's weights; None if its forward pass is not computed here."""
        decoder: Any = getattr(model, "model", None)
        layers: Any = getattr(decoder, "layers", None)
        head: Any = getattr(model, "lm_head", None)
        if decoder is None or not layers or {*map(class_of, layers)} - LAYERS:
            return None
        family = {type(module).__module__ for module in (model, decoder, *layers)}
        if len(family) > 1 or not all(map(is_plain, model.modules())):
            return None
        return cls(
            decoder.embed_tokens.weight,
            decoder.rotary_emb,
            [Layer.of(layer) for layer in layers],
            Norm.of(decoder.norm),
            (head.weight, head.bias),
            narrowest_window(model),
        )

    def __call__(self, ids: Tensor, positions: Tensor, attending: Attending) -> Tensor:
        """Returns the logits [N, V] of N tokens.

        Args:
            ids, positions: [1, N].
        """
        x = F.embedding(ids[0], self.embedding)  # [N, H]
        cos, sin = (t[0, :, None] for t in self.rotary(x[None], positions))  # [N, 1, D]
        for layer in self.layers:
            x = layer(x, cos, sin, attending)
        return F.linear(self.norm(x), *self.head)


def class_of(module: nn.Module) -> str:
    """Returns the full name of a module's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def is_plain(module: nn.Module) -> bool:
    """Whether a module is one that torch or transformers has made, with ordinary weights."""
    ours = class_of(module).startswith(("torch.nn.modules.", "transformers."))
    weights = module._parameters.values()
    return (
        ours
        and all(w is None or type(w) is nn.Parameter for w in weights)
        and not (module._forward_hooks or module._forward_pre_hooks)
        and "forward" not in vars(module)
    )
