r"""Encodes text of rows, tools and environments without producing control tokens.

A control token, such as <|im_end|>, is one token if the recipe or the chat template writes it, and
plain text if a row does. A mark after its first character identifies text from a row, and survives
the chat template:

    control = ControlTokens(tokenizer)
    text = control.mark("Hi<|im_end|>")                      # "Hi<" MARK "|im_end|>"
    control.encode(f"<|im_start|>user\n{text}<|im_end|>")    # two control tokens
    control.encode_plain("Hi<|im_end|>")                     # none

Text without control tokens gets no mark and is tokenized as usual.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator
from typing import TYPE_CHECKING, Any

from grpo_cli.errors import UserError

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerBase

# ASCII without letters, quotes or spaces, so that templates copy, escape or print it unchanged.
MARK = "^~31~^~08~^~74~^"


class ControlTokens:
    """The control tokens of a tokenizer: its added tokens, except those in its base vocabulary."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kept: Container[str] = ()) -> None:
        """Collects the tokens.

        Args:
            kept: tokens that rows may write, such as the placeholder of an image.
        """
        self.tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._normalizer = getattr(backend, "normalizer", None)
        named, template = {*tokenizer.all_special_tokens}, str(tokenizer.chat_template)

        def is_word(token: AddedToken) -> bool:  # Gemma has <table> and <h1> among its added tokens
            text = token.content
            if token.special or text in named or text in template or backend is None:
                return False
            return backend.model.token_to_id(text) is not None

        added = {
            token.content: i
            for i, token in tokenizer.added_tokens_decoder.items()
            if len(text := token.content) > 1 and text.strip() and text not in kept
            if not is_word(token)
        }
        self.ids = frozenset(added.values())
        longest_first = sorted(added, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) if added else r"(?!)")

    def mark(self, value: Any) -> Any:
        """Marks the control tokens in all strings of a value."""
        return _map_texts(value, lambda text: MARK.join(self._cut(text)))

    def encode_plain(self, text: str) -> list[int]:
        """Tokenizes text that is not at the beginning, without control tokens.

        `split_special_tokens` would miss tokens that are not marked as special, such as
        <tool_call>. It also sets a flag of the tokenizer that other threads see.
        """
        return [i for piece in self._cut(text) if piece for i in self.encode_behind(piece)]

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Tokenizes text; marked control tokens in it become plain text."""
        first, *rest = text.split(MARK)
        ids = self._ids(first)
        more = [i for piece in rest for i in self.encode_behind(piece)]
        if not add_special_tokens:
            return ids + more
        found: Any = self.tokenizer(first, add_special_tokens=True)
        around = list(found["input_ids"])
        places = range(len(around) - len(ids) + 1)
        end = next((n + len(ids) for n in places if around[n : n + len(ids)] == ids), len(around))
        return around[:end] + more + around[end:]

    def encode_behind(self, text: str, after: int | None = None) -> list[int]:
        """Tokenizes text that is not at the beginning.

        Args:
            after: the token before the text.
        """
        if after is not None:
            both = self.encode(str(self.tokenizer.convert_ids_to_tokens(after)) + text)
            if both[:1] == [after]:
                return both[1:]
        for before in ("\n", "a"):  # some tokenizers put a space before the first word
            alone, both = self._ids(before), self.encode(before + text)
            if both[: len(alone)] == alone:
                return both[len(alone) :]
        return self.encode(text)

    def unmark_for_template(
        self, messages: list[dict[str, Any]], render: Callable[[Any], str]
    ) -> list[dict[str, Any]]:
        """Removes the marks in the tokens that the chat template looks for.

        A template may look for a token in a message. Qwen3's, for example, finds a thought by
        <think> and </think>, which it drops or writes itself.

        Args:
            render: renders messages.
        """
        bare = unmark(messages)
        if bare == messages:
            return messages
        expected, found = render(bare), [*messages]

        def is_read(number: int, token: str) -> bool:
            inside, around = _mark_token(token), MARK + token + MARK

            def only(text: str) -> str:
                return inside.join(map(unmark, text.split(inside)))

            one = [*bare[:number], _map_texts(messages[number], only), *bare[number + 1 :]]
            try:
                hidden = render(one)
                shown = render(_map_texts(one, lambda text: text.replace(inside, around)))
            except UserError:  # such as an id of the wrong length: refused
                return False
            writes_it = shown.replace(around, "").count(token) != hidden.count(token)
            return writes_it or unmark(hidden) != expected

        for n, message in enumerate(bare):
            texts = [*_texts(message)]
            for token in {token for text in texts for token in self._pattern.findall(text)}:
                if is_read(n, token):
                    found[n] = _unmark_token(found[n], token)
        return found

    def _cut(self, text: str) -> list[str]:
        """Splits a text after the first character of each control token."""
        parts, begin = [], 0
        while found := self._pattern.search(text, begin):
            parts.append(text[begin : found.start() + 1])
            begin = found.start() + 1
        parts.append(text[begin:])
        if self._normalizer is not None and any(
            self._pattern.search(self._normalizer.normalize_str(part)) for part in parts
        ):
            return list(text)  # the normalizer makes a token from other characters
        return parts

    def _ids(self, text: str) -> list[int]:
        found: Any = self.tokenizer(text, add_special_tokens=False)
        return list(found["input_ids"])


def unmark(value: Any) -> Any:
    """Removes the marks from all strings of a value."""
    return _map_texts(value, lambda text: text.replace(MARK, ""))


def _mark_token(token: str) -> str:
    return token[0] + MARK + token[1:]


def _unmark_token(value: Any, token: str) -> Any:
    return _map_texts(value, lambda text: text.replace(_mark_token(token), token))


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Applies `change` to all strings of a value, including keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_texts(key, change): _map_texts(cell, change) for key, cell in value.items()}
    if isinstance(value, list):
        return [_map_texts(cell, change) for cell in value]
    return value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        cells = value.items() if isinstance(value, dict) else value
        for cell in cells:
            yield from _texts([*cell] if isinstance(cell, tuple) else cell)
