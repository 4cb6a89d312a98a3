"""Renders conversations with a tokenizer's chat template, and checks it with examples."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grpo_cli.data.control_tokens import ControlTokens
from grpo_cli.environments.protocol import Message
from grpo_cli.environments.response import Schemas, names_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_cli.models.vision import VisionProcessor

MARKED_TEXT = "markedtext"  # text of the example messages
ARGUMENT = ("argument_key", "argument_value")  # of their calls


class TemplateRefusal(Exception):  # noqa: N818 - becomes a UserError or a TrainingError
    """The chat template cannot render a conversation, or renders it unusably."""


@dataclass
class ChatTemplate:
    """The chat template of a tokenizer, with the tools of a conversation."""

    tokenizer: PreTrainedTokenizerBase
    eos_ids: Collection[int]  # tokens that end a turn of the model
    tools: Schemas = ()  # JSON schemas of the tools that the model may call
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # arguments of the template
    vision: VisionProcessor | None = None  # the processor of a vision model

    @functools.cached_property
    def tool_names(self) -> frozenset[str]:
        """The names of the tools."""
        return names_of(self.tools)

    @functools.cached_property
    def turn_prefix(self) -> str:
        """The text before a turn of the model, which ends with the generation prompt."""
        return self.render([user_message(0)], generation_prompt=True)

    def as_accepted(self, messages: Sequence[Message]) -> list[Message]:
        """Returns messages in the form that the template accepts: some accept only blocks."""
        return [*messages] if self.vision is None else self.vision.as_template_takes(messages)

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
        """Renders a conversation; raises a `TemplateRefusal`."""
        import jinja2

        try:
            return str(
                self.tokenizer.apply_chat_template(
                    self.as_accepted(messages),
                    tools=[dict(tool) for tool in self.tools] or None,  # type: ignore[arg-type]
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                    **self.kwargs,
                )
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
            last = _described(messages, len(messages) - 1)
            reason = str(error).split("\n")[0]
            raise TemplateRefusal(
                f"the chat template refuses a conversation of {len(messages)} messages that ends "
                f"with {last}: {reason}"
            ) from error

    def turn(self, message: Message) -> tuple[str, int]:
        """Returns the text of a turn of the model, and the eos that ends it."""
        prefix, whole = self.turn_prefix, self.render([user_message(0), message])
        if not whole.startswith(prefix):
            raise TemplateRefusal(
                "the chat template begins a message of the assistant otherwise than its generation "
                "prompt"
            )
        return self.up_to_eos(whole[len(prefix) :])

    def up_to_eos(self, text: str) -> tuple[str, int]:
        """Returns the text before the first eos, and the eos id."""
        names = {str(self.tokenizer.convert_ids_to_tokens(i)): i for i in sorted(self.eos_ids)}
        places = [(text.find(name), eos) for name, eos in names.items() if name in text]
        if not places:
            raise TemplateRefusal(
                "the chat template does not end a turn of the assistant with a token that ends "
                f"sampling ({', '.join(names)})"
            )
        at, eos = min(places)
        return text[:at], eos


def user_message(number: int) -> Message:
    return {"role": "user", "content": f"{MARKED_TEXT}{number}"}


def tool_message(name: str, number: int) -> Message:
    content = f"{MARKED_TEXT}{number}"
    return {"role": "tool", "name": name, "content": content, "tool_call_id": "call00000"}


def assistant_message(content: str, answers: Sequence[Message] = ()) -> Message:
    """Returns a turn of the model, which calls the tools that give the answers."""
    message: Message = {"role": "assistant", "content": content}
    if answers:
        message["tool_calls"] = [
            {
                "type": "function",
                "id": answer["tool_call_id"],
                "function": {"name": answer.get("name", "tool"), "arguments": dict([ARGUMENT])},
            }
            for answer in answers
        ]
    return message


def _described(messages: Sequence[Message], n: int) -> str:
    message = messages[n]
    called = " with a tool call" if message.get("tool_calls") else ""
    return f"{message['role']}{called}"


def check_template(
    template: ChatTemplate, control: ControlTokens, replies: Collection[str]
) -> None:
    """Checks that conversations can grow, with replies of some roles; see `Chat.check`."""
    name = min(template.tool_names, default="tool")
    for thought in ("", "<think>\nthought\n</think>\n\n"):
        _check_prefixes(template, control, _example(name, replies, thought))
    if "tool" in replies and template.tools:
        _check_nothing_is_dropped(template, name)


def _example(name: str, replies: Collection[str], thought: str) -> list[Message]:
    """Returns an example conversation with replies of a tool, of the user, or of both."""
    said = f"{thought}{MARKED_TEXT}"
    messages = [user_message(0)]
    if "tool" in replies:
        answer, other = (tool_message(name, n) for n in range(2))
        call = assistant_message(said, [answer])
        messages += [call, answer, other, call, answer]
    turn = assistant_message(said)
    messages.append(turn)
    if "user" in replies:
        messages += [user_message(1), turn, user_message(2), turn]
    return messages


def _check_prefixes(
    template: ChatTemplate, control: ControlTokens, messages: Sequence[Message]
) -> None:
    """Checks that no message changes the tokens of the messages before it."""
    before: list[int] = []
    prompt_of_first, with_prompt = "", ""
    texts: list[str] = []  # rendered up to each message
    for n, message in enumerate(messages):
        where = f"message {n + 1} ({_described(messages, n)})"
        rendered = template.render(messages[: n + 1])
        if message["role"] == "tool" and messages[n + 1]["role"] == "tool":
            texts.append("")  # a template may close a block of results after the last one
            continue
        texts.append(rendered)
        ids = control.encode(rendered)
        if ids[: len(before)] != before:
            same = [rendered.startswith(text.rstrip()) for text in texts[:n]]
            changed = same.index(False) + 1 if False in same else n
            raise TemplateRefusal(
                f"the chat template changes message {changed} "
                f"({_described(messages, changed - 1)}) when {where} follows; what the model "
                "has read and written must keep its tokens"
            )
        if message["role"] == "assistant":
            if not rendered.startswith(with_prompt):
                raise TemplateRefusal(
                    f"the chat template begins {where} otherwise than its generation prompt"
                )
            template.up_to_eos(rendered[len(with_prompt) :])
            ends = [i for i, token in enumerate(ids) if token in template.eos_ids]
            before = ids[: ends[-1] + 1]
            continue
        with_prompt = template.render(messages[: n + 1], generation_prompt=True)
        if not with_prompt.startswith(rendered):
            raise TemplateRefusal(f"the chat template changes {where} with its generation prompt")
        added = with_prompt[len(rendered) :]
        prompt_of_first = added if n == 0 else prompt_of_first
        if added != prompt_of_first:
            raise TemplateRefusal(
                f"the generation prompt of the chat template behind {where} is {added!r:.60}, "
                f"and {prompt_of_first!r:.60} in the first turn"
            )


def _check_nothing_is_dropped(template: ChatTemplate, name: str) -> None:
    """Checks that the template writes all parts of a call and its result."""
    answer = tool_message(name, 1)
    messages = [user_message(0), assistant_message("", [answer]), answer]
    nothing, call, result = (template.render(messages[:n]) for n in (1, 2, 3))
    parts = {"name": name, "argument's name": ARGUMENT[0], "argument's value": ARGUMENT[1]}
    for part, text in parts.items():
        if call.count(text) <= nothing.count(text):  # the list of tools also has the name
            raise TemplateRefusal(f"the chat template drops the {part} of a tool call")
    if f"{MARKED_TEXT}1" not in result:
        raise TemplateRefusal("the chat template drops the result of a tool call")
