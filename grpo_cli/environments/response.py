r"""Parses a turn of the model into a message: its content and its tool calls.

    parser = ResponseParser(FORMATS["hermes"])
    parser.parse('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    # -> {"role": "assistant", "content": "", "tool_calls": [{"type": "function",
    #     "function": {"name": "add", "arguments": {"a": 1}}}]}

A call that begins but cannot be parsed raises `MalformedCall` and never becomes plain text: the
loop answers and counts it. A policy in training may write anything, so each format is parsed with
`str.find` and `json`, in time linear in the length of the text.

transformers applies a tokenizer's own `response_template`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_cli.environments.functions import converted
from grpo_cli.environments.protocol import Message

Schemas = Sequence[Mapping[str, Any]]

MOST_CHARACTERS = 100_000  # of a turn that a template parses, whose regexes may be quadratic


class MalformedCall(Exception):  # noqa: N818 - answered, not raised to a user
    """A turn begins a call that cannot be parsed; the message explains the reason to the model."""


# A format takes the text of a turn and the tools' names. It returns the text without the
# calls, and (name, arguments) of each call.
Calls = list[tuple[Any, Any]]
Read = Callable[[str, "frozenset[str]"], tuple[str, Calls]]


@dataclass(frozen=True)
class ResponseParser:
    """Parses turns of the model in one format.

    Attributes:
        read: a format of `FORMATS`; None: `template` is used.
        template: a response template in transformers' form.
    """

    read: Read | None = None
    template: Mapping[str, Any] | None = None

    def parse(self, text: str, prefix: str = "", tools: Schemas = ()) -> Message:
        """Returns a turn as a message.

        Args:
            text: the turn, decoded with its special tokens except the final eos.
            prefix: the text before it, since a generation prompt may begin the message.
            tools: JSON schemas of the tools; arguments are converted to their types.

        Returns:
            {"role": "assistant", "content": str, "tool_calls": [...]}. `tool_calls` exists only if
            there are calls, each with a name and a mapping as arguments. `reasoning_content` exists
            only if the turn has a <think> block, which is not in `content` then.

        Raises:
            MalformedCall: the turn begins a call that cannot be parsed.
        """
        if self.read is None:
            return self._by_template(text, prefix, tools)
        thought, rest = _without_thought(text, prefix)
        content, found = self.read(rest, names_of(tools))
        message: Message = {"role": "assistant", "content": content.strip()}
        if thought is not None:
            message["reasoning_content"] = thought.strip()
        if found:
            message["tool_calls"] = _calls(found, tools)
        return message

    def _by_template(self, text: str, prefix: str, tools: Schemas) -> Message:
        from transformers.utils.chat_parsing import parse_response

        if len(text) > MOST_CHARACTERS:
            raise MalformedCall(
                f"The message has {len(text):,} characters; at most {MOST_CHARACTERS:,} are read."
            )
        try:
            found = parse_response(
                text, dict(self.template or {}), prefix=prefix, tools=[dict(t) for t in tools]
            )
        except Exception as error:
            # transformers' parsers pass on any exception of json and their transforms.
            raise MalformedCall(_shown(f"The message could not be read: {error}")) from error
        content = found.get("content")
        message: Message = {**found, "role": "assistant"}
        message["content"] = content if isinstance(content, str) else ""
        calls = message.pop("tool_calls", None)
        if calls:
            functions = [_function(c) for c in (calls if isinstance(calls, list) else [calls])]
            message["tool_calls"] = _calls(
                [(f.get("name"), f.get("arguments")) for f in functions], tools
            )
        return message


def names_of(tools: Schemas) -> frozenset[str]:
    """Returns the names of tools."""
    return frozenset(str(_function(tool).get("name")) for tool in tools)


def _function(tool: Any) -> Mapping[str, Any]:
    """Returns the "function" entry of a call or a schema; {} for anything else."""
    found = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return found if isinstance(found, Mapping) else {}


# Formats


def _hermes(text: str, names: frozenset[str]) -> tuple[str, Calls]:
    """Parses <tool_call>{"name": ..., "arguments": {...}}</tool_call>, of Qwen2.5 and Qwen3."""
    content, bodies = _blocks(text, "<tool_call>", "</tool_call>")
    return content, [_named(_json(body), body) for body in bodies]


def _qwen3_5(text: str, names: frozenset[str]) -> tuple[str, Calls]:
    """Parses <tool_call><function=add><parameter=a>1</parameter></function></tool_call>."""
    content, bodies = _blocks(text, "<tool_call>", "</tool_call>")
    return content, [_function_block(body) for body in bodies]


def _function_block(body: str) -> tuple[str, dict[str, Any]]:
    begin, end = "<function=", "</function>"
    inner = body.strip()
    if not (inner.startswith(begin) and inner.endswith(end)):
        raise MalformedCall(_shown(f"A call must be {begin}NAME>...{end}; found: {inner}"))
    name, closed, rest = inner[len(begin) : -len(end)].partition(">")
    if not closed:
        raise MalformedCall(_shown(f"The name of the function is not closed by >: {inner}"))
    arguments: dict[str, Any] = {}
    while rest := rest.lstrip():
        begin, end = "<parameter=", "</parameter>"
        key, opened, after = rest.removeprefix(begin).partition(">")
        value, closed, after = after.partition(end)
        if not (rest.startswith(begin) and opened and closed):
            raise MalformedCall(_shown(f"A parameter must be {begin}NAME>...{end}; found: {rest}"))
        arguments[key.strip()] = value.removeprefix("\n").removesuffix("\n")
        rest = after
    return name.strip(), arguments


def _llama3(text: str, names: frozenset[str]) -> tuple[str, Calls]:
    """Parses {"name": ..., "parameters": {...}}: a turn has either calls or text.

    JSON that names no tool and has no parameters counts as text.
    """
    marked = text.strip().startswith("<|python_tag|>")
    rest = text.strip().removeprefix("<|python_tag|>").strip()
    if not marked and not rest.startswith("{"):
        return text, []
    calls: Calls = []
    while rest:
        try:
            value, end = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            if marked or calls or '"name"' in rest[:200]:
                raise MalformedCall(_shown(f"The call is not valid JSON: {error}")) from error
            return text, []
        is_call = isinstance(value, dict) and "name" in value
        if is_call and not marked and not calls:
            is_known = isinstance(value["name"], str) and value["name"] in names
            is_call = is_known or bool(value.keys() & {"parameters", "arguments"})
        if not is_call:
            if marked or calls:
                raise MalformedCall(_shown(f"A call must have a name and parameters: {rest}"))
            return text, []
        calls.append(_named(value, rest))
        rest = rest[end:].lstrip(" \t\r\n;")
    return "", calls


def _mistral(text: str, names: frozenset[str]) -> tuple[str, Calls]:
    """Parses [TOOL_CALLS] [{"name": ..., "arguments": ...}], or [TOOL_CALLS]name[ARGS]{...}."""
    mark = "[TOOL_CALLS]"
    content, *bodies = text.split(mark)
    calls: Calls = []
    for body in bodies:
        name, has_arguments, arguments = body.partition("[ARGS]")
        if has_arguments and not body.lstrip().startswith(("[", "{")):
            calls.append((name.strip().partition("[CALL_ID]")[0], _json(arguments)))
            continue
        found = _json(body)
        calls += [_named(v, body) for v in (found if isinstance(found, list) else [found])]
    if bodies and not calls:
        raise MalformedCall(_shown(f"{mark} must be followed by calls; found: {bodies[0]}"))
    return content, calls


FORMATS: dict[str, Read] = {
    "hermes": _hermes,
    "qwen3_5": _qwen3_5,
    "llama3": _llama3,
    "mistral": _mistral,
}


# Parts


def _without_thought(text: str, prefix: str) -> tuple[str | None, str]:
    """Splits a turn into (content of a <think> block at its beginning or None, rest).

    Calls inside the block do not count.
    """
    begin, end = "<think>", "</think>"
    inside = prefix.rstrip().endswith(begin)  # the generation prompt has opened the block
    if not inside:
        stripped = text.lstrip()
        if not stripped.startswith(begin):
            return None, text
        text = stripped.removeprefix(begin)
    thought, closed, rest = text.partition(end)
    return (thought, rest) if closed else (text, "")


def _blocks(text: str, begin: str, end: str) -> tuple[str, list[str]]:
    """Returns the text without its blocks, and the body of each block.

    The last block may lack its end marker, since some models emit the eos instead.
    """
    contents: list[str] = []
    bodies: list[str] = []
    at = 0
    while (found := text.find(begin, at)) >= 0:
        contents.append(text[at:found])
        close = text.find(end, found)
        at = len(text) if close < 0 else close + len(end)
        bodies.append(text[found + len(begin) : close if close >= 0 else len(text)])
    return "".join([*contents, text[at:]]), bodies


def _finite(text: str) -> float:
    number = float(text) if text[-1].isdigit() else math.nan
    if not math.isfinite(number):
        raise ValueError(f"{text:.20} is not a finite number")
    return number


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _json(text: str) -> Any:
    try:
        found = _DECODER.decode(text.strip())
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()  # raises for lone surrogates
        return found
    except (ValueError, RecursionError) as error:
        raise MalformedCall(_shown(f"The call is not valid JSON: {error}")) from error


def _named(value: Any, body: str) -> tuple[Any, Any]:
    if not isinstance(value, dict) or "name" not in value:
        raise MalformedCall(_shown(f"A call must have a name and arguments; found: {body}"))
    return value["name"], value.get("arguments", value.get("parameters"))


def _calls(found: Calls, tools: Schemas) -> list[dict[str, Any]]:
    """Returns `tool_calls` of a message, with arguments converted to the tools' types."""
    properties = {_function(t).get("name"): _properties(t) for t in tools}
    calls = []
    for name, arguments in (_checked(*call) for call in found):
        known = properties.get(name, {})
        read = {key: converted(value, known.get(key, {})) for key, value in arguments.items()}
        calls.append({"type": "function", "function": {"name": name, "arguments": read}})
    return calls


def _checked(name: Any, arguments: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(name, str) or not name:
        raise MalformedCall(_shown(f"The name of a call must be text, not {name!r:.100}."))
    if isinstance(arguments, str):  # some models encode the mapping as a string once more
        arguments = _json(arguments or "{}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise MalformedCall(_shown(f"The arguments of {name} must be a mapping."))
    return name, arguments


def _properties(tool: Any) -> Mapping[str, Any]:
    parameters = _function(tool).get("parameters")
    found = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _shown(text: str, most: int = 300) -> str:
    """Shortens an error message to one line, since it becomes part of the conversation."""
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most else line[: most - 3] + "..."
