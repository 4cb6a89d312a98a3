"""Encodes the replies of environments between two turns of the model.

The chat template is rendered once for each shape of a reply (its roles and names), with markers
instead of the contents. The contents are encoded separately, so that a tool's output cannot become
a control token.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_cli.data.control_tokens import ControlTokens
from grpo_cli.environments.chat_template import (
    ARGUMENT,
    MARKED_TEXT,
    ChatTemplate,
    TemplateRefusal,
    assistant_message,
    user_message,
)
from grpo_cli.environments.protocol import Message
from grpo_cli.errors import TrainingError
from grpo_cli.records import decoded

# A marker replaces the content of message N. The probe in it shows how the template changes text.
_PROBE = "\"\\\n\t<é>'"
_MARKER = re.compile(r"( {3})?marker(\d{1,4})begin(.{1,60}?)marker\2end( {3})?", re.DOTALL)
MOST_SHAPES = 1_000  # of replies whose skeletons are kept
_CONTROL = {n: "\N{REPLACEMENT CHARACTER}" for n in (*range(32), 127) if chr(n) not in "\t\n\r"}
_SAFE_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


# Known changes of content by templates: changed probe -> function that makes the same change.
_CHANGES: dict[str, Callable[[str], str]] = {
    _PROBE: lambda text: text,
    json.dumps(_PROBE, ensure_ascii=False)[1:-1]: lambda t: json.dumps(t, ensure_ascii=False)[1:-1],
    json.dumps(_PROBE)[1:-1]: lambda t: json.dumps(t)[1:-1],
}


@dataclass(frozen=True)
class Gap:
    """The place of a message's content in a rendered reply."""

    number: int  # index of the message
    change: Callable[[str], str]  # the template's change of the content
    strip_left: bool = False
    strip_right: bool = False

    def changed(self, text: str) -> str:
        if self.strip_left:
            text = text.lstrip()
        return self.change(text.rstrip() if self.strip_right else text)


# A rendered reply without contents: the token that ends the model's turn before it, and the ids of
# the template with gaps for the contents.
Skeleton = tuple[int, list["Sequence[int] | Gap"]]
_UNCHANGED = Gap(0, lambda text: text)


