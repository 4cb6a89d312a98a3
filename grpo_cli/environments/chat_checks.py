"""Checks that a chat template and a tokenizer support conversations that grow by tokens."""

from __future__ import annotations

from collections.abc import Collection

from grpo_cli.environments.chat import Chat
from grpo_cli.environments.chat_template import (
    ARGUMENT,
    MARKED_TEXT,
    ChatTemplate,
    TemplateRefusal,
    assistant_message,
    described,
    tool_message,
    user_message,
)
from grpo_cli.environments.protocol import Message
from grpo_cli.errors import UserError


def check_chat(chat: Chat, replies: Collection[str] | None = None) -> None:
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
    if not chat.tokenizer.chat_template:
        raise UserError(
            "dataset.chat = true: the tokenizer has no chat template; set model.chat_template."
        )
    if replies is None:
        replies = ("tool", "user") if chat.tools else ("user",)
    name = min(chat.template.tool_names, default="tool")
    try:
        for thought in ("", "<think>\nthought\n</think>\n\n"):
            _check_prefixes(chat, _example(name, replies, thought))
        if "tool" in replies and chat.tools:
            _check_nothing_is_dropped(chat.template, name)
        user = {"role": "user", "content": ""}
        tool = {**user, "role": "tool", "name": name}
        shapes = {"tool": ([tool], [tool, tool]), "user": ([user],)}
        for messages in (shape for role in replies for shape in shapes[role]):
            chat.replies.skeleton(messages)
    except TemplateRefusal as error:
        another = "hermes (ChatML with tool calls) or another" if chat.tools else "another"
        raise UserError(f"{error}; set model.chat_template to {another}.") from error
    if chat.tools:
        _ = chat.parser


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


def _check_prefixes(chat: Chat, messages: list[Message]) -> None:
    """Checks that no message changes the tokens of the messages before it."""
    template = chat.template
    before: list[int] = []
    prompt_of_first, with_prompt = "", ""
    texts: list[str] = []  # rendered up to each message
    for n, message in enumerate(messages):
        where = f"message {n + 1} ({described(messages, n)})"
        rendered = template.render(messages[: n + 1])
        if message["role"] == "tool" and messages[n + 1]["role"] == "tool":
            texts.append("")  # a template may close a block of results after the last one
            continue
        texts.append(rendered)
        ids = chat.control.encode(rendered)
        if ids[: len(before)] != before:
            same = [rendered.startswith(text.rstrip()) for text in texts[:n]]
            changed = same.index(False) + 1 if False in same else n
            raise TemplateRefusal(
                f"the chat template changes message {changed} "
                f"({described(messages, changed - 1)}) when {where} follows; what the model "
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
    answer = tool_message(name, 1)
    messages = [user_message(0), assistant_message("", [answer]), answer]
    nothing, call, result = (template.render(messages[:n]) for n in (1, 2, 3))
    parts = {"name": name, "argument's name": ARGUMENT[0], "argument's value": ARGUMENT[1]}
    for part, text in parts.items():
        if call.count(text) <= nothing.count(text):  # the list of tools also has the name
            raise TemplateRefusal(f"the chat template drops the {part} of a tool call")
    if f"{MARKED_TEXT}1" not in result:
        raise TemplateRefusal("the chat template drops the result of a tool call")
