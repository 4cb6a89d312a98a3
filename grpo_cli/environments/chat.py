"""The tokens of a growing conversation: sampled tokens are kept, and replies are appended.

    chat = Chat(tokenizer, eos_ids, tools)
    chat.check()                                     # before training: UserError
    ids = [*prompt.ids]
    ids += sampled                                   # the model's turn with its eos
    message = chat.read(sampled)                     # for the environment
    ids += chat.reply_ids(replies, ended_by_eos=True, limit=512)
    ids += sampled_next

A conversation is never rendered again: ids that are decoded and re-encoded differ from the sampled
ones, and a template may change earlier messages. The chat template is rendered once for each shape
of a reply (its roles and names), with markers instead of the contents. The contents are encoded
separately, so that a tool's output cannot become a control token.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_cli.data import conversations
from grpo_cli.data.control_tokens import ControlTokens
from grpo_cli.environments.protocol import Message
from grpo_cli.environments.response import FORMATS, MalformedCall, ResponseParser, Schemas, names_of
from grpo_cli.errors import TrainingError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_cli.models.vision import VisionProcessor
    from grpo_cli.records import Prompt

# A marker replaces the content of message N. The probe in it shows how the template changes text.
_PROBE = "\"\\\n\t<é>'"
_MARKER = re.compile(r"( {3})?marker(\d{1,4})begin(.{1,60}?)marker\2end( {3})?", re.DOTALL)
_MOST_SHAPES = 1_000
_CONTROL = {n: "\N{REPLACEMENT CHARACTER}" for n in (*range(32), 127) if chr(n) not in "\t\n\r"}
_SAFE_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_ARGUMENT = ("argument_key", "argument_value")
_REFUSALS = (ValueError, TypeError, KeyError, AttributeError)


def _marked(number: int) -> str:
    return f"   marker{number}begin{_PROBE}marker{number}end   "


# Known changes of content by templates: changed probe -> function that makes the same change.
_CHANGES: dict[str, Callable[[str], str]] = {
    _PROBE: lambda text: text,
    json.dumps(_PROBE, ensure_ascii=False)[1:-1]: lambda t: json.dumps(t, ensure_ascii=False)[1:-1],
    json.dumps(_PROBE)[1:-1]: lambda t: json.dumps(t)[1:-1],
}


@dataclass(frozen=True)
class _Gap:
    """The place of a message's content in a rendered reply."""

    number: int  # index of the message
    change: Callable[[str], str]  # the template's change of the content
    strip_left: bool
    strip_right: bool

    def changed(self, text: str) -> str:
        if self.strip_left:
            text = text.lstrip()
        return self.change(text.rstrip() if self.strip_right else text)


# A rendered reply without contents: the token that ends the model's turn before it, and the ids of
# the template with gaps for the contents.
_Skeleton = tuple[int, list["Sequence[int] | _Gap"]]


