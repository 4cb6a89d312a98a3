"""Rows that began together: their caches have one length, so that no completion is padded.

Two prompts of 3 and 2 tokens with two completions each, after two steps:

    prompts   p p p | q q -          once for each group, padded to the longest
    rows      a a | b b | c c | d d  keys and values of the completions so far, [L, 4, Hkv, 2, D]
    step      4 queries, one a row; each sees its row, and its group's prompt: two attentions, which
              are merged by their log-sum-exp; the two rows of a prompt read its keys together

Rows that share little (few of a group are left, or a conversation goes on) get copies of their
prompts in front of their own tokens instead: one attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo_cli.generation.embedded.decoding_state import DecodingState
from grpo_cli.generation.embedded.kept_caches import KeptCache
from grpo_cli.generation.embedded.prefill import Continuation, Prefill
from grpo_cli.models.attention import flash, merge

ROOM = 64  # tokens that a batch's cache begins with; it doubles when it is full
# Bytes of prompts, in a layer, that a step may read more than once to spare itself the merging of
# two attentions.
WORTH = 3 * 2**19
COPIED = 2**24  # bytes of prompts, in a layer, that are copied for it at most


class DecodeBatch:
    """Holds rows that began together, with their caches; all are at the same token."""

    def __init__(
        self, prefill: Prefill | Continuation, numbers: Sequence[int], state: DecodingState
    ) -> None:
        """numbers: of the prompts in `prefill`; each gets `state.num_generations` rows."""
        self.state = state
        self.num_generations = num_generations = state.num_generations
        self.max_tokens = max_tokens = state.sampling.max_tokens
        self.groups = list(numbers)  # prompts whose keys and values are held, in their order
        self.prompt_lengths = dict(zip(numbers, prefill.lengths, strict=True))
        self.first_positions = dict(zip(numbers, prefill.after, strict=True))  # of completions
        self.prompt_keys, self.prompt_values = (
            prefill.padded(layers) for layers in (prefill.keys, prefill.values)
        )
        self.prompt_mask = prefill.mask(self.prompt_keys)
        self.rows = [n * num_generations + j for n in numbers for j in range(num_generations)]
        self.length = 0  # tokens of each row in the cache
        self.tokens: Tensor  # [B] drawn, not yet in the cache
        self.new_keys: Sequence[Tensor] = ()  # of each layer in a step: see `make_room`
        self.new_values: Sequence[Tensor] = ()
        self.seen_keys: Sequence[Tensor] = ()
        self.seen_values: Sequence[Tensor] = ()
        self.prompt_columns = 0  # of the cache that hold its prompt, once rows share it no more
        self.mask: Tensor | None = None  # then: what hides the padding of prompts, [B, 1, 1, K]
        layers, _, heads, _, dim = self.prompt_keys.shape
        room = min(ROOM, max_tokens)
        self.keys, self.values = (
            self.prompt_keys.new_empty(layers, len(self.rows), heads, room, dim) for _ in range(2)
        )
        # No two rows have the same prompt; and prompts are copied whenever a row's cache grows.
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
        """Returns how many tokens the next token of a row sees at most, itself included."""
        most = max(self.prompt_lengths[r // self.num_generations] for r in self.rows)
        return most + self.length + 1

    def make_room(self) -> None:
        """Makes space in the cache for one more token of each row."""
        room, t = self.keys.shape[3], self.prompt_columns + self.length
        if t == room:
            before = self.prompt_columns
            room_then = before + min(2 * (room - before), self.max_tokens)
            self._move(room_then, lambda cache, new: new[:, :, :, :room].copy_(cache))
        caches = [cache[:, : len(self.rows)] for cache in (self.keys, self.values)]
        # The parts of every layer, made at once: a step has no time to make them one by one.
        self.new_keys, self.new_values = (cache[:, :, :, t].unbind() for cache in caches)
        self.seen_keys, self.seen_values = (cache[:, :, :, : t + 1].unbind() for cache in caches)
        self.seen_mask = None if self.mask is None else self.mask[..., : t + 1]

    def _move(self, room: int, fill: Callable[[Tensor, Tensor], object]) -> None:
        """Replaces the caches by some of [L, rows, Hkv, room, D]; `fill` copies what counts."""
        self.new_keys = self.new_values = self.seen_keys = self.seen_values = ()  # of the old ones
        for name in ("keys", "values"):
            cache = getattr(self, name)[:, : len(self.rows)]
            new = cache.new_empty(*cache.shape[:3], room, cache.shape[4])
            fill(cache, new)
            setattr(self, name, new)

    def _unshare_prompts(self) -> None:
        """Gives each row a prompt of its own in its cache, where sharing gains nothing any more."""
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
        # No longer read, and not a part of the old ones, which would stay.
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
        repeats = queries.shape[2]
        together = spread.view(groups, width, heads, repeats, dim).transpose(1, 2)
        of_prompt, lse_of_prompt = flash(
            together.reshape(groups, heads, width * repeats, dim),
            self.prompt_keys[layer],
            self.prompt_values[layer],
            mask=self.prompt_mask,
            scale=scale,
        )
        of_prompt, lse_of_prompt = (
            t.view(groups, heads, width, repeats, *t.shape[3:]).transpose(1, 2).flatten(0, 1)
            for t in (of_prompt, lse_of_prompt)
        )
        if self.places is not None:
            of_prompt, lse_of_prompt = of_prompt[self.places], lse_of_prompt[self.places]
        return merge(out, lse, of_prompt, lse_of_prompt)[0].reshape(size, -1, dim)

    def cache_of(self, i: int) -> KeptCache:
        """Returns the cache of row i: of its prompt and its tokens except the one just drawn."""
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
        """Takes each row's next token, and takes out the rows that ended with it."""
        self.tokens = tokens
        if any(ended):
            order = self._drop(ended)
            self.tokens = tokens[torch.tensor(order, dtype=torch.long, device=tokens.device)]

    def _drop(self, ended: Sequence[bool]) -> list[int]:
        """Takes rows out; returns where the rows that are left have been, in their new order."""
        order, used = list(range(len(self.rows))), self.prompt_columns + self.length
        for i in reversed(range(len(ended))):
            if ended[i]:  # the last one takes its place
                last = len(order) - 1
                if i != last:
                    for cache in (self.keys, self.values):
                        cache[:, i, :, :used] = cache[:, last, :, :used]
                    order[i] = order[last]
                order.pop()
        self.rows = [self.rows[i] for i in order]
        if self.mask is not None:
            self.mask = self.mask[order]
        if 0 < 2 * len(order) <= self.keys.shape[1]:
            self._shrink(used)
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

    def _shrink(self, used: int) -> None:
        """Gives back the space of rows that have ended; `used` columns of the others count."""

        def copy(cache: Tensor, new: Tensor) -> None:
            new[:, :, :, :used] = cache[:, :, :, :used]

        self._move(self.keys.shape[3], copy)

    def _arrange(self) -> None:
        """Finds the place of each row among its prompt's rows; all prompts have the same width."""
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
