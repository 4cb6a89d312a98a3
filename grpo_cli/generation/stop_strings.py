"""Finds stop strings in token ids, even where a string begins or ends inside a token."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from grpo_cli.records import decoded

UNFINISHED = "\ufffd"  # decoders write it for an incomplete UTF-8 character
LONGEST_CHARACTER = 4  # bytes of UTF-8


class StopStrings:
    """Detects whether a completion has reached one of the stop strings.

    A lookup rules out most tokens, which cannot end a stop string. For the others a tail is
    decoded that is just long enough for the longest stop string.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        assert all(stop), "an empty stop string would end every completion"
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        # A token has at least one byte of text; one more for a space that decoding may strip.
        self.enough = max((len(s.encode()) for s in stop), default=0) + 1
        self.last = {s[-1] for s in stop}
        self.looks: dict[int, str] = {}  # token id -> its text, see `_look`

    def ends(self, ids: Sequence[int]) -> bool:
        """Returns whether the last of a completion's ids completes a stop string.

        If called after each token, it is True at the first token that completes a stop string. A
        stop string that was complete before the last token does not count.
        """
        if not self.stop or not ids:
            return False
        look = self._look(ids[-1])
        if UNFINISHED not in look and self.last.isdisjoint(look):
            return False
        tail: list[int] = []  # the last tokens that have text, with room for one cut character
        for token in reversed(ids):
            if self._look(token):
                tail.insert(0, token)
            if len(tail) == self.enough + LONGEST_CHARACTER - 1:
                break
        # A tail that begins inside a character can garble the characters after it (Llama's byte
        # tokens). Hence several beginnings are tried, one of which lies between two characters.
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
            ids: tokens that were generated in pieces. The generator has searched the last piece
                for stop strings; strings that begin before that piece are found here.
            known: number of tokens before the last piece.
            shortest: smallest length to return.
        """
        across = known + self.enough if known else known
        for end in range(max(known + 1, shortest), len(ids) + 1):
            if end > across and end < len(ids):
                continue
            if self.ends(ids[:end]):
                return end
        return None

    def _completes(self, ids: Sequence[int]) -> bool:
        """Confirms by decoding all ids that the last token completes a stop string."""
        text, before = self._decode(ids), self._decode(ids[:-1])
        pairs = enumerate(zip(text, before, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(text), len(before)))
        return any(text.find(s, max(0, same - len(s) + 1)) >= 0 for s in self.stop)

    def _look(self, token: int) -> str:
        """Returns all characters that a token can add to a string; "" for an unknown token."""
        look = self.looks.get(token)
        if look is None:
            # Twice, since the first token of a decoded string may lose its leading space.
            look = self.looks[token] = self._decode([token, token])
        return look

    def _decode(self, ids: Sequence[int]) -> str:
        return decoded(self.tokenizer, ids, special=True)
