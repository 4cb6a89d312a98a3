"""The embedded engine: decodes many completions of many prompts with the policy's own module.

    prompts      each computed once, packed, its keys and values kept once for its group
    rows         one a completion; a row that ends leaves at once, and when enough have left, the
                 next prompts take their place (continuous batching)
    batch        rows that began together: their caches have one length, so that nothing is masked
    attention    of a row to its prompt and to its own tokens, merged by their log-sum-exp; all rows
                 of a group read their prompt's keys together

A step runs the model's own forward over one token a row, as one packed sequence (`attention.py`).

Two prompts of 3 and 2 tokens with two completions each, max_rows = 4:

    prefill   one forward over 5 packed tokens; keys and values [L, 2, Hkv, 3, D], the last column
              of prompt 1 masked; the logits at tokens 3 and 5 give the first token of rows 0 to 3
    step 1    one forward over 4 tokens at positions 3, 3, 2, 2
    row 1 ends  row 3 takes its place in the cache; the next step is over 3 tokens
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_cli.generation.decoding_state import DecodingState, check_logits
from grpo_cli.models.attention import (
    NOT_PASSED_ON,
    Layout,
    UnsupportedModelError,
    flash,
    merge,
    no_mask,
)
from grpo_cli.models.families import without_router_logits

PREFILL = 8192  # prompt tokens computed at once
ROOM = 64  # tokens that a batch's cache begins with; it doubles when it is full
REFILL = 0.5  # share of the rows that have to be free for the next prompts to come in
# Bytes, in a layer, that a step may read twice to spare itself the merging of two attentions.
WORTH = 2**20


class Prefill:
    """Computes the attention of prompts to themselves, and keeps their keys and values."""

    def __init__(self, prompts: Sequence[Sequence[int]], device: torch.device) -> None:
        self.lengths = [len(p) for p in prompts]
        ends = torch.tensor(self.lengths).cumsum(0).tolist()
        self.starts = [end - length for end, length in zip(ends, self.lengths, strict=True)]
        self.layout = Layout(list(zip(self.starts, ends, strict=True)), [], device)
        self.longest = self.layout.longest
        self.keys: list[Tensor] = []  # of each layer, [N, Hkv, D]
        self.values: list[Tensor] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        assert layer == len(self.keys), "layers come one after another, each once"
        self.keys.append(key)
        self.values.append(value)
        return self.layout.attend(layer, query, key, value, scale)

    def padded(self, layers: list[Tensor]) -> Tensor:
        """Returns keys or values of all layers, a row for each prompt: [L, prompts, Hkv, P, D]."""
        device = layers[0].device
        columns = torch.arange(max(self.lengths), device=device)
        starts, lengths = (
            torch.tensor(t, device=device)[:, None] for t in (self.starts, self.lengths)
        )
        index = starts + torch.minimum(columns, lengths - 1)  # [prompts, P]
        return torch.stack([t[index].transpose(1, 2) for t in layers])

    def mask(self, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Returns the bias that hides the padding of `padded`, [prompts, 1, 1, P], or None."""
        if min(self.lengths) == max(self.lengths):
            return None
        columns = torch.arange(max(self.lengths), device=device)
        hidden = columns >= torch.tensor(self.lengths, device=device)[:, None]
        bias = torch.zeros(hidden.shape, dtype=dtype, device=device)
        return bias.masked_fill(hidden, -torch.inf)[:, None, None]


