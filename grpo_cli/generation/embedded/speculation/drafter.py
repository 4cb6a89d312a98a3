"""Decides when rows are decoded with drafts, and how many tokens they are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import nan

from transformers import PreTrainedModel

from grpo_cli.generation.embedded.decoding_state import DecodingState
from grpo_cli.generation.embedded.rows import RaggedRow
from grpo_cli.generation.embedded.speculation.drafts import NgramDrafts
from grpo_cli.generation.embedded.speculation.kept_completions import KeptCompletions

# Tokens that a step may compute for little more than it takes for one: on the CPU while the weights
# are read, on a GPU while the host launches its kernels.
BUDGET, BUDGET_ON_A_GPU = 16, 64
ENOUGH = 48  # tokens from which a share of right drafts is estimated
LEAST_SHARE = 0.3  # of tokens whose drafts have to be right
# Steps of rows that may have drafts, the tokens drawn in them, those drafted, and those accepted.
COUNTS = "steps", "drawn", "drafted", "accepted"


@dataclass
class Speculation:
    """Holds the settings and counts of speculative decoding, one for each generator."""

    most: int  # tokens drafted for a row
    budget: int = BUDGET  # tokens that a step computes at most
    kept: KeptCompletions | None = None  # of earlier epochs
    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0.0))

    def take_counts(self) -> dict[str, float]:
        """Returns what was counted since this was last called."""
        counts, self.counts = self.counts, dict.fromkeys(COUNTS, 0.0)
        return counts


def budget_of(model: PreTrainedModel) -> int:
    """Returns how many tokens a step computes at most where rows have drafts."""
    return BUDGET if model.device.type == "cpu" else BUDGET_ON_A_GPU


def draft_metrics(counts: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of counts, summed over processes."""
    return {
        "drafts/tokens": counts["drafted"],
        "drafts/accepted": counts["accepted"] / counts["drafted"] if counts["drafted"] else nan,
        "drafts/tokens_per_step": counts["drawn"] / counts["steps"] if counts["steps"] else nan,
    }


@dataclass
class Drafter:
    """Drafts for the rows of one call of the engine."""

    speculation: Speculation
    known: dict[tuple[DecodingState, int], NgramDrafts] = field(default_factory=dict)  # by prompt
    counted: dict[tuple[DecodingState, int], int] = field(default_factory=dict)  # tokens, by row
    judged: float = 0.0  # tokens for which it is known whether their drafts are right
    hits: float = 0.0  # those of them that are
    wait: int = 0  # tokens until it is asked again whether drafts pay
    proposed: int = 0
    accepted: int = 0

    def is_due(self, rows: int) -> bool:
        """Whether to ask if drafts pay, now that each of these rows has one token more.

        They do not while so many rows are left that none could have a draft. Asked anew each time
        that the rows have half as many tokens again.
        """
        self.wait -= rows
        return self.wait <= 0 and 2 * rows <= self.speculation.budget and self._agrees()

    def pays(self, rows: Sequence[tuple[DecodingState, int]]) -> bool:
        """Whether drafts would have been right often enough in the tokens of these rows so far.

        Tokens that were judged before count half. Rows that are decoded together do not know one
        another's tokens.
        """
        tokens = sum(len(state.tokens[row]) for state, row in rows)
        self.wait = max(tokens // 2, ENOUGH)
        self.judged, self.hits = self.judged / 2, self.hits / 2
        active = set(rows)
        for state, prompt in dict.fromkeys((s, row // s.num_generations) for s, row in rows):
            if (state, prompt) not in self.known:
                self.known[state, prompt] = self._with_kept(state.prompts[prompt])
            first = prompt * state.num_generations
            for number in range(first, first + state.num_generations):
                if (state, number) not in active:
                    self._count(state, number)
        for place in rows:
            state, number = place
            ids, start = state.tokens[number], self.counted.get(place, 0)
            self.judged += len(ids) - start
            self.hits += self.known[state, number // state.num_generations].hits(ids, start)
        for place in rows:
            self._count(*place)
        return self.judged >= ENOUGH and self.hits >= LEAST_SHARE * self.judged

    def _with_kept(self, prompt: Sequence[int]) -> NgramDrafts:
        """Returns what has followed a prompt in the last epoch; judges the last of it."""
        drafts, kept = NgramDrafts(prompt), self.speculation.kept
        completions = [] if kept is None else kept.of(prompt)
        left = sum(map(len, completions))
        for ids in completions:
            left -= len(ids)
            if left < ENOUGH:
                self.judged += len(ids)
                self.hits += drafts.hits(ids)
            drafts.add(ids)
        return drafts

    def _count(self, state: DecodingState, row: int) -> None:
        """Counts the tokens of a row that are new."""
        ids = state.tokens[row]
        self.known[state, row // state.num_generations].add(ids, self.counted.get((state, row), 0))
        self.counted[state, row] = len(ids)

    def draft(self, rows: Sequence[RaggedRow]) -> None:
        """Gives rows their drafts for the next step, within the budget."""
        room = max(self.speculation.budget // len(rows) - 1, 0)
        most = min(self.speculation.most, room) if self._agrees() else 0
        for row in rows:
            self._count(row.state, row.number)
            drafts = self.known[row.state, row.prompt]
            row.draft = drafts.draft(row.tokens, min(most, row.left - 1))

    def _agrees(self) -> bool:
        """Whether enough of what was proposed was accepted so far."""
        return self.proposed < ENOUGH or self.accepted >= LEAST_SHARE * self.proposed

    def count(self, rows: Sequence[RaggedRow]) -> None:
        """Counts what a step has drawn, and how many tokens of the drafts were right."""
        drafted, drawn = sum(len(row.draft) for row in rows), sum(row.drawn for row in rows)
        self.proposed += drafted
        self.accepted += drawn - len(rows)
        more = len(rows), drawn, drafted, drawn - len(rows)
        for name, number in zip(COUNTS, more, strict=True):
            self.speculation.counts[name] += number