class ReplyEncoder:
    """Encodes the replies of environments; holds a skeleton for each shape of a reply."""

    def __init__(self, template: ChatTemplate, control: ControlTokens) -> None:
        self.template, self.control = template, control
        self._skeletons = functools.lru_cache(MOST_SHAPES)(self._make_skeleton)

    def encode(self, messages: Sequence[Message], *, ended_by_eos: bool, limit: int) -> list[int]:
        """Returns the tokens between a turn of the model and its next turn.

        Args:
            messages: the reply, with the roles tool, user or system.
            ended_by_eos: whether the turn's last token is an eos; otherwise an end token is added.
            limit: maximum tokens of one message's content; a longer one is cut in its middle.

        Raises:
            TrainingError: the template cannot render such messages.
        """
        messages = [self.with_safe_names(m) for m in messages]
        try:
            end, parts = self.skeleton(messages)
        except TemplateRefusal as error:
            roles = ", ".join(str(m["role"]) for m in messages)
            raise TrainingError(
                f"the chat template cannot render a reply of the environment ({roles}): {error}"
            ) from error
        ids = [] if ended_by_eos else [end]
        for part in parts:
            if isinstance(part, Gap):
                part, _ = self._content_ids(messages[part.number]["content"], limit, part)
            ids += part
        return ids

    def shortened(self, text: str, limit: int) -> str:
        """Shortens a string to about `limit` tokens."""
        ids, is_cut = self._content_ids(text, limit, _UNCHANGED)
        if not is_cut:
            return _cleaned(text)
        return decoded(self.template.tokenizer, ids, special=True)

    def with_safe_names(self, message: Message) -> Message:
        """Replaces unsafe names and ids; the model writes them, so they may be control tokens."""
        safe = dict(message)
        for key, other in (("name", "unknown"), ("tool_call_id", "000000000")):
            if key in safe and safe[key] not in self.template.tool_names:
                text = str(safe[key])
                safe[key] = text if _SAFE_NAME.fullmatch(text) else other
        return safe

    def skeleton(self, messages: Sequence[Message]) -> Skeleton:
        """Returns the skeleton of a reply; raises a `TemplateRefusal`."""
        keys = ("role", "name", "tool_call_id")
        return self._skeletons(tuple(tuple((k, m[k]) for k in keys if k in m) for m in messages))

    def _make_skeleton(self, shape: tuple[tuple[tuple[str, str], ...], ...]) -> Skeleton:
        texts = [f"   marker{n}begin{_PROBE}marker{n}end   " for n in range(len(shape))]
        marked = [{**dict(m), "content": text} for m, text in zip(shape, texts, strict=True)]
        answered = [m for m in marked if m["role"] == "tool"]
        for n, m in enumerate(answered):
            m.setdefault("tool_call_id", f"call{n:05}")

        def render(answers: Sequence[Message]) -> str:
            conversation = [user_message(0), assistant_message(MARKED_TEXT, answers), *marked]
            return self.template.render(conversation, generation_prompt=True)

        try:
            rendered = render(answered)
        except TemplateRefusal:
            if len(answered) < 2:
                raise
            rendered = render(answered[:1])  # Llama 3 renders messages with one call only
        # The assistant's last marked text ends its turn.
        at = max(rendered.rfind(text) for text in (MARKED_TEXT, ARGUMENT[1]))
        if at < 0:
            raise TemplateRefusal("the chat template drops the messages of the assistant")
        tail = rendered[at:]
        _, end = self.template.up_to_eos(tail)
        end_text = str(self.template.tokenizer.convert_ids_to_tokens(end))
        reply = tail[tail.index(end_text) + len(end_text) :]
        parts = self._parts(reply, end)
        gaps = {part.number for part in parts if isinstance(part, Gap)}
        for n, message in enumerate(marked):
            if n not in gaps:
                raise TemplateRefusal(
                    f"the chat template drops the text of a message of {message['role']}"
                )
        return end, parts

    def _parts(self, rendered: str, after: int) -> list[Sequence[int] | Gap]:
        """Splits a rendered text at its markers: ids, as encoded after a token, and gaps."""
        parts: list[Sequence[int] | Gap] = []
        at = 0

        def written(text: str) -> None:
            if text:
                parts.append(self.control.encode_behind(text, None if parts else after))

        for found in _MARKER.finditer(rendered):
            written(rendered[at : found.start()])
            left, number, probe, right = found.groups()
            if probe not in _CHANGES:
                raise TemplateRefusal(
                    f"the chat template changes the text of a message ({_PROBE!r} to {probe!r})"
                )
            parts.append(Gap(int(number), _CHANGES[probe], not left, not right))
            at = found.end()
        written(rendered[at:])
        return parts

    def _content_ids(self, content: str, limit: int, gap: Gap) -> tuple[list[int], bool]:
        """Returns at most `limit` tokens of a content, and whether its middle was cut out.

        None of them is a control token. A very long content is cut before it is encoded, since
        encoding ten megabytes takes seconds.
        """
        most, begin, end = 16 * limit, content, ""
        is_cut = len(content) > 2 * most
        if is_cut:
            begin, end = content[:most], content[-most:]
        ids = self.control.encode_plain(gap.changed(_cleaned(begin)))
        if not is_cut and len(ids) <= limit:
            return ids, False
        rest = self.control.encode_plain(gap.changed(_cleaned(end))) if is_cut else ids
        mark = self.control.encode_plain(gap.change("\n[... a part of the text is left out ...]\n"))
        if 2 * len(mark) > limit:
            mark = self.control.encode_plain("...")[: limit // 2]
        left = limit - len(mark)
        return ids[: left - left // 2] + mark + rest[len(rest) - left // 2 :], True


def _cleaned(text: str) -> str:
    """Replaces control characters and lone surrogates in a string."""
    return text.encode("utf-8", "replace").decode("utf-8").translate(_CONTROL)
