"""Tools: typed functions with docstrings that the model may call.

    def square(number: int) -> int:
        '''Squares a number.

        Args: number: the number.
        '''
        return number * number

transformers makes the schema that the model sees. If a call is invalid or the function raises, the
answer is `{"error": "..."}`, so that the model can correct itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_cli.config.user_code import import_function, is_coroutine_function
from grpo_cli.environments.deadlines import Deadlines, Overrun
from grpo_cli.environments.protocol import Message, Observation, ToolCall
from grpo_cli.errors import UserError, listed
from grpo_cli.scoring.guards import described, to_builtin

TEXT_LIMIT = 100_000  # maximum characters of a message's content; tokens are limited later
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
NULLABLE = ("anyOf", "oneOf", "type")  # schema keys that declare a value's types
# Control characters except tab, line feed and carriage return, and lone surrogates.
UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")

Answer = tuple[Message, ToolCall]  # the message for the model, and the record of the call


class ToolError(Exception):
    """Raised by a tool whose call was wrong; the model gets the message unchanged."""


class EnvironmentFailure(Exception):  # noqa: N818
    """Raised if an environment failed. Its rollout can be replayed in a fresh environment.

    Args:
        stop_reason: "env_error" or "env_timeout".
        own: whether the session's own call was at fault, not another session's in its worker.
    """

    def __init__(self, stop_reason: str, text: str, own: bool = True) -> None:
        super().__init__(stop_reason, text, own)  # these arguments are pickled
        self.stop_reason, self.own = stop_reason, own

    def __str__(self) -> str:
        return clean_text(self.args[1], 2000)


@dataclass(frozen=True)
class Tool:
    """A function that the model may call by name."""

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]  # for chat templates: {"type": "function", "function": {...}}

    @functools.cached_property
    def _validator(self) -> Any:
        import jsonschema

        parameters = self.schema["function"].get("parameters") or {"type": "object"}
        return jsonschema.Draft202012Validator(checkable(parameters))

    @property
    def is_async(self) -> bool:
        """Whether its calls are coroutines, which may run concurrently."""
        return is_coroutine_function(self.function)

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of a call, with strings converted to the schema's types.

        Raises:
            ToolError: they do not match the schema; the message is for the model.
        """
        parameters = self.schema["function"].get("parameters") or {}
        known = parameters.get("properties") or {}
        arguments = {str(k): converted(v, known.get(k, {})) for k, v in given.items()}
        missing = [name for name in parameters.get("required", ()) if name not in arguments]
        unknown = [name for name in arguments if name not in known]
        if missing:
            raise ToolError(f"missing argument {missing[0]!r}; arguments: {listed(known)}")
        # Some servers' schemas do not describe their arguments.
        if unknown and not parameters.get("additionalProperties", "properties" not in parameters):
            raise ToolError(f"unknown argument {unknown[0]!r}; arguments: {listed(known)}")
        wrong = None
        with contextlib.suppress(Exception):  # an invalid schema: the server checks the arguments
            wrong = next(self._validator.iter_errors(arguments), None)
        if wrong is not None:
            at = ".".join(map(str, wrong.absolute_path))
            raise ToolError(f"argument {at!r}: {shortened(wrong.message, 500)}")
        return arguments


