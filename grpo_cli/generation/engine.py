"""The embedded engine: decodes many completions of many prompts with the policy's own module.

    prompts      each computed once, packed, its keys and values kept once for its group
    rows         one a completion; a row that ends leaves at once, and when enough have left, the
                 next prompts take their place (continuous batching)
    batch        rows that began together: their caches have one length, so that nothing is masked
    attention    of a row to its prompt and to its own tokens, merged by their log-sum-exp; all rows
                 of a group read their prompt's keys together

A step is one forward pass over one token a row, as one packed sequence (`attention.py`): of the
model itself, or for some families without its modules (`direct_forward.py`).

Two prompts of 3 and 2 tokens with two completions each, max_rows = 4:

    prefill   one forward over 5 packed tokens; keys and values [L, 2, Hkv, 3, D], the last column
              of prompt 1 masked; the logits at tokens 3 and 5 give the first token of rows 0 to 3
    step 1    one forward over 4 tokens at positions 3, 3, 2, 2
    row 1 ends  row 3 takes its place in the cache; the next step is over 3 tokens
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_cli.generation.decoding_state import DecodingState, check_logits
from grpo_cli.generation.direct_forward import DirectForward
from grpo_cli.generation.graphs import FallbackGraphs
from grpo_cli.generation.kept_caches import KeptCache, KeptCaches
from grpo_cli.generation.prefill import Continuation, Prefill
from grpo_cli.generation.ragged_batch import RaggedBatch, RaggedRow, shape_of
from grpo_cli.generation.speculation import Drafter, Speculation
from grpo_cli.generation.static_decoding import StaticDecoding
from grpo_cli.models import vision
from grpo_cli.models.attention import (
    NOT_PASSED_ON,
    UnsupportedModelError,
    flash,
    merge,
    no_mask,
)
from grpo_cli.models.families import image_tokens, without_router_logits
from grpo_cli.models.memory import free_memory
from grpo_cli.records import Prompt

PREFILL = 8192  # prompt tokens computed at once
ROOM = 64  # tokens that a batch's cache begins with; it doubles when it is full
REFILL = 0.5  # share of the rows that have to be free for the next prompts to come in
# Bytes, in a layer, that a step may read twice to spare itself the merging of two attentions.
WORTH = 3 * 2**19


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
        self.prompt_mask = prefill.mask(self.prompt_keys.dtype, self.prompt_keys.device)
        self.rows = [n * num_generations + j for n in numbers for j in range(num_generations)]
        self.length = 0  # tokens of each row in the cache
        self.tokens: Tensor  # [B] drawn, not yet in the cache
        self.new_keys: Sequence[Tensor] = ()  # of each layer in a step: see `make_room`
        self.new_values: Sequence[Tensor] = ()
        self.seen_keys: Sequence[Tensor] = ()
        self.seen_values: Sequence[Tensor] = ()
        self.before = 0  # columns of the cache that hold its prompt, once rows share it no more
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
            self._part_prompts()
        if not self.before:
            self._arrange()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens that the next step computes: one a row."""
        return len(self.rows)

    def positions(self) -> list[int]:
        """Returns the position of each row's next token."""
        return [self.first_positions[r // self.num_generations] + self.length for r in self.rows]

    @property
    def longest(self) -> int:
        """Number of tokens that the next token of a row sees, itself included, at most."""
        most = max(self.prompt_lengths[r // self.num_generations] for r in self.rows)
        return most + self.length + 1

    def make_room(self) -> None:
        """Makes space in the cache for one more token of each row."""
        room, t = self.keys.shape[3], self.before + self.length
        if t == room:
            own = min(2 * (room - self.before), self.max_tokens)
            self._move(self.before + own, lambda cache, new: new[:, :, :, :room].copy_(cache))
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

    def conversation_of(self, i: int) -> int:
        """Returns the number of the conversation that row i continues."""
        return self.state.conversations[self.rows[i]]

    def ragged_row(self, i: int) -> RaggedRow:
        """Returns row i as one of a `RaggedBatch`, for which `cache_of` returns the cache."""
        number = self.rows[i] // self.num_generations
        length = self.prompt_lengths[number]
        shift = self.first_positions[number] - length
        return RaggedRow(self.state, self.rows[i], length + self.length, shift)

    def cache_of(self, i: int) -> KeptCache:
        """Returns the cache of row i: of its prompt and its tokens except the one just drawn."""
        number = self.rows[i] // self.num_generations
        slot = 0 if self.before else self.groups.index(number)
        parts = []
        for own, prompts in ((self.keys, self.prompt_keys), (self.values, self.prompt_values)):
            prompt = own[:, i] if self.before else prompts[:, slot]
            begin, end = self.before, self.before + self.length
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


Batch = DecodeBatch | RaggedBatch


class Step:
    """Computes the attention of the new tokens of every row of several batches."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = batches
        self.sizes = [c.num_tokens for c in batches]
        self.longest = max(c.longest for c in batches)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if len(self.batches) == 1:
            return self.batches[0].attend(layer, query, key, value, scale)
        parts = zip(
            self.batches, *(torch.split(t, self.sizes) for t in (query, key, value)), strict=True
        )  # type: ignore[no-untyped-call]
        return torch.cat([c.attend(layer, q, k, v, scale) for c, q, k, v in parts])


Waiting = tuple[DecodingState, int]  # a prompt that is not begun: its number in its request


@dataclass(frozen=True)
class Engine:
    """Decodes with a model that takes `attending` (`attention.install`)."""

    model: PreTrainedModel
    max_rows: int  # decoded at the same time; a group is never split, and may be larger
    caches: KeptCaches | None = None  # of conversations that go on; None: none does
    graphs: FallbackGraphs | None = None  # capture steps; None: decode step by step
    speculation: Speculation | None = None  # None: no drafts
    direct: DirectForward | None = None  # of these weights; None: made in each call, if it can be

    @torch.no_grad()
    def decode(
        self,
        states: Sequence[DecodingState],
        arrived: Callable[[], Sequence[DecodingState]] = list,
    ) -> None:
        """Decodes every row from its prompt to its last token.

        Args:
            arrived: returns more that is to be decoded; asked when there is room.
        """
        waiting: deque[Waiting] = deque()
        batches: list[Any] = []  # of any kind
        drafter = None if self.speculation is None else Drafter(self.speculation)
        direct = self.direct or DirectForward.of(self.model)
        # Conversations come and go one by one, and drafts differ in length: each would need another
        # bucket.
        static = None
        if self.caches is None and drafter is None:
            static = StaticDecoding.of(direct, self.graphs, states)
        steps = 0  # since it was asked
        while True:
            for state in states:
                # Prompts of like length go together, so that little is padded.
                numbers = range(len(state.prompts))
                order = sorted(numbers, key=lambda i, s=state: len(s.prompts[i]))  # type: ignore[misc]
                waiting.extend((state, n) for n in order)
            if not (waiting or batches):
                return
            free = self.max_rows - sum(map(len, batches))
            has_room = not batches or free >= max(REFILL * self.max_rows, 1)
            begun: list[Waiting] = []
            if waiting and has_room:
                begun = self._admitted(waiting, free)
            if begun:
                batches += self._begin(begun[0][0], [number for _, number in begun], direct)
            elif static is not None and (moved := static.advance(batches)) is not None:
                batches = [moved]
            else:
                static = None  # there is no memory for it
                self._step(batches, direct)
            batches = [batch for batch in batches if batch.rows]
            if drafter is not None and not waiting:
                batches = self._with_drafts(batches, drafter)
            states, steps = [], steps + 1
            # Not after each token, since many small batches are slow.
            if has_room and not waiting and steps > len(batches):
                states, steps = arrived(), 0

    def _admitted(self, waiting: deque[Waiting], free: int) -> list[Waiting]:
        """Takes the prompts that begin together; at least one if nothing else is decoded."""
        state = waiting[0][0]
        admitted: list[Waiting] = []
        tokens = 0
        while waiting and waiting[0][0] is state:
            tokens += len(state.prompts[waiting[0][1]])
            rows = (len(admitted) + 1) * state.num_generations
            if admitted and (rows > free or tokens > PREFILL):
                break
            if rows > free and free < self.max_rows:
                break
            admitted.append(waiting.popleft())
        return admitted

    def _begin(
        self, state: DecodingState, numbers: list[int], direct: DirectForward | None
    ) -> list[DecodeBatch]:
        """Computes prompts and draws the first token of each of their rows."""
        kept: dict[int, KeptCache] = {}
        if self.caches is not None and state.num_generations == 1:
            found = {n: self.caches.take(state.conversations[n], state.prompts[n]) for n in numbers}
            kept = {
                n: cache
                for n, cache in found.items()
                if cache is not None and not self._has_image(state.sources[n], len(cache.ids))
            }
        batches = []
        if new := [n for n in numbers if n not in kept]:
            prompts = [state.sources[n] for n in new]
            prefill = Prefill([p.ids for p in prompts], self.model.device)
            batches.append(self._prefill(state, new, prompts, prefill, direct))
        if kept:
            prompts = [state.sources[n] for n in kept]
            ids = [p.ids for p in prompts]
            continuation = Continuation(ids, list(kept.values()), self.model.device)
            kept_numbers = list(kept)
            kept.clear()  # the copies in the batch are enough
            batches.append(self._prefill(state, kept_numbers, prompts, continuation, direct))
        return batches

    def _has_image(self, prompt: Prompt, known: int) -> bool:
        """Whether tokens of an image lie behind the first `known` tokens of a prompt."""
        tokens = {*image_tokens(self.model.config)} if prompt.images else set()
        return not tokens.isdisjoint(prompt.ids[known:])

    def _prefill(
        self,
        state: DecodingState,
        numbers: list[int],
        prompts: Sequence[Prompt],
        prefill: Prefill | Continuation,
        direct: DirectForward | None,
    ) -> DecodeBatch:
        """Computes what is not kept of prompts, and draws the first token of their rows."""
        known, device = prefill.known, self.model.device
        own = [len(p.ids) - k for p, k in zip(prompts, known, strict=True)]
        ends = [start + n for start, n in zip(prefill.starts, own, strict=True)]
        positions = vision.PositionIds()
        prefill.after = [
            positions.add_prompt(p, self.model, k) for p, k in zip(prompts, known, strict=True)
        ]
        ids = [t for p, k in zip(prompts, known, strict=True) for t in p.ids[k:]]
        input_ids = torch.tensor([ids], device=device)
        # Tokens that are kept hold the images of their prompts.
        images = vision.image_arguments(
            [p for p, k in zip(prompts, known, strict=True) if not k],
            input_ids,
            self.model,
            packed=True,
        )
        last = torch.tensor(ends, device=device) - 1
        logits = self._logits(input_ids, positions.tensor(device), prefill, direct, last, images)
        if not prefill.keys:
            raise UnsupportedModelError(NOT_PASSED_ON)
        check_logits(logits)
        batch = DecodeBatch(prefill, numbers, state)
        logits = logits.repeat_interleave(state.num_generations, 0)
        self._take(batch, *state.next(batch.rows, logits), active=len(batch))
        return batch

    def _with_drafts(self, batches: list[Batch], drafter: Drafter) -> list[Batch]:
        """Returns the batches; as one whose rows get drafts, where few are left and it pays."""
        if all(isinstance(batch, RaggedBatch) for batch in batches):
            return batches
        if not drafter.is_due(sum(map(len, batches))):
            return batches
        places = [(batch, i) for batch in batches for i in range(len(batch))]
        rows = [batch.ragged_row(i) for batch, i in places]
        states = list(dict.fromkeys(row.state for row in rows))
        if not drafter.pays([(row.state, row.number) for row in rows]):
            return batches
        order = sorted(range(len(rows)), key=lambda i: states.index(rows[i].state))
        rows, like = [rows[i] for i in order], batches[0].keys
        if 2 * math.prod(shape_of(rows, like)) * like.element_size() > free_memory(like.device) / 2:
            return batches  # the old caches are there meanwhile
        caches = (places[i][0].cache_of(places[i][1]) for i in order)
        return [RaggedBatch(rows, caches, like, drafter)]

    def _step(self, batches: Sequence[Batch], direct: DirectForward | None) -> None:
        """Draws one more token of every row, or several of a row that has a draft."""
        plain = [batch for batch in batches if isinstance(batch, DecodeBatch)]
        ragged = [batch for batch in batches if isinstance(batch, RaggedBatch)]
        ordered: list[Batch] = [*plain, *ragged]
        for batch in ordered:
            batch.make_room()
        positions = [p for batch in ordered for p in batch.positions()]
        ids = torch.cat([batch.tokens for batch in ordered])
        at = torch.tensor([positions], device=ids.device)
        logits = self._logits(ids[None], at, Step(ordered), direct)
        active, start = sum(map(len, batches)), 0
        for state, group in groupby(plain, key=lambda batch: batch.state):
            together = list(group)
            rows = [row for batch in together for row in batch.rows]
            of_state = slice(start, start + len(rows))
            start += len(rows)
            drawn, ended = state.next(rows, logits[of_state])
            first = 0
            for batch in together:
                own = slice(first, first + len(batch))
                first += len(batch)
                batch.length += 1
                self._take(batch, drawn[own], ended[own], active=active)
        for drafted in ragged:
            own = slice(start, start + drafted.num_tokens)
            start += drafted.num_tokens
            ended = drafted.draw(logits[own])
            self._keep(drafted, ended, active)
            drafted.drop(ended)

    def _take(
        self, batch: DecodeBatch, tokens: Tensor, ended: Sequence[bool], *, active: int
    ) -> None:
        """Takes the next tokens of a batch; keeps the caches of rows that have ended."""
        self._keep(batch, ended, active)
        batch.take(tokens, ended)

    def _keep(self, batch: Batch, ended: Sequence[bool], active: int) -> None:
        """Keeps the caches of rows that have ended, if their conversations may go on."""
        if self.caches is None:
            return
        gone = [i for i, has_ended in enumerate(ended) if has_ended]
        for i in gone:
            self.caches.keep(batch.conversation_of(i), batch.cache_of(i), active - len(gone))

    def _logits(
        self,
        ids: Tensor,
        positions: Tensor,
        attending: Prefill | Continuation | Step,
        direct: DirectForward | None,
        kept: Tensor | None = None,
        images: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Tensor:
        """Returns the logits of N tokens in one packed row, [N, V]; or of those at `kept`.

        Args:
            ids: [1, N]. positions: [1, N], or [3, 1, N] with M-RoPE.
            images: the arguments of the model that hold images.
        """
        if direct is not None and not images and attending.longest <= direct.window:
            return direct(ids, positions, attending, kept)
        # This also says why a model cannot be decoded so.
        logits: Tensor = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=no_mask(ids.device),
            use_cache=False,
            attending=attending,
            **({} if kept is None else {"logits_to_keep": kept}),
            **without_router_logits(self.model),
            **images,
        ).logits
        return logits[0]
