"""The prefill of prompts, and the batch of rows that begin with it.

The caches of a batch have one length, without padding.

Two prompts of 3 and 2 tokens with two completions each, after two steps:

    prompts   p p p | q q -          once for each group, padded to the longest
    rows      a a | b b | c c | d d  keys and values of the completions so far, [L, 4, Hkv, 2, D]
    step      4 queries, one a row; each sees its row, and its group's prompt: two attentions, which
              are merged by their log-sum-exp; the two rows of a prompt read its keys together

Where sharing saves little (few rows of a group are left, or the row continues a conversation),
prompts are copied in front of each row's own tokens instead, which takes one attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_cli.generation.embedded.decoding_state import DecodingState
from grpo_cli.generation.embedded.kept_caches import KeptCache
from grpo_cli.models.attention import Layout, flash, merge

ROOM = 64  # initial cache size in tokens; it doubles when it is full
# Bytes of repeated prompts per layer up to which a step reads copies: that costs less than merging
# two attentions.
WORTH = 3 * 2**19
COPIED = 2**24  # maximum bytes of copied prompts per layer


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


def attend_to_prompts(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Computes the attention of groups of rows to the prompt that each group shares.

    Args:
        queries: [groups * width, Hkv, query heads of a key head, D].
        keys, values: [groups, Hkv, P, D]. mask: [groups, 1, 1, P].

    Returns:
        The outputs, shaped as the queries, and their log-sum-exps.
    """
    rows, heads, repeats, dim = queries.shape
    width = rows // len(keys)
    together = queries.view(-1, width, heads, repeats, dim).transpose(1, 2)
    found = flash(
        together.reshape(-1, heads, width * repeats, dim), keys, values, mask=mask, scale=scale
    )
    out, lse = (
        t.view(-1, heads, width, repeats, *t.shape[3:]).transpose(1, 2).flatten(0, 1) for t in found
    )
    return out, lse


