"""Keeps the newest completions of each prompt, as drafts for the next epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

MOST_TOKENS = 2**22  # of all completions that are kept: 16 MiB


class KeptCompletions:
    """Holds completions by their prompts' tokens; the oldest are dropped first."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self.most_tokens = most_tokens
        self.tokens = 0
        self.groups: dict[str, list[np.ndarray]] = {}

    def keep(
        self, prompt: Sequence[int], completions: Sequence[Sequence[int] | np.ndarray]
    ) -> None:
        """Keeps the completions of a prompt instead of those kept before."""
        self._drop(name_of(prompt))
        group = [np.asarray(ids, dtype=np.int32) for ids in completions]
        self.groups[name_of(prompt)] = group
        self.tokens += sum(map(len, group))
        while self.tokens > self.most_tokens:
            self._drop(next(iter(self.groups)))

    def _drop(self, name: str) -> None:
        self.tokens -= sum(map(len, self.groups.pop(name, [])))

    def of(self, prompt: Sequence[int]) -> list[list[int]]:
        """Returns the token ids of each completion that is kept of a prompt."""
        return [ids.tolist() for ids in self.groups.get(name_of(prompt), [])]

    def to_state(self) -> dict[str, Any]:
        """Returns what a checkpoint stores."""
        lengths = [[len(ids) for ids in group] for group in self.groups.values()]
        ids = [ids for group in self.groups.values() for ids in group]
        return {
            "names": list(self.groups),
            "lengths": lengths,
            "ids": (np.concatenate(ids) if ids else np.zeros(0, np.int32)).tobytes(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what a checkpoint has stored."""
        ids, first = np.frombuffer(state["ids"], dtype=np.int32), 0
        self.groups = {}
        for name, lengths in zip(state["names"], state["lengths"], strict=True):
            ends = first + np.cumsum(lengths)
            self.groups[name] = [
                ids[end - n : end].copy() for end, n in zip(ends, lengths, strict=True)
            ]
            first += sum(lengths)
        self.tokens = len(ids)


def name_of(prompt: Sequence[int]) -> str:
    """Returns a digest of a prompt's tokens."""
    return blake2b(np.asarray(prompt, dtype=np.int64).tobytes(), digest_size=12).hexdigest()
