"""Which tokens must not come next in a completion, by what it holds so far."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


def bad_word_ids(tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> list[list[int]]:
    """Returns the token sequences of words, at the beginning and in the middle of a text.

    A word with a space before it counts if it has another first token and as many tokens, as in
    vLLM.
    """
    sequences: list[list[int]] = []
    for word in words:
        first = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        sequences.append(first)
        if spaced[0] != first[0] and len(spaced) == len(first):
            sequences.append(spaced)
    return sequences


def completing(tokens: Sequence[int], sequences: Sequence[Sequence[int]]) -> list[int]:
    """Returns the tokens that would complete one of the sequences at the end of `tokens`."""
    found = []
    for *begun, last in sequences:
        if not begun or list(tokens[-len(begun) :]) == begun:
            found.append(last)
    return found


class Ngrams:
    """The n-grams of one row, prompt and completion; a token may not repeat one of them."""

    def __init__(self, n: int, tokens: Sequence[int]) -> None:
        self.n = n
        self.tokens: list[int] = []
        self.followers: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Adds the row's next token."""
        begun = self._last()
        if len(begun) == self.n - 1:
            self.followers[begun].add(token)
        self.tokens.append(token)

    def repeating(self) -> list[int]:
        """Returns the tokens that would repeat an n-gram."""
        return sorted(self.followers.get(self._last(), ()))

    def _last(self) -> tuple[int, ...]:
        """Returns the last n - 1 tokens, or fewer in a short row."""
        return tuple(self.tokens[len(self.tokens) - self.n + 1 :]) if self.n > 1 else ()