class Chat:
    """Applies a tokenizer's chat template to conversations that grow by appended tokens."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: Sequence[int],
        tools: Schemas = (),
        template_kwargs: Mapping[str, Any] | None = None,
        response_template: str = "auto",
        vision: VisionProcessor | None = None,
    ) -> None:
        """Stores the settings; renders nothing yet.

        Args:
            eos_ids: tokens that end a turn of the model.
            tools: JSON schemas of the tools that the model may call.
            template_kwargs: arguments of the chat template.
            response_template: the value of `model.response_template`, the format of tool calls.
            vision: the processor of a vision model; None for a text model.
        """
        self.vision = vision
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids)
        self.tools = [dict(tool) for tool in tools]
        self.template_kwargs = dict(template_kwargs or {})
        self.response_template = response_template
        self._tool_names = names_of(self.tools)
        self.control = ControlTokens(tokenizer)
        # `all_special_tokens` lacks tokens without a role such as eos, for example <|im_start|>.
        marked = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        self._special = {*marked, *tokenizer.all_special_tokens}
        self._shapes: dict[tuple[Any, ...], _Skeleton] = {}
        self._parser: ResponseParser | None = None
        self._prefix: str | None = None

    # The hooks of `loop.Dialogue`: in a chat, a turn ends where sampling stops

    is_one_text = False
    piece_tokens = None

    def stops(self, num_calls: int) -> tuple[str, ...]:
        """Returns (), since a chat adds no stop strings."""
        return ()

    def turn_end(
        self, ids: Sequence[int], before: int, num_calls: int, *, has_stopped: bool
    ) -> int | None:
        """Returns the length of a turn that has stopped, else None."""
        return len(ids) if has_stopped else None

    def reply_to(self, turn: Sequence[int], messages: Sequence[Message], limit: int) -> list[int]:
        """Returns the tokens between a turn of the model and its next turn; see `reply_ids`."""
        return self.reply_ids(messages, ended_by_eos=turn[-1] in self.eos_ids, limit=limit)

    # The model's turn

    def read(
        self, ids: Sequence[int], num_calls: int = 0, *, at_stop_string: bool = False
    ) -> Message:
        """Returns a turn of the model as a message, however it ended; see `ResponseParser.parse`.

        Args:
            ids: the sampled tokens, with or without the eos.

        Raises:
            MalformedCall: the turn begins a call that cannot be read.
        """
        ids = list(ids)
        while ids and ids[-1] in self.eos_ids:
            ids.pop()
        if self._prefix is None:
            user = [{"role": "user", "content": "text"}]
            self._prefix = self._render(user, generation_prompt=True)
        message = self.parser.parse(self._text(ids), self._prefix, self.tools)
        for token in self._special:
            message["content"] = message["content"].replace(token, "")
        return message

    @property
    def parser(self) -> ResponseParser:
        """The parser of the model's turns: it must read a call that the template has rendered."""
        if self._parser is None:
            self._parser = self._find_parser()
        return self._parser

    def _find_parser(self) -> ResponseParser:
        if self.response_template != "auto":
            return ResponseParser(FORMATS[self.response_template])
        own = getattr(self.tokenizer, "response_template", None)
        candidates = [ResponseParser(template=own)] if own else []
        candidates += [ResponseParser(read) for read in FORMATS.values()]
        if not self.tools:
            return candidates[0] if own else ResponseParser(lambda text, names: (text, []))
        for parser in candidates:
            if self._reads_a_call(parser):
                return parser
        raise UserError(
            "model.response_template = auto: no format reads a tool call as the chat template "
            f"writes it (tried: {'the tokenizer`s own, ' if own else ''}{', '.join(FORMATS)}); set "
            "it to one, or give the tokenizer a response_template."
        )

    def _reads_a_call(self, parser: ResponseParser) -> bool:
        """Returns whether a parser reads a call that the template has rendered."""
        name, arguments = min(self._tool_names), dict([_ARGUMENT])
        try:
            begin, text, _ = self._turn(_assistant("", [(name, arguments)]))
            found = parser.parse(text, begin, self.tools)
        except (MalformedCall, _Refused):
            return False
        calls = [c["function"] for c in found.get("tool_calls", [])]
        return [(c["name"], c["arguments"]) for c in calls] == [(name, arguments)]

    # Replies

    def reply_ids(
        self, messages: Sequence[Message], *, ended_by_eos: bool, limit: int
    ) -> list[int]:
        """Returns the tokens between a turn of the model and its next turn.

        Args:
            messages: the reply, with the roles tool, user or system.
            ended_by_eos: whether the turn's last token is an eos; otherwise an end token is added.
            limit: maximum tokens of one message's content; a longer one is cut in its middle.

        Raises:
            TrainingError: the template cannot render such messages.
        """
        messages = [self._with_safe_names(m) for m in messages]
        try:
            end, parts = self._skeleton(messages)
        except _Refused as error:
            roles = ", ".join(str(m["role"]) for m in messages)
            raise TrainingError(
                f"the chat template cannot render a reply of the environment ({roles}): {error}"
            ) from error
        ids = [] if ended_by_eos else [end]
        for part in parts:
            if isinstance(part, _Gap):
                ids += self._content_ids(messages[part.number]["content"], part, limit)
            else:
                ids += part
        return ids

    def turn_ids(self, message: Message) -> list[int]:
        """Returns the tokens, with the eos, of a model turn that renders an assistant message.

        Raises:
            UserError: the template does not render the message after its generation prompt.
        """
        try:
            _, text, end = self._turn(message)
        except _Refused as error:
            raise UserError(f"{error}; set model.chat_template to another.") from error
        return [*self.control.encode(text), end]

    def episode_ids(
        self, solution: Sequence[Message], limit: int = 10**6
    ) -> tuple[list[int], list[bool]]:
        """Returns the tokens of an episode given as messages, and which of them are the model's.

        An episode with these turns and replies would have the same tokens.
        """
        ids: list[int] = []
        is_sampled: list[bool] = []
        reply: list[Message] = []
        for message in solution:
            if message["role"] != "assistant":
                reply.append(message)
                continue
            if reply:
                foreign = self.reply_ids(reply, ended_by_eos=True, limit=limit)
                ids += foreign
                is_sampled += [False] * len(foreign)
                reply = []
            turn = self.turn_ids(message)
            ids += turn
            is_sampled += [True] * len(turn)
        return ids, is_sampled

    def with_observation(
        self, prompt: Prompt, observation: str | Sequence[Message], limit: int = 10**6
    ) -> Prompt:
        """Adds an environment's first observation to a prompt; keeps the old ids as `row_ids`.

        Args:
            prompt: a prompt of a chat data set.
            observation: a string, which is appended to the last user message, or messages, which
                are appended to the conversation.
            limit: maximum tokens of one content; a longer one is cut in its middle.
        """
        if not observation:
            return prompt
        assert not isinstance(prompt.text, str), "checked: environments need dataset.chat"
        messages: list[Message] = [dict(m) for m in prompt.text]
        if isinstance(observation, str):
            texts = [observation]
            last = max((n for n, m in enumerate(messages) if m["role"] == "user"), default=-1)
            more = [] if last >= 0 else [{"role": "user", "content": ""}]
            places = [last]
        else:
            texts = [m["content"] for m in observation]
            more = [{**self._with_safe_names(m), "content": ""} for m in observation]
            places = [*range(len(messages), len(messages) + len(texts))]

        def filled(messages: Sequence[Message], written: Sequence[str]) -> list[Message]:
            conversation = [dict(m) for m in (*messages, *more)]
            for n, text in zip(places, written, strict=True):
                before = conversation[n]["content"]
                added = text if isinstance(before, str) else [{"type": "text", "text": text}]
                conversation[n]["content"] = before + added
            return conversation

        shown = [self._shortened(text, limit) for text in texts]
        marked: Any = prompt.marked or prompt.conversation
        prefill = [*marked[len(messages) :]]
        written = filled(marked[: len(messages)], self.control.mark(shown))
        kwargs = conversations.template_kwargs(
            self.template_kwargs, prompt.columns, self.control.mark
        )

        rendered = conversations.render(
            self.tokenizer,
            self._taken([*written, *prefill]),
            kwargs,
            f"row {prompt.row}",
            self.tools,
        )
        if prompt.vision:
            rendered = prompt.vision.expanded(rendered, prompt.images)
        return dataclasses.replace(
            prompt,
            ids=self.control.encode(rendered),
            text=filled(messages, shown),
            row_ids=prompt.ids,
        )

    def _taken(self, messages: Sequence[Message]) -> list[Message]:
        """Returns messages in the form that the template accepts: some accept only blocks."""
        return [*messages] if self.vision is None else self.vision.as_template_takes(messages)

    # Checks

    def check(self, replies: Sequence[str] | None = None) -> None:
        """Checks that the template and the tokenizer support multi-turn conversations.

        Args:
            replies: roles of the environment's messages; None: "tool" and "user" with tools, else
                "user". A template that moves the tools to the last user message works only if all
                replies come from tools.

        Raises:
            UserError: the template refuses the conversation, drops a part of a call or its result,
                changes earlier messages when others follow, or has another generation prompt in
                later turns. Or it does not end a turn with a token that ends sampling, or writes
                calls in an unknown format.
        """
        if not self.tokenizer.chat_template:
            raise UserError(
                "dataset.chat = true: the tokenizer has no chat template; set model.chat_template."
            )
        if replies is None:
            replies = ("tool", "user") if self.tools else ("user",)
        try:
            for thought in ("", "<think>\nthought\n</think>\n\n"):
                self._check_prefixes(self._example("tool" in replies, "user" in replies, thought))
            if "tool" in replies and self.tools:
                self._check_nothing_is_dropped()
            user = {"role": "user", "content": ""}
            tool = {**user, "role": "tool", "name": min(self._tool_names, default="tool")}
            shapes = {"tool": ([tool], [tool, tool]), "user": ([user],)}
            for messages in (shape for role in replies for shape in shapes[role]):
                self._skeleton(messages)
        except _Refused as error:
            another = "hermes (ChatML with tool calls) or another" if self.tools else "another"
            raise UserError(f"{error}; set model.chat_template to {another}.") from error
        if self.tools:
            _ = self.parser

    def _example(self, tool: bool, user: bool, thought: str) -> list[Message]:
        """Returns an example conversation with replies of tools, of the user, or of both."""
        name = min(self._tool_names, default="tool")
        call = [(name, dict([_ARGUMENT]))]
        said = f"{thought}{_MARKED_TEXT}"
        messages = [_user(0)]
        if tool:
            answers = [_tool(name, n) for n in range(2)]
            messages += [_assistant(said, call), *answers, _assistant(said, call), answers[0]]
        messages.append(_assistant(said))
        if user:
            messages += [_user(1), _assistant(said), _user(2), _assistant(said)]
        return messages

    def _check_prefixes(self, messages: list[Message]) -> None:
        """Checks that no message changes the tokens of the messages before it."""
        before: list[int] = []
        prompt_of_first, with_prompt = "", ""
        texts: list[str] = []  # rendered up to each message
        for n, message in enumerate(messages):
            where = f"message {n + 1} ({_described(messages, n)})"
            rendered = self._render(messages[: n + 1])
            if message["role"] == "tool" and messages[n + 1]["role"] == "tool":
                texts.append("")  # a template may close a block of results after the last one
                continue
            texts.append(rendered)
            ids = self.control.encode(rendered)
            if ids[: len(before)] != before:
                same = [rendered.startswith(text.rstrip()) for text in texts[:n]]
                changed = same.index(False) + 1 if False in same else n
                raise _Refused(
                    f"the chat template changes message {changed} "
                    f"({_described(messages, changed - 1)}) when {where} follows; what the model "
                    "has read and written must keep its tokens"
                )
            if message["role"] == "assistant":
                if not rendered.startswith(with_prompt):
                    raise _Refused(
                        f"the chat template begins {where} otherwise than its generation prompt"
                    )
                self._up_to_eos(rendered[len(with_prompt) :])
                ends = [i for i, token in enumerate(ids) if token in self.eos_ids]
                before = ids[: ends[-1] + 1]
                continue
            with_prompt = self._render(messages[: n + 1], generation_prompt=True)
            if not with_prompt.startswith(rendered):
                raise _Refused(f"the chat template changes {where} with its generation prompt")
            added = with_prompt[len(rendered) :]
            prompt_of_first = added if n == 0 else prompt_of_first
            if added != prompt_of_first:
                raise _Refused(
                    f"the generation prompt of the chat template behind {where} is {added!r:.60}, "
                    f"and {prompt_of_first!r:.60} in the first turn"
                )

    def _check_nothing_is_dropped(self) -> None:
        name = min(self._tool_names)
        messages = [_user(0), _assistant("", [(name, dict([_ARGUMENT]))]), _tool(name, 1)]
        nothing, call, result = (self._render(messages[:n]) for n in (1, 2, 3))
        parts = {"name": name, "argument's name": _ARGUMENT[0], "argument's value": _ARGUMENT[1]}
        for part, text in parts.items():
            if call.count(text) <= nothing.count(text):  # the list of tools also has the name
                raise _Refused(f"the chat template drops the {part} of a tool call")
        if f"{_MARKED_TEXT}1" not in result:
            raise _Refused("the chat template drops the result of a tool call")

    # Rendering

    def _render(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
        import jinja2

        try:
            return str(
                self.tokenizer.apply_chat_template(
                    self._taken(messages),
                    tools=self.tools or None,  # type: ignore[arg-type]
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                    **self.template_kwargs,
                )
            )
        except (jinja2.TemplateError, *_REFUSALS) as error:
            last = _described(messages, len(messages) - 1)
            reason = str(error).split("\n")[0]
            raise _Refused(
                f"the chat template refuses a conversation of {len(messages)} messages that ends "
                f"with {last}: {reason}"
            ) from error

    def _turn(self, message: Message) -> tuple[str, str, int]:
        """Returns (the text before a turn of the model, the turn's text, its eos)."""
        begin = self._render([_user(0)], generation_prompt=True)
        whole = self._render([_user(0), message])
        if not whole.startswith(begin):
            raise _Refused(
                "the chat template begins a message of the assistant otherwise than its generation "
                "prompt"
            )
        return begin, *self._up_to_eos(whole[len(begin) :])

    def _skeleton(self, messages: Sequence[Message]) -> _Skeleton:
        shape = tuple((m["role"], m.get("name"), m.get("tool_call_id")) for m in messages)
        if shape not in self._shapes:
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            self._shapes[shape] = self._make_skeleton(messages)
        return self._shapes[shape]

    def _make_skeleton(self, messages: Sequence[Message]) -> _Skeleton:
        marked = [{**m, "content": _marked(n)} for n, m in enumerate(messages)]
        answered = [m for m in marked if m["role"] == "tool"]
        for n, m in enumerate(answered):
            m.setdefault("tool_call_id", f"call{n:05}")
        calls = [(m.get("name", "tool"), dict([_ARGUMENT]), m["tool_call_id"]) for m in answered]

        def render(calls: Sequence[tuple[Any, ...]]) -> str:
            conversation = [_user(0), _assistant(_MARKED_TEXT, calls), *marked]
            return self._render(conversation, generation_prompt=True)

        try:
            rendered = render(calls)
        except _Refused:
            if len(calls) < 2:
                raise
            rendered = render(calls[:1])  # Llama 3 renders messages with one call only
        # The assistant's last marked text ends its turn.
        at = max(rendered.rfind(text) for text in (_MARKED_TEXT, _ARGUMENT[1]))
        if at < 0:
            raise _Refused("the chat template drops the messages of the assistant")
        tail = rendered[at:]
        _, end = self._up_to_eos(tail)
        end_text = str(self.tokenizer.convert_ids_to_tokens(end))
        reply = tail[tail.index(end_text) + len(end_text) :]
        parts = self._parts(reply, end)
        gaps = {part.number for part in parts if isinstance(part, _Gap)}
        for n, message in enumerate(messages):
            if n not in gaps:
                raise _Refused(
                    f"the chat template drops the text of a message of {message['role']}"
                )
        return end, parts

    def _up_to_eos(self, text: str) -> tuple[str, int]:
        """Returns the text before the first eos, and the eos id."""
        names = {str(self.tokenizer.convert_ids_to_tokens(i)): i for i in sorted(self.eos_ids)}
        places = [(text.find(name), eos) for name, eos in names.items() if name in text]
        if not places:
            raise _Refused(
                "the chat template does not end a turn of the assistant with a token that ends "
                f"sampling ({', '.join(names)})"
            )
        at, eos = min(places)
        return text[:at], eos

    def _parts(self, rendered: str, after: int) -> list[Sequence[int] | _Gap]:
        """Splits a rendered text at its markers: ids, as encoded after a token, and gaps."""
        parts: list[Sequence[int] | _Gap] = []
        at = 0

        def written(text: str) -> None:
            if text:
                parts.append(self.control.encode_behind(text, None if parts else after))

        for found in _MARKER.finditer(rendered):
            written(rendered[at : found.start()])
            left, number, probe, right = found.groups()
            if probe not in _CHANGES:
                raise _Refused(
                    f"the chat template changes the text of a message ({_PROBE!r} to {probe!r})"
                )
            parts.append(_Gap(int(number), _CHANGES[probe], not left, not right))
            at = found.end()
        written(rendered[at:])
        return parts

    # Tokens

    def _content_ids(self, content: str, gap: _Gap, limit: int) -> list[int]:
        """Returns at most `limit` tokens of a content, none of them a control token."""
        text, left_out = _precut(content, limit)
        ids = [*self.control.encode_plain(gap.changed(text[0]))]
        if not left_out and len(ids) <= limit:
            return ids
        rest = self.control.encode_plain(gap.changed(text[1])) if left_out else ids
        mark = self.control.encode_plain(gap.change("\n[... a part of the text is left out ...]\n"))
        if 2 * len(mark) > limit:
            mark = self.control.encode_plain("...")[: limit // 2]
        most = limit - len(mark)
        return ids[: most - most // 2] + mark + rest[len(rest) - most // 2 :]

    def _shortened(self, text: str, limit: int) -> str:
        """Shortens a string to about `limit` tokens."""
        parts, left_out = _precut(text, limit)
        ids = self.control.encode_plain(parts[0]) if not left_out else []
        if not left_out and len(ids) <= limit:
            return _cleaned(text)
        return self._text(self._content_ids(text, _Gap(0, lambda t: t, False, False), limit))

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def _with_safe_names(self, message: Message) -> Message:
        """Replaces unsafe names and ids; the model writes them, so they may be control tokens."""
        safe = dict(message)
        for key, other in (("name", "unknown"), ("tool_call_id", "000000000")):
            if key in safe and safe[key] not in self._tool_names:
                text = str(safe[key])
                safe[key] = text if _SAFE_NAME.fullmatch(text) else other
        return safe


class _Refused(Exception):  # noqa: N818 - becomes a UserError or a TrainingError
    """The chat template cannot render a conversation, or renders it unusably."""


_MARKED_TEXT = "markedtext"


def _user(number: int) -> Message:
    return {"role": "user", "content": f"{_MARKED_TEXT}{number}"}


def _tool(name: str, number: int) -> Message:
    return {
        "role": "tool", "name": name, "content": f"{_MARKED_TEXT}{number}",
        "tool_call_id": "call00000",
    }  # fmt: skip


def _assistant(content: str, calls: Sequence[tuple[Any, ...]] = ()) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {
                "type": "function",
                "id": rest[0] if rest else "call00000",
                "function": {"name": name, "arguments": arguments},
            }
            for name, arguments, *rest in calls
        ]
    return message


def _described(messages: Sequence[Message], n: int) -> str:
    message = messages[n]
    called = " with a tool call" if message.get("tool_calls") else ""
    return f"{message['role']}{called}"


def _precut(text: str, limit: int) -> tuple[tuple[str, str], bool]:
    """Returns the (beginning, end) of a string, and whether the middle was cut out.

    Very long strings are cut before they are encoded, since encoding ten megabytes takes seconds.
    """
    most = 16 * limit
    if len(text) <= 2 * most:
        return (_cleaned(text), ""), False
    return (_cleaned(text[:most]), _cleaned(text[-most:])), True


def _cleaned(text: str) -> str:
    """Replaces control characters and lone surrogates in a string."""
    return text.encode("utf-8", "replace").decode("utf-8").translate(_CONTROL)
