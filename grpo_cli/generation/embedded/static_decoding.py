"""Decodes in static buffers, so that a step is captured once as a CUDA graph and replayed.

    bucket    space for R rows of C columns, and for the prompts of their groups; a step of all rows
              reads and writes only these buffers, and draws each row's token on the device
    look      every `STEPS` steps the host reads the drawn tokens, cuts the rows that have ended at
              their eos and hands them over; tokens after the eos are discarded
    next      when the columns are full, half of the rows have ended or new rows begin, the
              remaining rows move to another bucket: 64, 96, 128, 192, ... columns; 1, 2, 4, 8, 16,
              24, ... rows

Rows need not have begun together: each has its own column t, and a mask hides the later columns.

    shared    [R, C] own tokens; prompts [groups, P] once for each group: two attentions are merged
    alone     [R, C] prompt and own tokens of each row, where repeating the prompts costs less

A row uses its own random stream and gets the same tokens as in `Engine._step`. Log-probabilities
differ from that step's by rounding, since attention is over more columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from grpo_cli.distributed import heartbeat
from grpo_cli.generation.embedded.decode_batch import WORTH, DecodeBatch, attend_to_prompts, mask_of
from grpo_cli.generation.embedded.decoding_state import DecodingState
from grpo_cli.generation.embedded.direct_forward import DirectForward
from grpo_cli.generation.embedded.graphs import FallbackGraphs, Replay
from grpo_cli.generation.embedded.kept_caches import KeptCache
from grpo_cli.generation.sampling import adjusted, pick
from grpo_cli.models.attention import flash, merge

STEPS = 8  # steps between two checks of which rows have ended
COLUMNS = 64  # columns of the smallest bucket
MULTIPLE = 8  # row and column counts are rounded up to a multiple of this
LEAST = 4  # minimum number of remaining steps for which a capture pays off


def row_bucket(rows: int) -> int:
    """Returns the row count of the smallest bucket for `rows` rows."""
    if rows <= MULTIPLE:
        return 1 << max(rows - 1, 0).bit_length()
    return -(-rows // MULTIPLE) * MULTIPLE


def column_bucket(columns: int, most: int) -> int:
    """Returns the column count of the smallest bucket for `columns`; at most `most`, rounded up."""
    size = COLUMNS
    while size < columns:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return min(size, -(-most // MULTIPLE) * MULTIPLE)


CacheOf = Callable[[], KeptCache]  # returns the cache of a row: its prompt and all tokens but one


@dataclass
class StaticRow:
    """Describes a row of a `StaticBatch`: a completion in decoding."""

    state: DecodingState
    number: int  # index of the row in its state
    prompt_length: int
    first_position: int  # position of the completion's first token

    @property
    def group(self) -> tuple[int, int]:
        """Returns the ids of the row's state and prompt, which identify its group."""
        return id(self.state), self.number // self.state.num_generations

    @property
    def own(self) -> int:
        """Returns the number of the completion's tokens in the cache: all except the last."""
        return len(self.state.tokens[self.number]) - 1

    @property
    def left(self) -> int:
        """Returns the number of tokens that may still be drawn."""
        return self.state.sampling.max_tokens - len(self.state.tokens[self.number])


class StaticShape:
    """Describes the shapes of the smallest bucket for some rows."""

    def __init__(self, rows: Sequence[StaticRow], like: Tensor) -> None:
        """like: keys [L, B, Hkv, T, D], which set the layers, heads and dtype."""
        self.rows = list(rows)
        layers, _, heads, _, dim = like.shape
        prompts = {row.group: row.prompt_length for row in rows}
        self.size = row_bucket(len(rows))
        column = 2 * heads * dim * like.element_size()  # bytes in a layer
        self.prompt_columns = max(prompts.values())
        again = (self.size - len(prompts)) * self.prompt_columns
        self.shared = again * column > WORTH
        self.groups = prompts if self.shared else {}  # group -> length of its shared prompt
        used = max(map(self.used, rows))
        most = max(self.used(row) + row.left for row in rows)
        self.columns = column_bucket(used + STEPS, most)
        self.steps = min(self.columns - used, max(row.left for row in rows))
        self.shape = layers, self.size, heads, self.columns, dim
        self.prompt_shape = layers, len(self.groups), heads, self.prompt_columns, dim

    def used(self, row: StaticRow) -> int:
        """Returns the number of columns that a row's tokens occupy."""
        return row.own + (0 if self.shared else row.prompt_length)


