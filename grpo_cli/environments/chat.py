"""The tokens of a growing conversation: sampled tokens are kept, and replies are appended.

    chat = Chat(tokenizer, eos_ids, tools)
    chat.check()                                     # before training: UserError
    ids = [*prompt.ids]
    ids += sampled                                   # the model's turn with its eos
    message = chat.parse(sampled)                    # for the environment
    ids += chat.reply_ids(replies, ended_by_eos=True, limit=512)
    ids += sampled_next

A conversation is never rendered again: ids that are decoded and re-encoded differ from the sampled
ones, and a template may change earlier messages. A reply's tokens are the difference of an example
conversation rendered with and without it. Control tokens in its contents are marked before, so that
a tool's output cannot become a control token (`control_tokens.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
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

_CONTROL = {n: "\N{REPLACEMENT CHARACTER}" for n in (*range(32), 127) if chr(n) not in "\t\n\r"}
_SAFE_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_ARGUMENT = ("argument_key", "argument_value")
_CALL_ID = "call00000"  # nine characters, as Mistral's templates require


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
        self._parser: ResponseParser | None = None
        self._example_turn = functools.lru_cache(1000)(self._rendered_example_turn)
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

    def read(self, ids: Sequence[int], num_calls: int, *, at_stop_string: bool) -> Message:
        """Returns a turn of the model as a message, however it ended; see `parse`."""
        return self.parse(ids)

    def reply_to(self, turn: Sequence[int], messages: Sequence[Message], limit: int) -> list[int]:
        """Returns the tokens between a turn of the model and its next turn; see `reply_ids`."""
        return self.reply_ids(messages, ended_by_eos=turn[-1] in self.eos_ids, limit=limit)

    # The model's turn

    def parse(self, ids: Sequence[int]) -> Message:
        """Returns a turn of the model as a message, see `ResponseParser.parse`.

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
        name = min(self._tool_names)
        try:
            begin, text, _ = self._turn(_assistant("", [(name, _CALL_ID)]))
            found = parser.parse(text, begin, self.tools)
        except (_Refused, MalformedCall):
            return False
        calls = [c["function"] for c in found.get("tool_calls", [])]
        return [(c["name"], c["arguments"]) for c in calls] == [(name, dict([_ARGUMENT]))]

    # Replies

    def reply_ids(
        self, messages: Sequence[Message], *, ended_by_eos: bool, limit: int
    ) -> list[int]:
        """Returns the tokens between a turn of the model and its next turn.

        Args:
            messages: the reply, with the roles tool, user or system.
            ended_by_eos: whether the turn's last token is an eos; otherwise an end token is added.
            limit: about the maximum tokens of one message's content; a longer one is cut in its
                middle.

        Raises:
            TrainingError: the template cannot render such messages.
        """
        shown = [
            {
                **self._with_safe_names(m),
                "content": self.control.mark(self._shortened(m["content"], limit)),
            }
            for m in messages
        ]
        try:
            end, text = self._reply_text(shown)
        except _Refused as error:
            roles = ", ".join(str(m["role"]) for m in messages)
            raise TrainingError(
                f"the chat template cannot render a reply of the environment ({roles}): {error}"
            ) from error
        ids = self.control.encode_behind(text, end)
        return ids if ended_by_eos else [end, *ids]

    def turn_ids(self, message: Message) -> list[int]:
        """Returns the tokens, with the eos, of a model turn that renders an assistant message.

        Raises:
            UserError: the template does not render the message after its generation prompt.
        """
        _, text, end = self._turn(message)
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
            name = min(self._tool_names, default="tool")
            tools = [_tool(name, n) for n in range(2)]
            shapes = {"tool": (tools[:1], tools), "user": ([_user(0)],)}
            for messages in (shape for role in replies for shape in shapes[role]):
                _, text = self._reply_text(messages)
                if any(m["content"] not in text for m in messages):
                    role = messages[0]["role"]
                    raise _Refused(f"the chat template drops the text of a message of {role}")
        except _Refused as error:
            another = "hermes (ChatML with tool calls) or another" if self.tools else "another"
            raise UserError(f"{error}; set model.chat_template to {another}.") from error
        if self.tools:
            _ = self.parser

    def _example(self, tool: bool, user: bool, thought: str) -> list[Message]:
        """Returns an example conversation with replies of tools, of the user, or of both."""
        name = min(self._tool_names, default="tool")
        call = [(name, _CALL_ID)]
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
                if self._first_eos(rendered[len(with_prompt) :]) is None:
                    raise _Refused(
                        f"the chat template does not end {where} with a token that ends sampling "
                        f"({self._names_of_eos()})"
                    )
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
        messages = [_user(0), _assistant("", [(name, _CALL_ID)]), _tool(name, 1)]
        nothing, call, result = (self._render(messages[:n]) for n in (1, 2, 3))
        parts = {"name": name, "argument's name": _ARGUMENT[0], "argument's value": _ARGUMENT[1]}
        for part, text in parts.items():
            if call.count(text) <= nothing.count(text):  # the list of tools also has the name
                raise _Refused(f"the chat template drops the {part} of a tool call")
        if f"{_MARKED_TEXT}1" not in result:
            raise _Refused("the chat template drops the result of a tool call")

    def _names_of_eos(self) -> str:
        return ", ".join(map(str, self.tokenizer.convert_ids_to_tokens(sorted(self.eos_ids))))

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
        except (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
            last = _described(messages, len(messages) - 1)
            reason = str(error).split("\n")[0]
            raise _Refused(
                f"the chat template refuses a conversation of {len(messages)} messages that ends "
                f"with {last}: {reason}"
            ) from error

    def _reply_text(self, messages: Sequence[Message]) -> tuple[int, str]:
        """Renders a reply after an example turn of the model.

        Returns:
            (the token that ends the model's turn, the text between it and the next turn).
        """
        messages = [dict(m) for m in messages]
        answered = [m for m in messages if m["role"] == "tool"]
        for n, m in enumerate(answered):
            m.setdefault("tool_call_id", f"call{n:05}")
        calls = [(m.get("name", "tool"), m["tool_call_id"]) for m in answered]
        for some in (calls, calls[:1]):  # Llama 3 renders messages with one call only
            try:
                turn = self._example_turn(tuple(some))
                rendered = self._render(
                    [_user(0), _assistant(_MARKED_TEXT, some), *messages], generation_prompt=True
                )
                break
            except _Refused:
                if len(some) < 2:
                    raise
        before, end = turn
        if not rendered.startswith(before):
            raise _Refused("the chat template changes a turn of the assistant when a reply follows")
        return end, rendered[len(before) :]

    def _rendered_example_turn(self, calls: tuple[tuple[str, str], ...]) -> tuple[str, int]:
        """Returns an example conversation up to the eos of the model's turn, and this eos."""
        begin, text, end = self._turn(_assistant(_MARKED_TEXT, calls))
        return begin + text + str(self.tokenizer.convert_ids_to_tokens(end)), end

    def _turn(self, message: Message) -> tuple[str, str, int]:
        """Renders an assistant message after a message of the user.

        Returns:
            (the conversation with its generation prompt, the turn without its eos, the eos).
        """
        begin = self._render([_user(0)], generation_prompt=True)
        whole = self._render([_user(0), message])
        if not whole.startswith(begin):
            raise _Refused(
                "the chat template begins a message of the assistant otherwise than the generation "
                "prompt"
            )
        text = whole[len(begin) :]
        found = self._first_eos(text)
        if found is None:
            raise _Refused(
                "the chat template does not end a turn of the assistant with a token that ends "
                f"sampling ({self._names_of_eos()})"
            )
        at, eos = found
        return begin, text[:at], eos

    def _first_eos(self, text: str) -> tuple[int, int] | None:
        """Returns the (character index, id) of the first eos in a text, or None."""
        names = {str(self.tokenizer.convert_ids_to_tokens(i)): i for i in sorted(self.eos_ids)}
        places = [(text.find(name), eos) for name, eos in names.items() if name in text]
        return min(places) if places else None

    # Tokens

    def _shortened(self, text: str, limit: int) -> str:
        """Cleans a string, and cuts its middle out if it has more than `limit` tokens."""
        # Very long strings are cut before they are encoded: encoding ten megabytes takes seconds.
        most = 16 * limit
        head, tail = text, ""
        if is_precut := len(text) > 2 * most:
            head, tail = text[:most], text[-most:]
        ids = self.control.encode_plain(_cleaned(head))
        if not is_precut and len(ids) <= limit:
            return _cleaned(text)
        rest = self.control.encode_plain(_cleaned(tail)) if is_precut else ids
        mark = self.control.encode_plain("\n[... a part of the text is left out ...]\n")
        if 2 * len(mark) > limit:
            mark = self.control.encode_plain("...")[: limit // 2]
        most = limit - len(mark)
        return self._text(ids[: most - most // 2] + mark + rest[len(rest) - most // 2 :])

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


class _Refused(UserError):  # noqa: N818 - or becomes a TrainingError
    """The chat template cannot render a conversation, or renders it unusably."""


_MARKED_TEXT = "markedtext"


def _user(number: int) -> Message:
    return {"role": "user", "content": f"{_MARKED_TEXT}{number}"}


def _tool(name: str, number: int) -> Message:
    return {
        "role": "tool", "name": name, "content": f"{_MARKED_TEXT}{number}",
        "tool_call_id": _CALL_ID,
    }  # fmt: skip


def _assistant(content: str, calls: Sequence[tuple[str, str]] = ()) -> Message:
    """Returns a message of the model with calls, given as (name, id)."""
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {
                "type": "function",
                "id": call_id,
                "function": {"name": name, "arguments": dict([_ARGUMENT])},
            }
            for name, call_id in calls
        ]
    return message


def _described(messages: Sequence[Message], n: int) -> str:
    message = messages[n]
    called = " with a tool call" if message.get("tool_calls") else ""
    return f"{message['role']}{called}"


def _cleaned(text: str) -> str:
    """Replaces control characters and lone surrogates in a string."""
    return text.encode("utf-8", "replace").decode("utf-8").translate(_CONTROL)