@dataclass(frozen=True)
class Functions:
    """Answers the calls of tools."""

    tools: Mapping[str, Tool]  # by name
    deadlines: Deadlines = field(default_factory=Deadlines)  # of each tool call

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """The JSON schemas of the tools, in their order."""
        return [tool.schema for tool in self.tools.values()]

    def check_names(self, own: Iterable[str], where: str) -> None:
        """Raises a UserError if an environment's own tool has the name of one of these."""
        if both := sorted({*own} & {*self.tools}):
            raise UserError(
                f"{where}: there are two tools called {both[0]!r}, one of the environment and one "
                "in `tools`; give the one in `tools` another name."
            )

    def joined(self, own: Mapping[str, Tool], where: str) -> Functions:
        """Returns these tools together with an environment's own; raises as `check_names`."""
        self.check_names(own, where)
        return Functions({**own, **self.tools}, self.deadlines)

    async def step(self, message: Message) -> Observation:
        """Answers the calls of a turn in order; a turn without a call ends the episode."""
        calls = calls_of(message)
        return await self.answer(calls) if calls else Observation(done=True)

    async def answer(self, calls: Sequence[Mapping[str, Any]]) -> Observation:
        """Makes calls in order; consecutive calls of async tools run concurrently."""
        answers: list[Answer] = []
        asynchronous = {name for name, tool in self.tools.items() if tool.is_async}
        for is_async, some in itertools.groupby(calls, lambda c: name_of(c) in asynchronous):
            if is_async:
                wrap = self.deadlines.wrap
                answers += await asyncio.gather(*(wrap(self._call(call)) for call in some))
            else:
                answers += [await self._call(call) for call in some]
        return as_observation(answers)

    async def _call(self, call: Mapping[str, Any]) -> Answer:
        """Makes a call; a call that fails is answered with its error."""
        self.deadlines.begin()
        begun, name = time.perf_counter(), shortened(name_of(call), 200)
        failed, timed_out = True, False
        try:
            if (tool := self.tools.get(name)) is None:
                raise ToolError(f"there is no tool {name!r}; there are: {listed(self.tools)}")
            result = tool.function(**tool.arguments(call["function"]["arguments"]))
            if inspect.isawaitable(result):
                result = await self.deadlines.within(result)
            text, failed = as_text(result), False
        except Overrun as late:
            text, timed_out = failure(str(late)), True
        except EnvironmentFailure:
            raise
        except ToolError as error:
            text = failure(str(error))
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # the episode was abandoned
            text = failure("CancelledError")
        except (Exception, SystemExit, KeyboardInterrupt, GeneratorExit) as error:
            text = failure(described(error))
        seconds = time.perf_counter() - begun
        return answer_to(call, text, failed=failed, timed_out=timed_out, seconds=seconds)


def load_tools(paths: Mapping[str, str]) -> dict[str, Tool]:
    """Imports the functions in a recipe's `tools`.

    Raises:
        UserError: a function cannot be imported, or is not typed and documented.
    """
    tools = {}
    for name, path in paths.items():
        where = f"tools.{name} = {path}"
        tools[name] = make_tool(import_function(path, where), name, where)
    return tools


def make_tool(function: Callable[..., Any], name: str, where: str) -> Tool:
    """Makes a tool from a function.

    Args:
        name: the tool's name for the model.
        where: the key and the value that name the function, for messages.

    Raises:
        UserError: an argument lacks a type or a description, or the function has no docstring.
    """
    if NAME.fullmatch(name) is None:
        raise UserError(
            f"{where}: a tool cannot be called {name!r}; use letters, digits and underscores."
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{where}: its arguments cannot be read ({error}); write a function that calls it."
        ) from error
    for p in parameters:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY):
            stars = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
            raise UserError(
                f"{where}: the model cannot give the argument {stars}{p.name}; a tool has named "
                "arguments only, each with a type."
            )
    from transformers.utils import get_json_schema

    is_object = not inspect.isroutine(function)  # a callable object: use its __call__
    try:
        schema = get_json_schema(function.__call__ if is_object else function)  # type: ignore[operator]
    except Exception as error:  # from transformers, or from evaluating the annotations
        reason = str(error).rstrip(".!")
        raise UserError(
            f"{where}: {reason}; a tool needs a docstring with a description of itself and of each "
            "argument (Args:), and a type for each argument."
        ) from error
    own = schema["function"]
    if not own.get("description"):
        raise UserError(f"{where}: its docstring does not say what the tool does.")
    return Tool(name, function, {**schema, "function": {**own, "name": name}})


def calls_of(message: Message) -> list[Mapping[str, Any]]:
    """Returns the tool calls of a message: [{"type": "function", "function": {...}}]."""
    return [c for c in message.get("tool_calls") or () if isinstance(c.get("function"), Mapping)]


def name_of(call: Mapping[str, Any]) -> str:
    """Returns the tool's name in a call."""
    return str(call["function"].get("name"))


