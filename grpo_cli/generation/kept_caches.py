"""Keys and values of conversations that wait for a reply, so that they are not computed again.

row ends        its tokens and their keys and values are kept under its conversation's number
reply is there  the prompt is the same tokens and some more; only those are computed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor

from grpo_cli.models.attention import flash


@dataclass(frozen=True)
class KeptCache:
    """The cache of one conversation of T tokens."""

    ids: Sequence[int]  # [T]
    keys: Tensor  # [L, Hkv, T, D]
    values: Tensor

    def beginning(self, prompt: Sequence[int]) -> KeptCache | None:
        """Returns the part that a prompt begins with; None if there is none.

        At least one token is left to compute, whose logits are asked for.
        """
        pairs = zip(self.ids, prompt[:-1], strict=False)
        length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if not length:
            return None
        return KeptCache(self.ids[:length], self.keys[:, :, :length], self.values[:, :, :length])


@dataclass
class KeptCaches:
    """The caches of conversations by their numbers, those kept longest first."""

    caches: dict[int, KeptCache] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.caches)

    def keep(self, conversation: int, cache: KeptCache, most: int) -> None:
        """Keeps a cache; gives up those kept longest if there are more than `most`."""
        self.caches.pop(conversation, None)
        if most > 0:
            self.caches[conversation] = cache
        while len(self.caches) > max(most, 0):
            del self.caches[next(iter(self.caches))]

    def take(self, conversation: int, prompt: Sequence[int]) -> KeptCache | None:
        """Returns what is kept of a prompt, which is then not kept any more."""
        cache = self.caches.pop(conversation, None)
        return None if cache is None else cache.beginning(prompt)

    def keep_only(self, is_open: Callable[[int], bool]) -> None:
        """Gives up the caches of conversations that are over."""
        self.caches = {n: cache for n, cache in self.caches.items() if is_open(n)}

    def clear(self) -> None:
        """Gives up all caches."""
        self.caches.clear()


class Continuation:
    """Computes the attention of prompts whose beginnings are kept; see `engine.Prefill`.

    Two prompts of 5 and 4 tokens, of which 3 and 1 are kept:

        kept       k k k | k - -     padded to the longest
        own        o o - | o o o     the tokens to be computed, which see the kept ones before them
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], kept: Sequence[KeptCache], device: torch.device
    ) -> None:
        self.kept, self.device = list(kept), device
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
        self.index = starts + torch.minimum(place, own - 1)  # [B, W] of each token among the N
        self.is_own = place < own  # [B, W]
        is_kept = torch.arange(self.columns, device=device) < known  # [B, K]
        self.hidden = ~torch.cat([is_kept, self.is_own], dim=1)  # [B, K + W]
        self.later = torch.ones(self.width, self.width, dtype=torch.bool, device=device).triu(1)
        self.keys: list[Tensor] = []  # of each layer, [B, Hkv, K + W, D]
        self.values: list[Tensor] = []
        self.bias: Tensor | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        assert layer == len(self.keys), "layers come one after another, each once"
        keys, values = (
            self._joined([getattr(cache, name)[layer] for cache in self.kept], new)
            for name, new in (("keys", key), ("values", value))
        )
        self.keys.append(keys)
        self.values.append(values)
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

    def _joined(self, kept: Sequence[Tensor], new: Tensor) -> Tensor:
        """Returns the kept and the new keys or values of a layer, [B, Hkv, K + W, D]."""
        heads, dim = new.shape[1:]
        joined = new.new_zeros(len(kept), heads, self.columns + self.width, dim)
        for row, part in zip(joined, kept, strict=True):
            row[:, : part.shape[1]] = part
        joined[:, :, self.columns :] = new[self.index].transpose(1, 2)
        return joined

    def _bias(self, query: Tensor) -> Tensor:
        """Returns what hides padding and later tokens from each token, [B, 1, W, K + W]."""
        hidden = self.hidden[:, None].repeat(1, self.width, 1)
        hidden[:, :, self.columns :] = self.later  # padding comes later than all tokens that count
        bias = torch.zeros(hidden.shape, dtype=query.dtype, device=self.device)
        return bias.masked_fill(hidden, -torch.inf)[:, None]

    def padded(self, layers: list[Tensor]) -> Tensor:
        """Returns keys or values of all layers, a row for each prompt: [L, B, Hkv, K + W, D]."""
        return torch.stack(layers)

    def mask(self, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Returns the bias that hides the padding of `padded`, [B, 1, 1, K + W], or None."""
        if not self.hidden.any():
            return None
        bias = torch.zeros(self.hidden.shape, dtype=dtype, device=device)
        return bias.masked_fill(self.hidden, -torch.inf)[:, None, None]
