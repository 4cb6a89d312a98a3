"""Rows of unequal lengths that are decoded together, each by several tokens at a time.

Once few completions are left, a step takes about as long for several tokens of a row as for one: it
reads the same weights. So each row is given a draft (`drafts.py`) and the tokens are computed
together; those that agree with what is drawn are kept.

Two rows, of which the first has a draft of two tokens and the second none:

    cache     p p p a a a . . .     the prompt and the tokens before the last one
              q q b b . . . . .
    step      a d d | b             the last token and the draft: columns 6, 7, 8 | 4
    drawn     d e                   d agrees, e does not: two tokens more; columns 6 and 7 count
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from grpo_cli.generation.embedded.kept_caches import KeptCache
from grpo_cli.generation.embedded.rows import RaggedRow
from grpo_cli.generation.embedded.speculation.drafter import Drafter
from grpo_cli.models.attention import flash

ROOM = 64  # columns that a cache gets more than it needs


def shape_of(rows: Sequence[RaggedRow], like: Tensor) -> tuple[int, ...]:
    """Returns the shape of the keys of a batch that begins with some rows, [L, B, Hkv, C, D]."""
    layers, _, heads, _, dim = like.shape
    columns = min(
        max(row.cached for row in rows) + ROOM, max(row.cached + 1 + row.left for row in rows)
    )
    return layers, len(rows), heads, columns, dim


class RaggedBatch:
    """Holds rows with caches of their own, [L, B, Hkv, columns, D], filled from the left."""

    def __init__(
        self, rows: Sequence[RaggedRow], caches: Iterable[KeptCache], like: Tensor, drafter: Drafter
    ) -> None:
        """Copies the caches of rows.

        Args:
            caches: of the rows' tokens except the last; read one after another.
            like: keys of a batch, [L, B, Hkv, T, D].
            drafter: drafts for the rows.
        """
        self.rows = list(rows)
        self.drafter = drafter
        self.device = like.device
        shape = shape_of(rows, like)
        self.keys, self.values = (like.new_zeros(shape) for _ in range(2))
        for i, cache in enumerate(caches):
            length = cache.keys.shape[2]
            self.keys[:, i, :, :length], self.values[:, i, :, :length] = cache.keys, cache.values

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens that the next step computes."""
        return sum(row.width for row in self.rows)

    @property
    def longest(self) -> int:
        """Returns how many tokens a token of the next step sees at most, itself included."""
        return max(row.cached + row.width for row in self.rows)

    def positions(self) -> list[int]:
        """Returns the position of each token of the next step."""
        return [row.cached + row.shift + i for row in self.rows for i in range(row.width)]

    def make_room(self) -> None:
        """Drafts the next step, and makes space in the cache for its tokens."""
        self.drafter.draft(self.rows)
        room = self.keys.shape[3]
        if self.longest > room:
            for name in ("keys", "values"):
                cache = getattr(self, name)[:, : len(self.rows)]
                most = max(row.cached + 1 + row.left for row in self.rows)
                grown = min(self.longest + room, most)
                new = cache.new_zeros(*cache.shape[:3], grown, cache.shape[4])
                new[:, :, :, :room] = cache
                setattr(self, name, new)
        widths = [row.width for row in self.rows]
        ids = [t for row in self.rows for t in (row.tokens[-1], *row.draft)]
        columns = [row.cached + i for row in self.rows for i in range(row.width)]
        rows = [i for i, width in enumerate(widths) for _ in range(width)]
        table = torch.tensor([ids, columns, rows], device=self.device)
        self.tokens, self.columns, self.row_of = table
        self.seen = self.longest  # columns that any token sees
        self.widest = max(widths)
        starts = [sum(widths[:i]) for i in range(len(widths))]
        # Where each row's tokens lie among all; a row that has fewer repeats its last.
        places = [
            [start + min(i, width - 1) for i in range(self.widest)]
            for start, width in zip(starts, widths, strict=True)
        ]
        self.places = torch.tensor(places, device=self.device)  # [B, W]
        self.is_even = min(widths) == self.widest
        self.place_of = torch.tensor(
            [i * self.widest + j for i, width in enumerate(widths) for j in range(width)],
            device=self.device,
        )
        self.bias: Tensor | None = None
        self.sees_all = all(row.cached + 1 == self.seen for row in self.rows)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Returns the attention of the step's N tokens, [N, Hq, D]; see `Attending`."""
        size, (heads, dim) = len(self.rows), key.shape[1:]
        keys, values = self.keys[layer, :size], self.values[layer, :size]
        keys[self.row_of, :, self.columns] = key
        values[self.row_of, :, self.columns] = value
        repeats = query.shape[1] // heads
        queries = query if self.is_even else query[self.places.flatten()]
        queries = queries.view(size, self.widest, heads, repeats, dim).permute(0, 2, 3, 1, 4)
        out, _ = flash(
            queries.reshape(size, heads, repeats * self.widest, dim),
            keys[:, :, : self.seen],
            values[:, :, : self.seen],
            mask=self._mask(query, repeats),
            scale=scale,
        )
        out = out.view(size, heads, repeats, self.widest, dim).permute(0, 3, 1, 2, 4)
        out = out.reshape(size * self.widest, -1, dim)
        return out if self.is_even else out[self.place_of]

    def _mask(self, query: Tensor, repeats: int) -> Tensor | None:
        """Returns what hides later tokens and empty columns, [B, 1, repeats * W, columns]."""
        if self.sees_all:
            return None
        if self.bias is None:
            last = self.columns[self.places]  # [B, W] that each token sees
            hidden = torch.arange(self.seen, device=self.device) > last[..., None]
            bias = torch.zeros(hidden.shape, dtype=query.dtype, device=self.device)
            self.bias = bias.masked_fill(hidden, -torch.inf).repeat(1, repeats, 1)[:, None]
        return self.bias

    def draw(self, logits: Tensor) -> list[bool]:
        """Draws the next tokens of every row; returns which rows have ended.

        Args:
            logits: [N, V], for the token after each token of the step.
        """
        ended: list[bool] = []
        start = 0
        for state, group in groupby(self.rows, key=lambda row: row.state):
            rows = list(group)
            end = start + sum(row.width for row in rows)
            before = [len(row.tokens) for row in rows]
            ended += state.next_drafted(
                [row.number for row in rows], [row.draft for row in rows], logits[start:end]
            )
            for row, had in zip(rows, before, strict=True):
                row.drawn = len(row.tokens) - had
                row.cached += row.drawn
            start = end
        self.drafter.count(self.rows)
        return ended

    def conversation_of(self, i: int) -> int:
        """Returns the number of the conversation that row i continues."""
        return self.rows[i].state.conversations[self.rows[i].number]

    def ragged_row(self, i: int) -> RaggedRow:
        """Returns row i."""
        return self.rows[i]

    def cache_of(self, i: int) -> KeptCache:
        """Returns the cache of row i: of its prompt and its tokens except the one just drawn."""
        row = self.rows[i]
        parts = (side[:, i, :, : row.cached].clone() for side in (self.keys, self.values))
        return KeptCache(row.state.ids(row.number)[: row.cached], *parts)

    def drop(self, ended: Sequence[bool]) -> None:
        """Takes out the rows that have ended; the last one takes the place of each."""
        for i in reversed([i for i, has_ended in enumerate(ended) if has_ended]):
            last = self.rows.pop()
            if i < len(self.rows):
                used = last.cached
                for cache in (self.keys, self.values):
                    cache[:, i, :, :used] = cache[:, len(self.rows), :, :used]
                self.rows[i] = last
