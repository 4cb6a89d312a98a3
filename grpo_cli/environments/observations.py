"""Checks and converts the values that environments return."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Mapping
from dataclasses import fields
from numbers import Real
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    InstanceOf,
    StrictBool,
    TypeAdapter,
    ValidationError,
)

from grpo_cli.environments.functions import clean_text
from grpo_cli.environments.protocol import Observation, ToolCall
from grpo_cli.scoring.guards import described, to_builtin


class Broken(Exception):  # noqa: N818
    """An environment violated the protocol; the message says how."""


def text_of(content: Any) -> str:
    """Returns a message's content as a string; it may be a list of text blocks.

    Raises:
        ValueError: the content is not text.
    """
    blocks = content if isinstance(content, list) else [content]
    texts: list[Any] = [
        block.get("text") if isinstance(block, Mapping) else block for block in blocks
    ]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{described_value(content)} is not a text")
    return clean_text("".join(texts))


def finite(value: Any) -> float:
    """Returns a value, which may be a scalar of numpy or torch, as a float.

    Raises:
        ValueError: the value is not a finite number.
    """
    value = unboxed(value)
    is_number = isinstance(value, Real)
    if not is_number or not abs(value) <= sys.float_info.max:  # an int may be too large
        raise ValueError(f"{described_value(value)} is not a finite number")
    return float(value)


def unboxed(value: Any) -> Any:
    """Returns a scalar of numpy or torch as a Python number; other values unchanged."""
    with contextlib.suppress(Exception):
        return value.item()
    return value


def _cleaned_call(call: ToolCall) -> ToolCall:
    name = clean_text(str(call.name), 200)
    return ToolCall(name, bool(call.failed), bool(call.timed_out), float(call.seconds))


Text = Annotated[str, BeforeValidator(text_of)]
Name = Annotated[str | None, BeforeValidator(lambda v: v if v is None else clean_text(str(v), 200))]
Number = Annotated[float, BeforeValidator(finite)]
Numbers = dict[Annotated[str, BeforeValidator(str)], Number]


class _Message(BaseModel):
    role: Literal["user", "tool", "system"]  # the model speaks as assistant
    content: Text
    name: Name = None
    tool_call_id: Name = None


Messages = list[Annotated[_Message, AfterValidator(lambda m: m.model_dump(exclude_none=True))]]


class _Function(BaseModel, extra="allow"):
    name: str
    parameters: dict[str, Any]


class _Tool(BaseModel, extra="allow"):
    function: _Function


class _Observation(BaseModel, extra="forbid"):
    messages: Messages = []
    reward: Number | None = None
    done: Annotated[StrictBool, BeforeValidator(unboxed)] = False
    tools: list[_Tool] = []
    rewards: Numbers = {}
    metrics: Numbers = {}
    calls: list[Annotated[InstanceOf[ToolCall], AfterValidator(_cleaned_call)]] = []


_adapter = functools.cache(TypeAdapter)


def checked(kind: Any, value: Any, what: str) -> Any:
    """Checks and converts a value with pydantic.

    Raises:
        Broken: the value is not of this kind; the message names the place in `what`.
    """
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as errors:
        error = errors.errors()[0]
        place = ".".join([what, *map(str, error["loc"])])
        reason = error.get("ctx", {}).get("error")  # of a validator above
        reason = reason or f"{error['msg']}, not {described_value(error['input'])}"
        raise Broken(f"{place}: {reason}") from None


def observed(value: Any) -> Observation:
    """Checks an observation and converts its fields; a dict with the same fields is accepted.

    Raises:
        Broken: the value is not an observation; the message says what is wrong.
    """
    if not isinstance(value, (Mapping, Observation)):
        kind = "None" if value is None else f"a {type(value).__name__}"
        raise Broken(f"it returned {kind}, not an Observation")
    given: Any = value
    if isinstance(value, Observation):  # a subclass may have fields of its own
        given = {field.name: getattr(value, field.name) for field in fields(Observation)}
    found: _Observation = checked(_Observation, given, "its observation")
    tools = [to_builtin(tool) for tool in given.get("tools", ())]
    return Observation(**{**dict(found), "tools": tools})


def schemas_of(tools: Any) -> list[dict[str, Any]]:
    """Checks the JSON schemas of an environment's tools, and returns them as plain dicts."""
    checked(list[_Tool], tools, "its tools")
    return [to_builtin(tool) for tool in tools]


def described_value(value: Any) -> str:
    """Returns a short repr of a value, even if its __repr__ raises."""
    try:
        return clean_text(repr(value), 200)
    except Exception as error:
        return f"a {type(value).__name__} ({described(error)})"
