"""Finds texts that end a completion in token ids, wherever the tokens cut them."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are no whole character
LONGEST_CHARACTER = 4  # bytes of UTF-8


class StopStrings:
    """Tells whether a completion has reached one of the stop strings.

    Most tokens cannot end a stop string, which is looked up; for the others a tail is decoded, just
    long enough for the longest stop string.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        assert all(stop), "an empty stop string would end every completion"
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        # A token has at least one byte of the text; one more for a space that decoding may strip.
        self.enough = max((len(s.encode()) for s in stop), default=0) + 1
        self.last = {s[-1] for s in stop}
        self.looks: dict[int, str] = {}  # of each token met so far

    def ends(self, ids: Sequence[int]) -> bool:
        """Returns whether the last of a completion's ids completes a stop string.

        Asked after each token, this is True at the first one whose text holds a stop string. A stop
        string that was complete before the last token, and was let pass, does not count.
        """
        if not self.stop or not ids or not self._may_complete(ids[-1]):
            return False
        tail = self._tail(ids)
        # A tail that begins inside a character can spoil those after it (Llama's byte tokens), so
        # that all beginnings are tried of which one must lie between two characters.
        for begin in range(max(0, len(tail) - self.enough), -1, -1):
            text = self._decode(tail[begin:])
            if any(s in text for s in self.stop):
                return self._completes(ids)
            if UNFINISHED not in text:
                return False
        return False

    def first_end(self, ids: Sequence[int], known: int, shortest: int) -> int | None:
        """Returns the length at which a stop string is complete; None if none is.

        Args:
            ids: tokens that were generated in pieces, the last of them by a generator that has
                looked for stop strings in it: a string that begins before it is found here.
            known: tokens before the last piece.
            shortest: smallest length.
        """
        across = known + self.enough if known else known
        for end in range(max(known + 1, shortest), len(ids) + 1):
            if end > across and end < len(ids):
                continue
            if self.ends(ids[:end]):
                return end
        return None

    def _tail(self, ids: Sequence[int]) -> list[int]:
        """Returns the last tokens that have text, with a character to spare."""
        tail: list[int] = []
        for token in reversed(ids):
            if self._look(token):
                tail.append(token)
            if len(tail) == self.enough + LONGEST_CHARACTER - 1:
                break
        return tail[::-1]

    def _completes(self, ids: Sequence[int]) -> bool:
        """Returns the same by the complete text; only called if a tail holds a stop string."""
        text, before = self._decode(ids), self._decode(ids[:-1])
        pairs = enumerate(zip(text, before, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(text), len(before)))
        return any(text.find(s, max(0, same - len(s) + 1)) >= 0 for s in self.stop)

    def _may_complete(self, token: int) -> bool:
        look = self._look(token)
        return UNFINISHED in look or not self.last.isdisjoint(look)

    def _look(self, token: int) -> str:
        """Returns all characters that a token can add to a text; "" for an unknown token."""
        look = self.looks.get(token)
        if look is None:
            # Twice, since the first of a text may lose its space.
            look = self.looks[token] = self._decode([token, token])
        return look

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text
