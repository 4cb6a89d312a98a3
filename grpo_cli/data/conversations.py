"""Checks prompts that are conversations, and renders them with a tokenizer's chat template.

A conversation is a list of messages as in chat APIs: [{"role": "user", "content": "1+1="}]. Nothing
here imports torch or transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_cli.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Conversation = list[dict[str, Any]]
Schemas = Sequence[Mapping[str, Any]]  # JSON schemas of tools
TEMPLATE_KWARGS = "chat_template_kwargs"  # column that holds the row's own template arguments

IMAGE = "<image>"  # stands for an image in text
IMAGE_TYPES = ("image", "image_url")
PICTURES = ("image", "path", "bytes")  # keys of an image block that hold its picture
BLOCKS = 'a list of blocks {"type": "text", "text": ...} and {"type": "image"}'

# Names of the roles in rows in ShareGPT's form, {"from": "human", "value": "1+1="}.
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
OF_MESSAGES = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})


def is_conversation(value: object) -> bool:
    """Returns whether a cell holds a list of messages."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def parsed(cell: object) -> Conversation | None:
    """Returns the messages that a text holds as JSON; None if it holds none."""
    try:
        found = json.loads(cell) if isinstance(cell, str) and cell.lstrip()[:1] == "[" else []
    except (ValueError, RecursionError):
        return None
    named = [isinstance(m, dict) and any(m.keys() >= keys for keys in OF_MESSAGES) for m in found]
    return found if named and all(named) else None


def normalized(messages: Any, where: str, column: str | None = None) -> Conversation:
    """Normalizes messages to new dicts with a role and text content.

    ShareGPT's form is converted and the text parts of a content are joined. Keys without a value,
    which a table adds if other rows have them, are dropped. A content with images stays a list of
    blocks, {"type": "text", "text": ...} and {"type": "image"}. A block that held a picture has
    "keys" instead: the path to the picture in the row.

    Args:
        column: the column of the messages; None: images are not allowed.
        where: location of the conversation for error messages: "rows.jsonl, row 3".

    Raises:
        UserError: a message without a role or content, or with content of another kind.
    """
    if not is_conversation(messages):
        raise UserError(f"{where}: holds {messages!r:.80}; a conversation is a list of messages.")
    return [_message(m, f"{where}, message {n}", column, n) for n, m in enumerate(messages)]


def _message(message: Any, where: str, column: str | None, number: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UserError(f"{where}: is {message!r:.80}; it must have a role and content.")
    found: dict[str, Any] = _without_nulls(message)
    if "role" not in found and "from" in found:
        role = found.pop("from")
        found = {
            "role": SHAREGPT_ROLES.get(role, role),
            "content": found.pop("value", None),
        } | found
    if not isinstance(found.get("role"), str):
        raise UserError(f"{where}: has no role; it has {', '.join(found) or 'nothing'}.")
    content = found.get("content")
    if content is None and "tool_calls" in found:
        content = ""
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        content = "".join(part["text"] for part in content)
    elif isinstance(content, list) and column is not None and all(map(_is_part, content)):
        way = (column, number, "content")
        return found | {"content": [_block(p, where, (*way, i)) for i, p in enumerate(content)]}
    if isinstance(content, list) and column is not None:
        part = next(part for part in content if not _is_part(part))
        raise UserError(f"{where}: has the block {part!r:.80}; a content is a text, or {BLOCKS}.")
    if not isinstance(content, str):
        reason = "has no content" if content is None else f"has the content {content!r:.80}"
        raise UserError(f"{where}: {reason}; the model takes text.")
    return found | {"content": content}


def _without_nulls(value: Any) -> Any:
    """Drops keys without a value, also in nested objects."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _is_text_part(part: Any) -> bool:
    is_text = isinstance(part, Mapping) and part.get("type") == "text"
    return is_text and isinstance(part.get("text"), str)


def _is_part(part: Any) -> bool:
    return _is_text_part(part) or (isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES)


def _block(part: Mapping[str, Any], where: str, way: tuple[str | int, ...]) -> dict[str, Any]:
    """Normalizes a block of a content with images; `way` is its key path in the row."""
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    if part["type"] == "image_url" or part.get("url"):
        raise UserError(
            f"{where}: names an image by a URL; store the image in the data, as bytes or a path."
        )
    name = next((name for name in PICTURES if part.get(name) not in (None, "")), None)
    return {"type": "image"} if name is None else {"type": "image", "keys": (*way, name)}


def text_of(content: Any) -> str:
    """Returns the text of a message's content, with <image> for each image."""
    if not isinstance(content, list):
        return str(content)
    return "".join(
        IMAGE if part.get("type") in IMAGE_TYPES else str(part.get("text", "")) for part in content
    )


def prefill_of(messages: Conversation) -> str:
    """Returns the assistant's text that ends a conversation, or ""."""
    return str(messages[-1]["content"]) if messages[-1]["role"] == "assistant" else ""


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Conversation,
    kwargs: Mapping[str, Any],
    where: str,
    tools: Schemas = (),
) -> str:
    """Renders the text that the model completes: up to a new answer, or through the final prefill.

    Args:
        kwargs: arguments of the template, such as enable_thinking.
        where: location of the conversation for error messages.
        tools: JSON schemas of the tools that the model may call.

    Raises:
        UserError: the template cannot be parsed, or refuses the conversation.
    """
    import jinja2

    continues = messages[-1]["role"] == "assistant"
    try:
        return str(
            tokenizer.apply_chat_template(
                messages,
                # Some templates write an introduction even for an empty list.
                tools=[dict(tool) for tool in tools] or None,  # type: ignore[arg-type]
                tokenize=False,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                **kwargs,
            )
        )
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"the chat template is not valid Jinja (line {error.lineno}: {error.message}); set "
            "model.chat_template to another."
        ) from error
    except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"{where}: the chat template refuses the conversation: {reason}") from error


def template_kwargs(
    of_model: Mapping[str, Any],
    row: Mapping[str, Any],
    mark: Callable[[Any], Any] = lambda value: value,
) -> dict[str, Any]:
    """Merges the chat template's arguments: the row's override the model's.

    Args: mark: applied to the row's values.
    """
    of_row = row.get(TEMPLATE_KWARGS) or {}
    if not isinstance(of_row, Mapping):
        raise UserError(f"the column {TEMPLATE_KWARGS} must hold objects; it has {of_row!r:.80}.")
    return {**of_model, **{key: mark(value) for key, value in of_row.items() if value is not None}}