class DecodeBatch:
    """Holds rows that began together, with their caches; all have the same number of tokens."""

    def __init__(
        self, prefill: Prefill, numbers: Sequence[int], after: Sequence[int], state: DecodingState
    ) -> None:
        """Copies the prompts' keys and values from the prefill.

        Args:
            numbers: indices of the prompts in `prefill`; each gets `state.num_generations` rows.
            after: position of the token after each prompt.
        """
        self.state = state
        self.num_generations = num_generations = state.num_generations
        self.max_tokens = max_tokens = state.sampling.max_tokens
        self.groups = list(numbers)  # index of each prompt in prompt_keys
        self.prompt_lengths = dict(zip(numbers, prefill.lengths, strict=True))
        self.first_positions = dict(zip(numbers, after, strict=True))  # completion begins
        self.prompt_keys, self.prompt_values = (
            prefill.padded(layers) for layers in (prefill.keys, prefill.values)
        )
        self.prompt_mask = prefill.mask(self.prompt_keys)
        self.rows = [n * num_generations + j for n in numbers for j in range(num_generations)]
        self.length = 0  # cached tokens per row
        self.tokens: Tensor  # [B] last drawn, not yet in the cache
        self.new_keys: Sequence[Tensor] = ()  # one view per layer, see `make_room`
        self.new_values: Sequence[Tensor] = ()
        self.seen_keys: Sequence[Tensor] = ()
        self.seen_values: Sequence[Tensor] = ()
        self.prompt_columns = 0  # cache columns of copied prompts; 0 while rows share them
        self.mask: Tensor | None = None  # hides the padding of copied prompts, [B, 1, 1, K]
        layers, _, heads, _, dim = self.prompt_keys.shape
        room = min(ROOM, max_tokens)
        self.keys, self.values = (
            self.prompt_keys.new_empty(layers, len(self.rows), heads, room, dim) for _ in range(2)
        )
        # No two rows share a prompt. Prompts are copied again whenever the cache grows.
        if isinstance(prefill, Continuation) or (
            len(self.rows) == len(self.groups) and self.prompt_keys[0].nbytes * 2 <= WORTH
        ):
            self._unshare_prompts()
        if not self.prompt_columns:
            self._arrange()

    def __len__(self) -> int:
        return len(self.rows)

    def positions(self) -> list[int]:
        """Returns the position of each row's next token."""
        return [self.first_positions[r // self.num_generations] + self.length for r in self.rows]

    @property
    def longest(self) -> int:
        """Returns the largest number of tokens that a row's next token attends to, with itself."""
        most = max(self.prompt_lengths[r // self.num_generations] for r in self.rows)
        return most + self.length + 1

    def make_room(self) -> None:
        """Makes room in the cache for one more token per row."""
        room, t = self.keys.shape[3], self.prompt_columns + self.length
        if t == room:
            before = self.prompt_columns
            room_then = before + min(2 * (room - before), self.max_tokens)
            self._move(room_then, lambda cache, new: new[:, :, :, :room].copy_(cache))
        caches = [cache[:, : len(self.rows)] for cache in (self.keys, self.values)]
        # All layers' views in one call: one call for each would slow the step down.
        self.new_keys, self.new_values = (cache[:, :, :, t].unbind() for cache in caches)
        self.seen_keys, self.seen_values = (cache[:, :, :, : t + 1].unbind() for cache in caches)
        self.seen_mask = None if self.mask is None else self.mask[..., : t + 1]

    def _move(self, room: int, fill: Callable[[Tensor, Tensor], object]) -> None:
        """Allocates caches of [L, rows, Hkv, room, D]; `fill` copies the used columns."""
        self.new_keys = self.new_values = self.seen_keys = self.seen_values = ()  # free old views
        for name in ("keys", "values"):
            cache = getattr(self, name)[:, : len(self.rows)]
            new = cache.new_empty(*cache.shape[:3], room, cache.shape[4])
            fill(cache, new)
            setattr(self, name, new)

    def _unshare_prompts(self) -> None:
        """Copies the prompts into the rows' caches if sharing no longer pays off."""
        columns, heads, dim = self.prompt_keys.shape[3], *self.keys.shape[2::2]
        prompt = columns * 2 * heads * dim * self.keys.element_size()  # bytes in a layer
        again = (len(self.rows) - len(self.groups)) * prompt
        if self.prompt_columns or again > WORTH or len(self.rows) * prompt > COPIED:
            return
        slot = {number: i for i, number in enumerate(self.groups)}
        slots = torch.tensor(
            [slot[row // self.num_generations] for row in self.rows], device=self.keys.device
        )
        prompts = iter((self.prompt_keys, self.prompt_values))

        def fill(cache: Tensor, new: Tensor) -> None:
            new[:, :, :, :columns] = next(prompts)[:, slots]
            new[:, :, :, columns : columns + self.length] = cache[:, :, :, : self.length]

        self._move(columns + self.keys.shape[3], fill)
        if self.prompt_mask is not None:
            self.mask = self.prompt_mask.new_zeros(len(slots), 1, 1, columns + self.max_tokens)
            self.mask[..., :columns] = self.prompt_mask[slots]
        self.prompt_columns = columns
        # No longer read. A new tensor, since a view would keep the old memory.
        self.prompt_keys = self.prompt_values = self.prompt_keys.new_empty(
            self.keys.shape[0], 0, heads, columns, dim
        )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Returns the attention of one new token of each row, [B, Hq, D]."""
        size, heads, dim = key.shape
        self.new_keys[layer].copy_(key)
        self.new_values[layer].copy_(value)
        queries = query.view(size, heads, -1, dim)  # [B, Hkv, query heads of a key head, D]
        out, lse = flash(
            queries,
            self.seen_keys[layer],
            self.seen_values[layer],
            mask=self.seen_mask,
            scale=scale,
        )
        if self.prompt_columns:
            return out.reshape(size, -1, dim)
        groups, width = len(self.groups), self.width
        if self.places is None:
            spread = queries
        else:
            spread = queries.new_zeros(groups * width, *queries.shape[1:])
            spread[self.places] = queries
        of_prompt, lse_of_prompt = attend_to_prompts(
            spread, self.prompt_keys[layer], self.prompt_values[layer], self.prompt_mask, scale
        )
        if self.places is not None:
            of_prompt, lse_of_prompt = of_prompt[self.places], lse_of_prompt[self.places]
        return merge(out, lse, of_prompt, lse_of_prompt)[0].reshape(size, -1, dim)

    def cache_of(self, i: int) -> KeptCache:
        """Returns the cache of row i: its prompt and its tokens except the last drawn."""
        number = self.rows[i] // self.num_generations
        slot = 0 if self.prompt_columns else self.groups.index(number)
        parts = []
        for own, prompts in ((self.keys, self.prompt_keys), (self.values, self.prompt_values)):
            prompt = own[:, i] if self.prompt_columns else prompts[:, slot]
            begin, end = self.prompt_columns, self.prompt_columns + self.length
            parts.append(
                torch.cat([prompt[:, :, : self.prompt_lengths[number]], own[:, i, :, begin:end]], 2)
            )
        return KeptCache(self.state.ids(self.rows[i])[:-1], *parts)

    def take(self, tokens: Tensor, ended: Sequence[bool]) -> None:
        """Stores each row's next token, and drops the rows that ended with it."""
        self.tokens = tokens
        if any(ended):
            order = self._drop(ended)
            self.tokens = tokens[torch.tensor(order, dtype=torch.long, device=tokens.device)]

    def _drop(self, ended: Sequence[bool]) -> list[int]:
        """Drops rows; returns the old indices of the remaining rows, in their new order."""
        order, used = list(range(len(self.rows))), self.prompt_columns + self.length
        for i in reversed(range(len(ended))):
            if ended[i]:  # the last row moves to its place
                last = len(order) - 1
                if i != last:
                    for cache in (self.keys, self.values):
                        cache[:, i, :, :used] = cache[:, last, :, :used]
                    order[i] = order[last]
                order.pop()
        self.rows = [self.rows[i] for i in order]
        if self.mask is not None:
            self.mask = self.mask[order]
        if 0 < 2 * len(order) <= self.keys.shape[1]:  # frees the memory of ended rows
            self._move(
                self.keys.shape[3],
                lambda cache, new: new[:, :, :, :used].copy_(cache[:, :, :, :used]),
            )
        if self.prompt_columns or not order:
            return order
        left = {row // self.num_generations for row in self.rows}
        if len(left) < len(self.groups):
            kept = [i for i, number in enumerate(self.groups) if number in left]
            self.groups = [self.groups[i] for i in kept]
            index = torch.tensor(kept, device=self.keys.device)
            self.prompt_keys, self.prompt_values = (
                t.index_select(1, index) for t in (self.prompt_keys, self.prompt_values)
            )
            if self.prompt_mask is not None:
                self.prompt_mask = self.prompt_mask[index]
        self._unshare_prompts()
        if not self.prompt_columns:
            self._arrange()
        return order

    def _arrange(self) -> None:
        """Sets `places`, the index of each row when all groups are padded to the same width."""
        slot = {number: i for i, number in enumerate(self.groups)}
        count = [0] * len(self.groups)
        places = []
        for row in self.rows:
            group = slot[row // self.num_generations]
            places.append((group, count[group]))
            count[group] += 1
        self.width = max(count, default=0)
        flat = [group * self.width + i for group, i in places]
        in_order = flat == list(range(len(self.groups) * self.width))
        self.places = None if in_order else torch.tensor(flat, device=self.keys.device)