def answer_to(call: Mapping[str, Any], text: str, **outcome: Any) -> Answer:
    """Returns the answer to a tool call; `outcome` has the other fields of its `ToolCall`."""
    name = shortened(name_of(call), 200)
    answer: Message = {"role": "tool", "name": name, "content": text}
    if isinstance(call.get("id"), str):
        answer["tool_call_id"] = call["id"]
    return answer, ToolCall(name, **outcome)


def as_observation(answers: Sequence[Answer]) -> Observation:
    """Returns the answers to the calls of a turn as an observation."""
    return Observation([message for message, _ in answers], calls=[made for _, made in answers])


def failure(text: str) -> str:
    """Returns the answer to a failed call: `{"error": "..."}`."""
    return json.dumps({"error": clean_text(text, 2000)}, ensure_ascii=False)


def as_text(result: Any) -> str:
    """Converts a tool's result to a string: strings are unchanged, other values become JSON.

    A result that is not JSON-serialisable becomes `str(result)`; bytes are decoded as UTF-8. A
    long string keeps its first and last characters, TEXT_LIMIT in total.
    """
    if isinstance(result, (bytes, bytearray, memoryview)):
        result = bytes(result[: 4 * TEXT_LIMIT]).decode("utf-8", "replace")
    if not isinstance(result, str):
        try:
            result = json.dumps(result, ensure_ascii=False, default=to_builtin)
        except (TypeError, ValueError, RecursionError):
            result = str(result)
    return clean_text(result)


def clean_text(text: str, limit: int = TEXT_LIMIT) -> str:
    """Shortens a string, and replaces control characters and lone surrogates."""
    return UNPRINTABLE.sub("\ufffd", shortened("".join([text]), limit))


def shortened(text: str, limit: int) -> str:
    """Cuts a string to about `limit` characters: its beginning, a mark and its end."""
    if len(text) <= limit:
        return text
    head, tail = (limit + 1) // 2, limit // 2
    left_out = len(text) - head - tail
    return f"{text[:head]}\n[... {left_out} characters left out ...]\n{text[len(text) - tail :]}"


def converted(value: Any, schema: Any) -> Any:
    """Converts a string to a non-string type of the schema, as transformers does: "7" to 7.

    Other values are returned unchanged; the schema check refuses them afterwards.
    """
    types = types_of(schema)
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return int(value) if "number" not in types else value
    if not isinstance(value, str) or "string" in types or not types:
        return value
    text = value.strip()
    for kind in types:
        try:
            if kind == "boolean" and text.lower() in ("true", "false", "1", "0"):
                return text.lower() in ("true", "1")
            if kind == "null" and text in ("null", "None"):
                return None
            if kind == "integer":
                return int(text)
            if kind in ("number", "object", "array"):
                read = json.loads(text, parse_constant=_no_number)
                if json_type(read) in (kind, "integer" if kind == "number" else kind):
                    return read
        except (ValueError, RecursionError):
            continue
    return value


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number in JSON")


def types_of(schema: Any) -> list[str]:
    """Returns the types that a JSON schema allows, in order; [] if it names none."""
    if not isinstance(schema, Mapping):
        return []
    declared = schema.get("type", [])
    types = [declared] if isinstance(declared, str) else list(declared)
    for union in ("anyOf", "oneOf"):
        for choice in schema.get(union) or ():
            types += types_of(choice)
    if schema.get("nullable"):
        types.append("null")
    return types


def json_type(value: Any) -> str:
    """Returns the JSON schema name of a value's type."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    if type(value) in names:
        return names[type(value)]
    return "array" if isinstance(value, (list, tuple)) else "object"


def checkable(schema: Any) -> Any:
    """Converts a schema of transformers to standard JSON Schema.

    transformers writes OpenAPI's `nullable` for a type or null, and has the types image and audio,
    which JSON Schema does not know.
    """
    if isinstance(schema, list):
        return [checkable(inner) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    read = {key: checkable(value) for key, value in schema.items() if key != "nullable"}
    if read.get("type") in ("image", "audio"):
        del read["type"]
    if schema.get("nullable") is True and any(key in read for key in NULLABLE):
        return {"anyOf": [read, {"type": "null"}]}
    return read