class StaticBatch:
    """Holds the buffers of a bucket, and decodes the rows in it."""

    def __init__(
        self, direct: DirectForward, bucket: StaticShape, caches: Sequence[CacheOf], like: Tensor
    ) -> None:
        """caches: return the caches of the bucket's rows. like: keys, as in `StaticShape`."""
        rows = bucket.rows
        self.direct, self.shared = direct, bucket.shared
        self.keys: Tensor
        self.values: Tensor
        self.sampling = rows[0].state.sampling
        self.longest = max(row.prompt_length + row.own for row in rows) + bucket.steps + 1
        # Zeros, since masked keys and values must be finite.
        self.keys, self.values = (like.new_zeros(bucket.shape) for _ in range(2))
        self.prompt_keys, self.prompt_values = (
            like.new_zeros(bucket.prompt_shape) for _ in range(2)
        )
        self._copy(bucket, caches)
        self.rows = dict(enumerate(rows))  # unfinished rows by their index in the buffers
        self.slots = {group: slot for slot, group in enumerate(bucket.groups)}
        self.steps = bucket.steps  # steps that the columns allow
        self.done = 0  # steps taken
        self.size, device = bucket.size, like.device
        tokens = [row.state.tokens[row.number][-1] for row in rows]
        self.tokens = self._of_rows(tokens)  # [R] last drawn
        self.positions = self._of_rows([row.first_position + row.own for row in rows])  # [R]
        self.column = self._of_rows([bucket.used(row) for row in rows])  # [R] columns of `tokens`
        self.all = torch.arange(self.size, device=device)
        hidden = torch.arange(bucket.columns, device=device) >= self.column[:, None]
        self.mask = mask_of(hidden, like)  # [R, 1, 1, C]
        if self.shared:
            self._arrange()
            columns = torch.arange(bucket.prompt_columns, device=device)
            lengths = torch.tensor([*bucket.groups.values()], device=device)
            self.prompt_mask = mask_of(columns >= lengths[:, None], like)  # [groups, 1, 1, P]
        self.bias = self.sampling.bias(sum(map(len, direct.head.weights)), device)
        self.at = torch.zeros(1, dtype=torch.long, device=device)  # `done`, on the device
        # Uniform numbers of each step, from the rows' own streams.
        noise = np.full((self.steps, self.size), 0.5, np.float32)
        for place, row in self.rows.items() if self.sampling.temperature > 0 else ():
            stream = row.state.stream(row.number)[row.own + 1 :][: self.steps]
            noise[: len(stream), place] = stream
        self.noise = torch.from_numpy(noise).to(device)  # [steps, R]
        self.drawn = torch.zeros(self.steps, self.size, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(self.steps, self.size, device=device)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def key(self) -> tuple[int, ...]:
        """Identifies the shapes of the buffers."""
        return (*self.keys.shape, *self.prompt_keys.shape)

    @property
    def steps_left(self) -> int:
        """Returns the number of steps that the columns allow and that an unfinished row needs."""
        longest = max((row.left for row in self.rows.values()), default=0)
        return min(self.steps - self.done, longest)

    def _of_rows(self, values: Sequence[int]) -> Tensor:
        """Returns the values as a tensor [R], padded with 0 for unused places."""
        padding = [0] * (self.size - len(values))
        return torch.tensor([*values, *padding], device=self.keys.device)

    def _copy(self, bucket: StaticShape, caches: Sequence[CacheOf]) -> None:
        """Copies the caches of rows, and of shared prompts."""
        first: dict[tuple[int, int], CacheOf] = {}
        for row, cache_of in zip(bucket.rows, caches, strict=True):
            first.setdefault(row.group, cache_of)
        for slot, (group, length) in enumerate(bucket.groups.items()):
            cache = first[group]()
            self.prompt_keys[:, slot, :, :length] = cache.keys[:, :, :length]
            self.prompt_values[:, slot, :, :length] = cache.values[:, :, :length]
        for place, (row, cache_of) in enumerate(zip(bucket.rows, caches, strict=True)):
            used, cache = bucket.used(row), cache_of()
            behind = row.prompt_length if bucket.shared else 0
            self.keys[:, place, :, :used] = cache.keys[:, :, behind:]
            self.values[:, place, :, :used] = cache.values[:, :, behind:]

    def _arrange(self) -> None:
        """Sets `whose` and `back`: row indices when all groups are padded to the same width."""
        count = [0] * len(self.slots)
        found = []
        for row in self.rows.values():
            slot = self.slots[row.group]
            found.append((slot, count[slot]))
            count[slot] += 1
        self.width = max(count)
        flat = [slot * self.width + i for slot, i in found]
        whose = [0] * (len(count) * self.width)  # padding repeats row 0; its result is not read
        for place, position in enumerate(flat):
            whose[position] = place
        self.whose = torch.tensor(whose, device=self.keys.device)  # [groups * width] row indices
        self.back = self._of_rows(flat)  # [R] indices into `whose`

    def step(self) -> None:
        """Draws the next token of every row without synchronizing with the host."""
        self.mask.scatter_(-1, self.column[:, None, None, None], 0.0)
        logits = self.direct(self.tokens[None], self.positions[None], self)
        scores = adjusted(logits, self.sampling, self.bias, None, None, None)
        uniforms = self.noise.index_select(0, self.at)[0]
        token, logprob = pick(scores, self.sampling, uniforms, at_once=True)
        self.drawn.index_copy_(0, self.at, token[None])
        self.logprobs.index_copy_(0, self.at, logprob[None])
        self.tokens.copy_(token)
        for counter in (self.positions, self.column, self.at):
            counter.add_(1)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Returns the attention of one new token of each row, [R, Hq, D]."""
        size, heads, dim = key.shape
        self.keys[layer][self.all, :, self.column] = key
        self.values[layer][self.all, :, self.column] = value
        queries = query.view(size, heads, -1, dim)  # [R, Hkv, query heads of a key head, D]
        out, lse = flash(queries, self.keys[layer], self.values[layer], mask=self.mask, scale=scale)
        if not self.shared:
            return out.reshape(size, -1, dim)
        of_prompt, lse_of_prompt = attend_to_prompts(
            queries.index_select(0, self.whose),
            self.prompt_keys[layer],
            self.prompt_values[layer],
            self.prompt_mask,
            scale,
        )
        of_prompt, lse_of_prompt = (
            t.index_select(0, self.back) for t in (of_prompt, lse_of_prompt)
        )
        return merge(out, lse, of_prompt, lse_of_prompt)[0].reshape(size, -1, dim)

    def cache_of(self, place: int) -> KeptCache:
        """Returns the cache of the row at `place`: its prompt and its tokens except the last."""
        row = self.rows[place]
        used = row.own + (0 if self.shared else row.prompt_length)
        keys, values = (t[:, place, :, :used] for t in (self.keys, self.values))
        if self.shared:
            slot, length = self.slots[row.group], row.prompt_length
            keys, values = (
                torch.cat([prompts[:, slot, :, :length], own], 2)
                for prompts, own in ((self.prompt_keys, keys), (self.prompt_values, values))
            )
        return KeptCache(row.state.ids(row.number)[:-1], keys, values)

    def look(self, steps: int) -> None:
        """Stores the tokens of the last steps, and drops the rows that they end."""
        heartbeat.beat()
        last = slice(self.done - steps, self.done)
        tokens, logprobs = (t[last].T.tolist() for t in (self.drawn, self.logprobs))
        for place, row in [*self.rows.items()]:
            if row.state.take(row.number, tokens[place], logprobs[place]):
                del self.rows[place]


def rows_of(batches: Sequence[StaticBatch | DecodeBatch]) -> Iterator[tuple[StaticRow, CacheOf]]:
    """Yields the rows of batches, each with the function that returns its cache."""
    for batch in batches:
        if isinstance(batch, StaticBatch):
            for place, row in batch.rows.items():
                yield row, partial(batch.cache_of, place)
            continue
        for place, number in enumerate(batch.rows):
            prompt = number // batch.num_generations
            first = batch.first_positions[prompt]
            row = StaticRow(batch.state, number, batch.prompt_lengths[prompt], first)
            yield row, partial(batch.cache_of, place)


class StaticDecoding:
    """Decodes an engine's batches in buckets; see the docstring of this file."""

    def __init__(self, direct: DirectForward, graphs: FallbackGraphs) -> None:
        self.direct = direct
        self.graphs = graphs
        self.replay: Replay | None = None  # captured step of the current bucket

    @classmethod
    def of(
        cls,
        direct: DirectForward | None,
        graphs: FallbackGraphs,
        states: Sequence[DecodingState],
    ) -> StaticDecoding | None:
        """Returns the decoder for these states, or None if they must be decoded step by step."""
        if direct is None or graphs.has_failed or not states:
            return None
        if direct.rotary.is_dynamic:
            return None
        settings = {replace(s.sampling, max_tokens=0) for s in states}
        if len(settings) > 1 or not all(s.reads_no_history for s in states):
            return None
        if max(s.longest for s in states) > direct.window:
            return None
        return cls(direct, graphs)

    def advance(self, batches: Sequence[StaticBatch | DecodeBatch]) -> StaticBatch:
        """Draws up to `STEPS` tokens for every row; returns the batch that now holds the rows."""
        batch: StaticBatch | None = None
        if len(batches) == 1 and isinstance(batches[0], StaticBatch):
            batch = batches[0]
        if batch is None or not batch.steps_left or row_bucket(len(batch)) <= batch.size // 2:
            self.release()
            rows, caches = zip(*rows_of(batches), strict=True)
            keys = batches[0].keys
            batch = StaticBatch(self.direct, StaticShape(rows, keys), caches, keys)
        steps = min(STEPS, batch.steps_left)
        for _ in range(steps):
            # The first step of a bucket does the one-time set-up; the second is captured.
            if self.replay is None and batch.done and batch.steps_left >= LEAST:
                self.replay = self.graphs.capture(batch.key, batch.step)
            (batch.step if self.replay is None else self.replay)()
            batch.done += 1
        batch.look(steps)
        return batch

    def release(self) -> None:
        """Frees the captured step and its memory."""
        self.replay = None
