"""Attention of the prefill: of complete prompts, or of the tokens after a cached prefix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_cli.generation.embedded.kept_caches import KeptCache
from grpo_cli.models.attention import Layout, flash


class Prefill:
    """Computes the attention of prompts to themselves, and keeps their keys and values."""

    def __init__(self, prompts: Sequence[Sequence[int]], device: torch.device) -> None:
        self.lengths = [len(p) for p in prompts]
        self.known = [0] * len(prompts)  # cached tokens of each prompt
        ends = torch.tensor(self.lengths).cumsum(0).tolist()
        self.starts = [end - length for end, length in zip(ends, self.lengths, strict=True)]
        self.layout = Layout(list(zip(self.starts, ends, strict=True)), [], device)
        self.longest = self.layout.longest
        self.keys: list[Tensor] = []  # per layer, [N, Hkv, D]
        self.values: list[Tensor] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        assert layer == len(self.keys), "layers come one after another, each once"
        self.keys.append(key.clone())  # a view would keep the queries' memory too
        self.values.append(value.clone())
        return self.layout.attend(layer, query, key, value, scale)

    def padded(self, layers: list[Tensor]) -> Tensor:
        """Returns keys or values of all layers, padded: [L, prompts, Hkv, P, D].

        Empties the list while it fills the result, to save memory.
        """
        device = layers[0].device
        columns = torch.arange(max(self.lengths), device=device)
        starts, lengths = (
            torch.tensor(t, device=device)[:, None] for t in (self.starts, self.lengths)
        )
        index = starts + torch.minimum(columns, lengths - 1)  # [prompts, P]
        _, heads, dim = layers[0].shape
        padded = layers[0].new_empty(len(layers), len(index), heads, len(columns), dim)
        for layer in padded:
            layer.copy_(layers.pop(0)[index].transpose(1, 2))
        return padded

    def mask(self, like: Tensor) -> Tensor | None:
        """Returns the mask of the padding in `padded`, [prompts, 1, 1, P]; None without padding."""
        if min(self.lengths) == max(self.lengths):
            return None
        columns = torch.arange(max(self.lengths), device=like.device)
        return mask_of(columns >= torch.tensor(self.lengths, device=like.device)[:, None], like)


class Continuation(Prefill):
    """Computes the attention of prompts whose prefixes are cached; see `Prefill`.

    Two prompts of 5 and 4 tokens, of which 3 and 1 are cached:

        kept       k k k | k - -     padded to the longest
        own        o o - | o o o     the tokens to compute, which also attend to the cached ones
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], kept: Sequence[KeptCache], device: torch.device
    ) -> None:
        self.device = device
        self.kept_keys, self.kept_values = (
            pad_sequence([t.permute(2, 0, 1, 3) for t in side], batch_first=True).permute(
                2, 0, 3, 1, 4
            )
            for side in ([c.keys for c in kept], [c.values for c in kept])
        )  # [L, B, Hkv, K, D]
        self.lengths = [len(p) for p in prompts]
        self.longest = max(self.lengths)
        self.known = [len(cache.ids) for cache in kept]
        self.own = [n - k for n, k in zip(self.lengths, self.known, strict=True)]
        ends = torch.tensor(self.own).cumsum(0).tolist()
        self.starts = [end - n for end, n in zip(ends, self.own, strict=True)]
        self.columns, self.width = max(self.known), max(self.own)
        known, own, starts = (
            torch.tensor(t, device=device)[:, None] for t in (self.known, self.own, self.starts)
        )
        place = torch.arange(self.width, device=device)
        self.index = starts + torch.minimum(place, own - 1)  # [B, W] indices into the N tokens
        self.is_own = place < own  # [B, W]
        is_kept = torch.arange(self.columns, device=device) < known  # [B, K]
        self.hidden = ~torch.cat([is_kept, self.is_own], dim=1)  # [B, K + W]
        self.later = torch.ones(self.width, self.width, dtype=torch.bool, device=device).triu(1)
        self.keys: list[Tensor] = []  # per layer, [B, Hkv, K + W, D]
        self.values: list[Tensor] = []
        self.bias: Tensor | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        assert layer == len(self.keys), "layers come one after another, each once"
        keys, values = (
            torch.cat([kept[layer], new[self.index].transpose(1, 2)], dim=2)
            for kept, new in ((self.kept_keys, key), (self.kept_values, value))
        )
        self.keys.append(keys)
        self.values.append(values)
        if len(self.keys) == len(self.kept_keys):  # the last layer: frees the cached prefixes
            self.kept_keys = self.kept_values = keys.new_empty(0)
        if self.bias is None:
            self.bias = self._bias(query)
        n, heads, _, dim = keys.shape
        repeats = query.shape[1] // heads
        queries = query[self.index]  # [B, W, Hq, D]
        queries = queries.view(n, self.width, heads, repeats, dim).permute(0, 2, 3, 1, 4)
        out, _ = flash(
            queries.reshape(n, heads, repeats * self.width, dim),
            keys,
            values,
            mask=self.bias.repeat(1, 1, repeats, 1),
            scale=scale,
        )
        out = out.view(n, heads, repeats, self.width, dim).permute(0, 3, 1, 2, 4)
        return out.reshape(n, self.width, -1, dim)[self.is_own]

    def _bias(self, query: Tensor) -> Tensor:
        """Returns the additive mask of padding and later tokens, [B, 1, W, K + W]."""
        hidden = self.hidden[:, None].repeat(1, self.width, 1)
        hidden[:, :, self.columns :] = self.later  # this hides padding too, which comes last
        bias = torch.zeros(hidden.shape, dtype=query.dtype, device=self.device)
        return bias.masked_fill(hidden, -torch.inf)[:, None]

    def padded(self, layers: list[Tensor]) -> Tensor:
        known, lengths = (
            torch.tensor(t, device=self.device)[:, None] for t in (self.known, self.lengths)
        )
        place = torch.minimum(torch.arange(self.longest, device=self.device), lengths - 1)
        column = torch.where(place < known, place, place - known + self.columns)  # [B, P]
        row = torch.arange(len(column), device=self.device)[:, None]
        _, heads, _, dim = layers[0].shape
        padded = layers[0].new_empty(len(layers), len(row), heads, self.longest, dim)
        for layer in padded:
            layer.copy_(layers.pop(0)[row, :, column].transpose(1, 2))
        return padded


def mask_of(hidden: Tensor, like: Tensor) -> Tensor:
    """Returns the additive attention mask that hides some columns.

    Args:
        hidden: [n, K] bool, True where a row must not attend to a column.
        like: a tensor with the dtype and device of the scores.

    Returns:
        [n, 1, 1, K]: 0, or minus infinity where hidden.
    """
    mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(hidden, -torch.inf)[:, None, None]