class DecodeBatch:
    """Holds rows that began together, with their caches; all are at the same token."""

    def __init__(
        self, prefill: Prefill, numbers: Sequence[int], num_generations: int, max_tokens: int
    ) -> None:
        """numbers: of the prompts in `prefill`; each gets `num_generations` rows."""
        self.num_generations = num_generations
        self.max_tokens = max_tokens
        self.groups = list(numbers)  # prompts whose keys and values are held, in their order
        self.prompt_lengths = dict(zip(numbers, prefill.lengths, strict=True))
        self.prompt_keys, self.prompt_values = (
            prefill.padded(layers) for layers in (prefill.keys, prefill.values)
        )
        self.prompt_mask = prefill.mask(self.prompt_keys.dtype, self.prompt_keys.device)
        self.rows = [n * num_generations + j for n in numbers for j in range(num_generations)]
        self.length = 0  # tokens of each row in the cache
        self.tokens: Tensor  # [B] drawn, not yet in the cache
        self.before = 0  # columns of the cache that hold its prompt, once rows share it no more
        self.mask: Tensor | None = None  # then: what hides the padding of prompts, [B, 1, 1, K]
        layers, _, heads, _, dim = self.prompt_keys.shape
        room = min(ROOM, max_tokens)
        self.keys, self.values = (
            self.prompt_keys.new_empty(layers, len(self.rows), heads, room, dim) for _ in range(2)
        )
        self._arrange()

    def __len__(self) -> int:
        return len(self.rows)

    def positions(self) -> list[int]:
        """Returns the position of each row's next token."""
        return [self.prompt_lengths[r // self.num_generations] + self.length for r in self.rows]

    def make_room(self) -> None:
        """Makes space in the cache for one more token of each row."""
        room = self.keys.shape[3]
        if self.before + self.length < room:
            return
        own = min(2 * (room - self.before), self.max_tokens)
        self._move(self.before + own, lambda cache, new: new[:, :, :, :room].copy_(cache))

    def _move(self, room: int, fill: Callable[[Tensor, Tensor], object]) -> None:
        """Replaces the caches by some of [L, rows, Hkv, room, D]; `fill` copies what counts."""
        for name in ("keys", "values"):
            cache = getattr(self, name)[:, : len(self.rows)]
            new = cache.new_empty(*cache.shape[:3], room, cache.shape[4])
            fill(cache, new)
            setattr(self, name, new)

    def _part_prompts(self) -> None:
        """Gives each row a prompt of its own in its cache, where sharing gains nothing any more."""
        columns, heads, dim = self.prompt_keys.shape[3], *self.keys.shape[2::2]
        again = (len(self.rows) - len(self.groups)) * columns
        if self.before or again * 2 * heads * dim * self.keys.element_size() > WORTH:
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
        self.before = columns
        self.prompt_keys = self.prompt_values = self.prompt_keys[:, :0]  # no longer read

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Returns the attention of one new token of each row, [B, Hq, D]."""
        size, heads, dim = key.shape
        t = self.before + self.length
        self.keys[layer, :size, :, t], self.values[layer, :size, :, t] = key, value
        queries = query.view(size, heads, -1, dim)  # [B, Hkv, query heads of a key head, D]
        out, lse = flash(
            queries,
            self.keys[layer, :size, :, : t + 1],
            self.values[layer, :size, :, : t + 1],
            mask=None if self.mask is None else self.mask[..., : t + 1],
            scale=scale,
        )
        if self.before:
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

    def take(self, tokens: Tensor, ended: Sequence[bool]) -> None:
        """Takes each row's next token, and takes out the rows that ended with it."""
        self.tokens = tokens
        if any(ended):
            order = self._drop(ended)
            self.tokens = tokens[torch.tensor(order, dtype=torch.long, device=tokens.device)]

    def _drop(self, ended: Sequence[bool]) -> list[int]:
        """Takes rows out; returns where the rows that are left have been, in their new order."""
        order, used = list(range(len(self.rows))), self.before + self.length
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
        if self.before or not order:
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
        self._part_prompts()
        if not self.before:
            self._arrange()
        return order

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


class Step:
    """Computes the attention of one new token of every row of several batches."""

    def __init__(self, batches: Sequence[DecodeBatch]) -> None:
        self.batches = batches
        self.sizes = [len(c) for c in batches]
        self.longest = max(max(c.positions()) + 1 for c in batches)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if len(self.batches) == 1:
            return self.batches[0].attend(layer, query, key, value, scale)
        parts = zip(
            self.batches, *(torch.split(t, self.sizes) for t in (query, key, value)), strict=True
        )  # type: ignore[no-untyped-call]
        return torch.cat([c.attend(layer, q, k, v, scale) for c, q, k, v in parts])


@dataclass(frozen=True)
class Engine:
    """Decodes with a model that takes `attending` (`attention.install`)."""

    model: PreTrainedModel
    max_rows: int  # decoded at the same time; a group is never split, and may be larger

    @torch.no_grad()
    def decode(self, state: DecodingState) -> None:
        """Decodes every row from its prompt to its last token."""
        prompts = state.prompts
        # Prompts of like length go together, so that little is padded.
        waiting = deque(sorted(range(len(prompts)), key=lambda i: len(prompts[i])))
        batches: list[DecodeBatch] = []
        while waiting or batches:
            free = self.max_rows - sum(map(len, batches))
            numbers: list[int] = []
            if waiting and (not batches or free >= max(REFILL * self.max_rows, 1)):
                numbers = self._admitted(waiting, free, state)
            if numbers:
                batches.append(self._begin(numbers, state))
            else:
                self._step(state, batches)
            batches = [batch for batch in batches if batch.rows]

    def _admitted(self, waiting: deque[int], free: int, state: DecodingState) -> list[int]:
        """Takes the prompts that begin together; at least one if nothing else is decoded."""
        numbers: list[int] = []
        tokens = 0
        while waiting:
            tokens += len(state.prompts[waiting[0]])
            rows = (len(numbers) + 1) * state.num_generations
            if numbers and (rows > free or tokens > PREFILL):
                break
            if rows > free and free < self.max_rows:
                break
            numbers.append(waiting.popleft())
        return numbers

    def _begin(self, numbers: list[int], state: DecodingState) -> DecodeBatch:
        """Computes prompts and draws the first token of each of their rows."""
        device = self.model.device
        prompts = [state.prompts[n] for n in numbers]
        prefill = Prefill(prompts, device)
        ends = [a + n for a, n in zip(prefill.starts, prefill.lengths, strict=True)]
        logits = self._forward(
            [t for p in prompts for t in p],
            [i for p in prompts for i in range(len(p))],
            prefill,
            torch.tensor(ends, device=device) - 1,
        )
        if not prefill.keys:
            raise UnsupportedModelError(NOT_PASSED_ON)
        check_logits(logits)
        batch = DecodeBatch(prefill, numbers, state.num_generations, state.sampling.max_tokens)
        logits = logits.repeat_interleave(state.num_generations, 0)
        batch.take(*state.next(batch.rows, logits))
        return batch

    def _step(self, state: DecodingState, batches: list[DecodeBatch]) -> None:
        """Draws one more token of every row."""
        for batch in batches:
            batch.make_room()
        rows = [row for batch in batches for row in batch.rows]
        positions = [p for batch in batches for p in batch.positions()]
        ids = torch.cat([batch.tokens for batch in batches])
        drawn, ended = state.next(rows, self._forward(ids, positions, Step(batches), None))
        start = 0
        for batch in batches:
            own = slice(start, start + len(batch))
            start += len(batch)
            batch.length += 1
            batch.take(drawn[own], ended[own])

    def _forward(
        self,
        ids: Sequence[int] | Tensor,
        positions: Sequence[int],
        attending: Prefill | Step,
        keep: Tensor | None,
    ) -> Tensor:
        """Returns the logits of N tokens in one packed row, [N, V]; or of the tokens in `keep`."""
        device = self.model.device
        logits: Tensor = self.model(
            input_ids=torch.as_tensor(ids, device=device)[None],
            position_ids=torch.tensor([positions], device=device),
            attention_mask=no_mask(device),
            use_cache=False,
            attending=attending,
            **without_router_logits(self.model),
            **({} if keep is None else {"logits_to_keep": keep}),
        ).logits
        return logits[0]
