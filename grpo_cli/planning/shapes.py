"""Describes the tensors of a decoder from its config alone: their sizes, their FLOPs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from transformers import PretrainedConfig

from grpo_cli.errors import UserError, listed
from grpo_cli.models.families import num_experts
from grpo_cli.models.flops import forward_flops

# Families that `Shape.of` knows: whether q, k and v have biases, and q and k norms.
FAMILIES = {
    "llama": (False, False),
    "mistral": (False, False),
    "mixtral": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
    "qwen3_moe": (False, True),
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder with grouped-query attention and a gated feed-forward or experts."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int  # of the feed-forward, or of one expert
    vocab: int
    experts: int = 0  # 0: dense
    chosen: int = 0  # experts that a token is sent to
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False

    @classmethod
    def of(cls, config: PretrainedConfig) -> Shape:
        """Returns the shape of a causal language model.

        Raises:
            UserError: the model's family, or a part of the model, is not described here.
        """
        kind = config.model_type
        odd = [n for n in ("attention_bias", "mlp_bias") if getattr(config, n, False)]
        odd += ["mlp_only_layers"] if getattr(config, "mlp_only_layers", None) else []
        odd += ["decoder_sparse_step"] if getattr(config, "decoder_sparse_step", 1) != 1 else []
        if kind not in FAMILIES or odd:
            what = f"model_type = {kind}" if kind not in FAMILIES else f"{kind} with {odd[0]}"
            raise UserError(f"{what}: its parameters are not described; {listed(FAMILIES)} are.")
        experts = num_experts(config) or 0
        bias, norm = FAMILIES[kind]
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
            width=getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
            vocab=config.vocab_size,
            experts=experts,
            chosen=config.num_experts_per_tok if experts else 0,
            qkv_bias=bias,
            qk_norm=norm,
            tied=bool(config.tie_word_embeddings),
        )

    @property
    def queries(self) -> int:
        """The width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """The width of all key heads together; values have the same width."""
        return self.kv_heads * self.head_dim

    def layer(self) -> list[tuple[int, ...]]:
        """Returns the shapes of the tensors of one layer, as transformers stores them."""
        h, i, e = self.hidden, self.width, self.experts
        tensors: list[tuple[int, ...]] = [(self.queries, h), (self.keys, h), (self.keys, h)]
        tensors += [(h, self.queries), (h,), (h,)]
        if self.qkv_bias:
            tensors += [(self.queries,), (self.keys,), (self.keys,)]
        if self.qk_norm:
            tensors += [(self.head_dim,), (self.head_dim,)]
        if e:
            return [*tensors, (e, h), (e, 2 * i, h), (e, h, i)]  # all experts in two tensors
        return [*tensors, (i, h), (i, h), (h, i)]

    def adapter(self, rank: int) -> list[tuple[int, ...]]:
        """Returns the shapes of one layer's matrices A [r, in] and B [out, r] (LoRA)."""
        matrices = [t for t in self.layer() if len(t) == 2]
        return [pair for out, width in matrices for pair in ((rank, width), (out, rank))]

    def root(self) -> list[tuple[int, ...]]:
        """Returns the shapes of the tensors outside the layers: embedding, last norm, head."""
        embedding = (self.vocab, self.hidden)
        return [embedding, (self.hidden,)] + ([] if self.tied else [embedding])

    @property
    def parameters(self) -> int:
        return self.layers * count(self.layer()) + count(self.root())

    @property
    def active(self) -> int:
        """The parameters that one token is multiplied with; see `flops.params_in_products`."""
        total = self.vocab * self.hidden
        for tensor in self.layer():
            if len(tensor) == 3:
                total += self.layers * math.prod(tensor) * self.chosen // self.experts
            elif len(tensor) == 2:
                total += self.layers * math.prod(tensor)
        return total

    def forward_flops(self, tokens: int, attended: int, logits: int) -> float:
        """Returns the model FLOPs of a forward pass; see `flops.forward_flops`."""
        config = PretrainedConfig(
            hidden_size=self.hidden,
            vocab_size=self.vocab,
            num_attention_heads=self.heads,
            num_hidden_layers=self.layers,
            head_dim=self.head_dim,
        )
        return forward_flops(config, self.active, tokens, attended, logits)


def count(tensors: Iterable[tuple[int, ...]]) -> int:
    """Returns the number of elements of tensors."""
    return sum(map(math.prod, tensors))
