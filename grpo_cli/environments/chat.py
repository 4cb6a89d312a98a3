"""The tokens of a growing conversation: sampled tokens are kept, and replies are appended.

    chat = Chat(ChatTemplate(tokenizer, eos_ids, tools))
    chat.check()                                     # before training: UserError
    ids = [*prompt.ids]
    ids += sampled                                   # the model's turn with its eos
    message = chat.read(sampled)                     # for the environment
    ids += chat.reply_to(sampled, replies, limit=512)
    ids += sampled_next

A conversation is never rendered again: ids that are decoded and re-encoded differ from the sampled
ones, and a template may change earlier messages.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from grpo_cli.data import conversations
from grpo_cli.data.control_tokens import ControlTokens
from grpo_cli.environments.chat_template import (
    ARGUMENT,
    ChatTemplate,
    TemplateRefusal,
    assistant_message,
    check_template,
    tool_message,
)
from grpo_cli.environments.protocol import Message
from grpo_cli.environments.replies import ReplyEncoder
from grpo_cli.environments.response import FORMATS, MalformedCall, ResponseParser
from grpo_cli.errors import UserError
from grpo_cli.records import decoded

if TYPE_CHECKING:
    from grpo_cli.records import Prompt


class Chat:
    """A dialogue in a chat template; a turn ends where sampling stops.

    Holds the template, the encoder of replies and the parser of the model's turns.
    """

    is_one_text = False  # turns and replies are messages
    piece_tokens: int | None = None  # maximum tokens of a piece; None: no maximum

    def __init__(self, template: ChatTemplate, response_template: str = "auto") -> None:
        """Stores the settings; renders nothing yet.

        Args:
            response_template: the value of `model.response_template`, the format of tool calls.
        """
        self.template, self.response_template = template, response_template
        self.tokenizer, self.tools = template.tokenizer, template.tools
        self.control = ControlTokens(self.tokenizer)
        self.replies = ReplyEncoder(template, self.control)
        # `all_special_tokens` lacks tokens without a role such as eos, for example <|im_start|>.
        marked = [t.content for t in self.tokenizer.added_tokens_decoder.values() if t.special]
        self._special = {*marked, *self.tokenizer.all_special_tokens}

    def check(self, replies: Collection[str] | None = None) -> None:
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
            check_template(self.template, self.control, replies)
            user = {"role": "user", "content": ""}
            tool = {**user, "role": "tool", "name": min(self.template.tool_names, default="tool")}
            shapes = {"tool": ([tool], [tool, tool]), "user": ([user],)}
            for messages in (shape for role in replies for shape in shapes[role]):
                self.replies.skeleton(messages)
        except TemplateRefusal as error:
            another = "hermes (ChatML with tool calls) or another" if self.tools else "another"
            raise UserError(f"{error}; set model.chat_template to {another}.") from error
        if self.tools:
            _ = self.parser

    def stops(self, num_calls: int) -> tuple[str, ...]:
        """Returns (), since a chat adds no stop strings."""
        return ()

    def turn_end(
        self, ids: Sequence[int], before: int, num_calls: int, *, has_stopped: bool
    ) -> int | None:
        """Returns the length of a turn that has stopped, else None."""
        return len(ids) if has_stopped else None

    def reply_to(self, turn: Sequence[int], messages: Sequence[Message], limit: int) -> list[int]:
        """Returns the tokens between a turn of the model and its next turn."""
        ended_by_eos = turn[-1] in self.template.eos_ids
        return self.replies.encode(messages, ended_by_eos=ended_by_eos, limit=limit)

    def read(
        self, ids: Sequence[int], num_calls: int = 0, *, at_stop_string: bool = False
    ) -> Message:
        """Returns a turn of the model as a message; see `ResponseParser.parse`."""
        ids = list(ids)
        while ids and ids[-1] in self.template.eos_ids:
            ids.pop()
        text = decoded(self.tokenizer, ids, special=True)
        message = self.parser.parse(text, self.template.turn_prefix, self.tools)
        for token in self._special:
            message["content"] = message["content"].replace(token, "")
        return message

    @functools.cached_property
    def parser(self) -> ResponseParser:
        """The parser of the model's turns: it must read a call that the template has rendered."""
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
        name = min(self.template.tool_names)
        try:
            text, _ = self.template.turn(assistant_message("", [tool_message(name, 0)]))
            found = parser.parse(text, self.template.turn_prefix, self.tools)
        except (MalformedCall, TemplateRefusal):
            return False
        calls = [c["function"] for c in found.get("tool_calls", [])]
        return [(c["name"], c["arguments"]) for c in calls] == [(name, dict([ARGUMENT]))]

    def turn_ids(self, message: Message) -> list[int]:
        """Returns the tokens, with the eos, of a model turn that renders an assistant message.

        Raises:
            UserError: the template does not render the message after its generation prompt.
        """
        try:
            text, end = self.template.turn(message)
        except TemplateRefusal as error:
            raise UserError(f"{error}; set model.chat_template to another.") from error
        return [*self.control.encode(text), end]

    def episode_ids(self, solution: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Returns the tokens of an episode given as messages, and which of them are the model's.

        An episode with these turns and replies would have the same tokens.
        """
        ids: list[int] = []
        is_sampled: list[bool] = []
        for is_model, group in itertools.groupby(solution, lambda m: m["role"] == "assistant"):
            if is_model:
                added = [i for message in group for i in self.turn_ids(message)]
            else:
                added = self.replies.encode([*group], ended_by_eos=True, limit=10**6)
            ids += added
            is_sampled += [is_model] * len(added)
        return ids, is_sampled

    def with_observation(
        self, prompt: Prompt, observation: Sequence[Message], limit: int = 10**6
    ) -> Prompt:
        """Adds an environment's first messages to a prompt; keeps the old ids as `row_ids`.

        A single user message is appended to a user message that ends the prompt, since many
        templates refuse two consecutive ones.

        Args:
            prompt: a prompt of a chat data set.
            limit: maximum tokens of one content; a longer one is cut in its middle.
        """
        assert not isinstance(prompt.text, str), "checked: environments need dataset.chat"
        messages: list[Message] = [dict(m) for m in prompt.text]
        texts = [m["content"] for m in observation]
        joins = [m["role"] for m in (*messages[-1:], *observation)] == ["user", "user"]
        if joins and not texts[0]:
            return prompt
        more = [{**self.replies.with_safe_names(m), "content": ""} for m in observation]

        def filled(messages: Sequence[Message], written: Sequence[str]) -> list[Message]:
            conversation = [dict(m) for m in (*messages, *(() if joins else more))]
            for message, text in zip(conversation[-len(written) :], written, strict=True):
                before = message["content"]
                added = text if isinstance(before, str) else [{"type": "text", "text": text}]
                message["content"] = before + added
            return conversation

        shown = [self.replies.shortened(text, limit) for text in texts]
        marked: Any = prompt.marked or prompt.conversation
        prefill = [*marked[len(messages) :]]
        mark = self.control.mark
        written = filled(marked[: len(messages)], mark(shown))
        accepted = self.template.as_accepted([*written, *prefill])
        kwargs = conversations.template_kwargs(self.template.kwargs, prompt.columns, mark)
        where = f"row {prompt.row}"
        rendered = conversations.render(self.tokenizer, accepted, kwargs, where, self.tools)
        ids = self.control.encode(prompt.expanded(rendered))
        text = filled(messages, shown)
        return dataclasses.replace(prompt, ids=ids, text=text, row_ids=prompt.ids)
