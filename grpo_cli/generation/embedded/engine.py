"""The embedded engine: decodes many completions of many prompts with the policy's own module.

    prompts      each computed once, packed; the group shares its keys and values
    rows         one per completion; finished rows are dropped at once, and when enough are free,
                 the next prompts begin (continuous batching)
    batch        rows that began together: their caches have one length (`decode_batch.py`)
    attention    a row's attention to its prompt and to its own tokens, merged by log-sum-exp; all
                 rows of a group read their prompt's keys together

A step is one forward pass over one token per row, as one packed sequence (`attention.py`). It runs
the model itself or, for some families, skips its modules (`direct_forward.py`).

Two prompts of 3 and 2 tokens with two completions each, max_rows = 4:

    prefill   one forward over 5 packed tokens; keys and values [L, 2, Hkv, 3, D], the last column
              of prompt 1 masked; the logits at tokens 3 and 5 give the first token of rows 0 to 3
    step 1    one forward over 4 tokens at positions 3, 3, 2, 2
    row 1 ends  row 3 takes its place in the cache; the next step is over 3 tokens
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_cli.generation.base import Finished
from grpo_cli.generation.embedded.decode_batch import Continuation, DecodeBatch, Prefill
from grpo_cli.generation.embedded.decoding_state import DecodingState, check_logits
from grpo_cli.generation.embedded.direct_forward import DirectForward
from grpo_cli.generation.embedded.graphs import FallbackGraphs
from grpo_cli.generation.embedded.kept_caches import KeptCache, KeptCaches
from grpo_cli.generation.embedded.static_decoding import StaticDecoding
from grpo_cli.models.attention import NOT_PASSED_ON, UnsupportedModelError, no_mask
from grpo_cli.models.families import placeholder_tokens, without_router_logits
from grpo_cli.models.packing import PositionIds, image_arguments
from grpo_cli.records import Prompt

PREFILL = 8192  # prompt tokens computed at once
REFILL = 0.5  # share of the rows that must be free before the next prompts begin


class DecodingStep:
    """Computes the attention of the new tokens of several batches."""

    def __init__(self, batches: Sequence[DecodeBatch]) -> None:
        self.batches = batches
        self.sizes = [len(c) for c in batches]
        self.longest = max(c.longest for c in batches)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if len(self.batches) == 1:
            return self.batches[0].attend(layer, query, key, value, scale)
        parts = zip(
            self.batches, *(torch.split(t, self.sizes) for t in (query, key, value)), strict=True
        )  # type: ignore[no-untyped-call]
        return torch.cat([c.attend(layer, q, k, v, scale) for c, q, k, v in parts])


Waiting = tuple[DecodingState, int]  # (request's state, index of a prompt that has not begun)


@dataclass(frozen=True)
class Engine:
    """Decodes with a model whose attention takes `attending` (`attention.install`)."""

    model: PreTrainedModel
    max_rows: int  # maximum batch size; a group is never split, and may be larger
    caches: KeptCaches | None = None  # KV caches between turns; None: single-turn only
    graphs: FallbackGraphs | None = None  # captures steps; None: no CUDA graphs
    direct: DirectForward | None = None  # None: made in each call if the model is supported

    @torch.no_grad()
    def decode(
        self, states: Sequence[DecodingState], arrived: Callable[[], Sequence[DecodingState]] = list
    ) -> Iterator[list[Finished]]:
        """Decodes every row from its prompt to its last token.

        Args:
            arrived: returns further states to decode; called when there is room.

        Yields:
            The prompts that have finished; also [] whenever there is room for further states.
        """
        under_way = list(states)
        waiting: deque[Waiting] = deque()
        batches: list[Any] = []  # DecodeBatch or StaticBatch
        direct = self.direct or DirectForward.of(self.model)
        # Not for conversations: their rows come and go singly, each into a new bucket.
        static = None
        if self.caches is None and self.graphs is not None:
            static = StaticDecoding.of(direct, self.graphs, states)
        steps = 0  # since the last call of `arrived`
        while True:
            for state in states:
                # Prompts of similar length are grouped to reduce padding.
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
                active = sum(map(len, batches))
                first = [number for _, number in begun]
                batches += self._begin(begun[0][0], first, direct, active=active)
            elif static is None:
                self._step(batches, direct)
            else:
                batches = [static.advance(batches)]
            batches = [batch for batch in batches if batch.rows]
            if static is not None and not batches:
                static.release()
            if finished := [done for state in under_way for done in state.take_finished()]:
                yield finished
            states, steps = [], steps + 1
            # Not after each token, since many small batches are slow.
            if batches and has_room and not waiting and steps > len(batches):
                yield []
                states, steps = arrived(), 0
                under_way = [state for state in under_way if state.missing] + [*states]

    def _admitted(self, waiting: deque[Waiting], free: int) -> list[Waiting]:
        """Pops the prompts that begin together; at least one if nothing else is decoded."""
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
        self,
        state: DecodingState,
        numbers: list[int],
        direct: DirectForward | None,
        *,
        active: int = 0,
    ) -> list[DecodeBatch]:
        """Computes prompts and draws the first token of each of their rows.

        Args:
            active: rows that are being decoded already.
        """
        active += len(numbers) * state.num_generations
        kept = self._kept(state, numbers)
        if self.caches is not None:
            self.caches.make_room(active)
        batches = []
        if new := [n for n in numbers if n not in kept]:
            prompts = [state.sources[n] for n in new]
            prefill = Prefill([p.ids for p in prompts], self.model.device)
            batches.append(self._prefill(state, new, prompts, prefill, direct, active=active))
            active -= len(new) - len(batches[-1])
        if kept:
            prompts = [state.sources[n] for n in kept]
            ids = [p.ids for p in prompts]
            continuation = Continuation(ids, list(kept.values()), self.model.device)
            kept_numbers = list(kept)
            kept.clear()  # the batch has copies
            batches.append(
                self._prefill(state, kept_numbers, prompts, continuation, direct, active=active)
            )
        return batches

    def _kept(self, state: DecodingState, numbers: Sequence[int]) -> dict[int, KeptCache]:
        """Pops the kept caches that these prompts continue, by prompt index."""
        kept: dict[int, KeptCache] = {}
        if self.caches is None or state.num_generations > 1:
            return kept
        for n in numbers:
            prompt, cache = (
                state.sources[n],
                self.caches.take(state.conversation(n), state.prompts[n]),
            )
            of_images = placeholder_tokens(self.model.config) if prompt.images else ()
            if cache is not None and {*of_images}.isdisjoint(prompt.ids[len(cache.ids) :]):
                kept[n] = cache
        return kept

    def _prefill(
        self,
        state: DecodingState,
        numbers: list[int],
        prompts: Sequence[Prompt],
        prefill: Prefill,
        direct: DirectForward | None,
        *,
        active: int,
    ) -> DecodeBatch:
        """Computes the uncached tokens of prompts, and draws the first token of their rows.

        Args:
            active: rows that are being decoded, including these.
        """
        known, device = prefill.known, self.model.device
        own = [len(p.ids) - k for p, k in zip(prompts, known, strict=True)]
        ends = [start + n for start, n in zip(prefill.starts, own, strict=True)]
        positions = PositionIds()
        after = [
            positions.add_prompt(p, self.model, k) for p, k in zip(prompts, known, strict=True)
        ]
        ids = [t for p, k in zip(prompts, known, strict=True) for t in p.ids[k:]]
        input_ids = torch.tensor([ids], device=device)
        # Where tokens are cached, so are the prompt's images.
        images = image_arguments(
            [p for p, k in zip(prompts, known, strict=True) if not k],
            input_ids,
            self.model,
            packed=True,
        )
        last = torch.tensor(ends, device=device) - 1
        logits = self._logits(input_ids, positions.tensor(device), prefill, direct, last, images)
        if not prefill.keys:
            raise UnsupportedModelError(NOT_PASSED_ON)
        if len({keys.shape for keys in prefill.keys}) > 1:
            raise UnsupportedModelError("its layers have keys of several sizes")
        check_logits(logits)
        batch = DecodeBatch(prefill, numbers, after, state)
        logits = logits.repeat_interleave(state.num_generations, 0)
        self._take(batch, *state.next(batch.rows, logits), active=active)
        return batch

    def _step(self, batches: Sequence[DecodeBatch], direct: DirectForward | None) -> None:
        """Draws one more token for every row."""
        for batch in batches:
            batch.make_room()
        positions = [p for batch in batches for p in batch.positions()]
        ids = torch.cat([batch.tokens for batch in batches])
        at = torch.tensor([positions], device=ids.device)
        logits = self._logits(ids[None], at, DecodingStep(batches), direct)
        active, start = sum(map(len, batches)), 0
        for state, group in groupby(batches, key=lambda batch: batch.state):
            together = list(group)
            rows = [row for batch in together for row in batch.rows]
            drawn, ended = state.next(rows, logits[start : start + len(rows)])
            start += len(rows)
            first = 0
            for batch in together:
                own = slice(first, first + len(batch))
                first += len(batch)
                batch.length += 1
                self._take(batch, drawn[own], ended[own], active=active)

    def _take(
        self, batch: DecodeBatch, tokens: Tensor, ended: Sequence[bool], *, active: int
    ) -> None:
        """Stores a batch's next tokens; keeps the caches of rows that ended for a later turn."""
        if self.caches is not None:
            gone = [i for i, has_ended in enumerate(ended) if has_ended]
            for i in gone:
                conversation = batch.state.conversation(batch.rows[i])
                self.caches.keep(conversation, partial(batch.cache_of, i), active - len(gone))
        batch.take(tokens, ended)

    def _logits(
        self,
        ids: Tensor,
        positions: Tensor,
        attending: Prefill | DecodingStep,
        direct: DirectForward | None,
        kept: Tensor | None = None,
        images: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Tensor:
        """Returns the logits of N tokens in one packed row, [N, V]; or of those at `kept`.

        Args:
            ids: [1, N]. positions: [1, N], or [3, 1, N] with M-RoPE.
            images: the model's keyword arguments for images.
        """
        if direct is not None and not images and attending.longest <= direct.window:
            return direct(ids, positions, attending, kept)
        # Raises UnsupportedModelError, with the reason, for models that cannot be decoded so.
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
