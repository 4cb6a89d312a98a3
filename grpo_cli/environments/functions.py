"""Tools: typed functions with docstrings that the model may call.

    def square(number: int) -> int:
        '''Squares a number.

        Args: number: the number.
        '''
        return number * number

The schema that the model sees is made by transformers. A call that cannot be made and a function
that raises are answered with the text `{"error": "..."}`, so that the model can correct itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_cli.config.user_code import import_function, is_coroutine_function
from grpo_cli.environments.deadlines import Deadlines, Overrun, described
from grpo_cli.environments.protocol import Message, Observation, ToolCall
from grpo_cli.errors import UserError, listed

TEXT_LIMIT = 100_000  # characters of a message's text that are kept; tokens are limited later
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
NULLABLE = ("anyOf", "oneOf", "type")  # the keys of a schema that say what types a value may have
# Control characters except tab, line feed and carriage return, and halves of surrogate pairs.
UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")

Answer = tuple[Message, ToolCall]  # the message for the model, and what became of the call


class ToolError(Exception):
    """A tool says that its call was wrong; the message is for the model, as it is."""


class Failed(Exception):  # noqa: N818
    """The environment behind a tool has failed: it is not the model's fault.

    Args:
        status: "env_error" or "env_timeout".
    """

    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Tool:
    """A function that the model may call by name."""

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]  # as chat templates take it: {"type": "function", "function": {...}}

    def __post_init__(self) -> None:
        import jsonschema

        parameters = self.schema["function"].get("parameters") or {"type": "object"}
        object.__setattr__(
            self, "_validator", jsonschema.Draft202012Validator(checkable(parameters))
        )

    @property
    def is_async(self) -> bool:
        """Whether its calls are awaited, several at the same time."""
        return is_coroutine_function(self.function)

    def arguments(self, given: Any) -> dict[str, Any]:
        """Returns the arguments of a call, with texts converted to the types of the schema.

        Raises:
            ValueError: they do not fit the schema; the message is for the model.
        """
        if given is None or given == "":
            given = {}
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as error:
                raise ValueError(f"the arguments are not valid JSON: {error}") from None
        if not isinstance(given, Mapping):
            raise ValueError(f"the arguments must be an object, not {json_type(given)}")
        parameters = self.schema["function"].get("parameters") or {}
        known = parameters.get("properties") or {}
        arguments = {str(k): converted(v, known.get(k, {})) for k, v in given.items()}
        missing = [name for name in parameters.get("required", ()) if name not in arguments]
        unknown = [name for name in arguments if name not in known]
        if missing:
            raise ValueError(f"missing argument {missing[0]!r}; arguments: {listed(known)}")
        # Some servers' schemas say nothing about arguments.
        if unknown and not parameters.get("additionalProperties", "properties" not in parameters):
            raise ValueError(f"unknown argument {unknown[0]!r}; arguments: {listed(known)}")
        wrong = None
        with contextlib.suppress(Exception):  # a server's schema may be none: it checks by itself
            wrong = next(self._validator.iter_errors(arguments), None)  # type: ignore[attr-defined]
        if wrong is not None:
            at = ".".join(map(str, wrong.absolute_path))
            raise ValueError(f"argument {at!r}: {shortened(wrong.message, 500)}")
        return arguments


class Functions:
    """Answers the calls of tools.

    Args:
        tools: by name.
        deadlines: gives each call of a tool its time; by default as long as it takes.
        answered: called with each answer of a turn that is not its last, as soon as it is there.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        deadlines: Deadlines | None = None,
        answered: Callable[[Answer], None] = lambda _: None,
    ) -> None:
        self.tools = dict(tools)
        self.deadlines = deadlines or Deadlines()
        self.answered = answered

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """The JSON schemas of the tools, in their order."""
        return [tool.schema for tool in self.tools.values()]

    def joined(self, own: Mapping[str, Tool], where: str) -> Functions:
        """Returns the tools of an environment and these ones.

        Args:
            where: the key that names the environment, for messages.

        Raises:
            UserError: two have one name.
        """
        if both := sorted({*own} & {*self.tools}):
            raise UserError(
                f"{where}: there are two tools called {both[0]!r}, one of the environment and one "
                "in `tools`; give the one in `tools` another name."
            )
        return Functions({**own, **self.tools}, self.deadlines, self.answered)

    async def step(self, message: Message) -> Observation:
        """Answers the calls of a turn in their order; a turn without a call ends the episode."""
        if not (calls := calls_of(message)):
            return Observation(done=True)
        answers = await self.answer(calls)
        return Observation([a for a, _ in answers], calls=[made for _, made in answers])

    async def answer(self, calls: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """Makes calls one after another, and neighbouring calls of async tools at once."""
        answers: list[Answer] = []
        for is_async, some in itertools.groupby(calls, self._is_async):
            if is_async:
                wrap = self.deadlines.wrap
                new = await asyncio.gather(*(wrap(self._call(call)) for call in some))
                answers += new
                for answer in new if len(answers) < len(calls) else ():
                    self.answered(answer)
                continue
            for call in some:
                answers.append(await self._call(call))
                if len(answers) < len(calls):
                    self.answered(answers[-1])
        return answers

    def _is_async(self, call: Mapping[str, Any]) -> bool:
        tool = self.tools.get(name_of(call))
        return tool is not None and tool.is_async

    async def _call(self, call: Mapping[str, Any]) -> Answer:
        self.deadlines.begin()
        begun = time.perf_counter()
        name = shortened(name_of(call), 200)
        text, failed, timed_out = await self._result(name, call)
        answer: Message = {"role": "tool", "name": name, "content": text}
        if isinstance(call.get("id"), str):
            answer["tool_call_id"] = call["id"]
        seconds = time.perf_counter() - begun
        return answer, ToolCall(name, failed=failed, timed_out=timed_out, seconds=seconds)

    async def _result(self, name: str, call: Mapping[str, Any]) -> tuple[str, bool, bool]:
        """Returns (text of the answer, whether the call failed, whether it ran out of time)."""
        tool = self.tools.get(name)
        if tool is None:
            known = listed(self.tools)
            return failure(f"there is no tool {name!r}; there are: {known}"), True, False
        try:
            arguments = tool.arguments(call["function"].get("arguments"))
        except ValueError as error:
            return failure(str(error)), True, False
        try:
            result = tool.function(**arguments)
            if inspect.isawaitable(result):
                result = await self.deadlines.within(result)
            return as_text(result), False, False
        except Overrun as late:
            return failure(str(late)), True, True
        except Failed:
            raise
        except ToolError as error:
            return failure(str(error)), True, False
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # the episode was given up
            return failure("CancelledError"), True, False
        except (Exception, SystemExit, KeyboardInterrupt, GeneratorExit) as error:
            return failure(described(error)), True, False


def load_tools(paths: Mapping[str, str], key: str = "tools") -> dict[str, Tool]:
    """Imports the functions of a recipe's `tools`.

    Raises:
        UserError: a function cannot be imported, or is not typed and documented.
    """
    tools = {}
    for name, path in paths.items():
        if ":" not in str(path):
            raise UserError(
                f"{key}.{name}: {path} is no function; give it as my_module:my_function."
            )
        where = f"{key}.{name} = {path}"
        tools[name] = make_tool(import_function(path, where), name, where)
    return tools


def make_tool(function: Callable[..., Any], name: str, where: str) -> Tool:
    """Returns the tool that a function is.

    Args:
        name: by which the model calls it.
        where: the key and the value that name the function, for messages.

    Raises:
        UserError: it has arguments without a type or a description, or no docstring.
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

    is_object = not inspect.isroutine(function)  # that is called: transformers reads its method
    try:
        schema = get_json_schema(function.__call__ if is_object else function)  # type: ignore[operator]
    except Exception as error:  # of transformers, or of the evaluation of the annotations
        reason = str(error).rstrip(".!")
        raise UserError(
            f"{where}: {reason}; a tool needs a docstring with a description of itself and of each "
            "argument (Args:), and a type for each argument."
        ) from error
    own = schema["function"]
    if not own.get("description"):
        raise UserError(f"{where}: its docstring does not say what the tool does.")
    return Tool(name, function, {**schema, "function": {**own, "name": name}})


def served_tool(
    name: str,
    description: str | None,
    parameters: Mapping[str, Any],
    call: Callable[..., Any],
) -> Tool:
    """Returns a tool that a server has described with a JSON schema of its arguments."""
    own = {"name": name, "description": description or "", "parameters": dict(parameters)}
    return Tool(name, call, {"type": "function", "function": own})


def calls_of(message: Message) -> list[Mapping[str, Any]]:
    """Returns the calls of a message: [{"type": "function", "function": {...}}]."""
    return [c for c in message.get("tool_calls") or () if isinstance(c.get("function"), Mapping)]


def name_of(call: Mapping[str, Any]) -> str:
    """Returns the name of the tool that is called."""
    return str(call["function"].get("name"))


def failure(text: str) -> str:
    """Returns the answer of a call that failed: `{"error": "..."}`."""
    return json.dumps({"error": clean_text(text, 2000)}, ensure_ascii=False)


def as_text(result: Any) -> str:
    """Returns a tool's result as text: a string as it is, anything else as JSON.

    A result that JSON does not know becomes `str(result)`, and bytes are read as UTF-8. A long
    text keeps its first and last characters, TEXT_LIMIT in all.
    """
    if isinstance(result, (bytes, bytearray, memoryview)):
        result = bytes(result[: 4 * TEXT_LIMIT]).decode("utf-8", "replace")
    if not isinstance(result, str):
        try:
            result = json.dumps(result, ensure_ascii=False, default=_builtin)
        except (TypeError, ValueError, RecursionError):
            result = str(result)
    return clean_text(result)


def _builtin(value: Any) -> Any:
    """Converts numpy's and torch's numbers and arrays, and sets; anything else to its text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    return str(value)


def clean_text(text: str, limit: int = TEXT_LIMIT) -> str:
    """Shortens a text and replaces what is no text: control characters, halves of surrogates."""
    return UNPRINTABLE.sub("\ufffd", shortened("".join([text]), limit))


def shortened(text: str, limit: int) -> str:
    """Returns at most about `limit` characters of a text: its beginning, a mark and its end."""
    if len(text) <= limit:
        return text
    head, tail = (limit + 1) // 2, limit // 2
    left_out = len(text) - head - tail
    return f"{text[:head]}\n[... {left_out} characters left out ...]\n{text[len(text) - tail :]}"


def converted(value: Any, schema: Any) -> Any:
    """Converts a text to a type of the schema that is not text, as transformers does: "7" to 7.

    What cannot be converted is returned as it is, and is then refused by the schema.
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
    raise ValueError(f"{text} is no number in JSON")


def types_of(schema: Any) -> list[str]:
    """Returns the types that a JSON schema allows, in their order; [] where it names none."""
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
    """Returns the name that JSON schemas have for a value's type."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    if type(value) in names:
        return names[type(value)]
    return "array" if isinstance(value, (list, tuple)) else "object"


def checkable(schema: Any) -> Any:
    """Returns a schema that jsonschema checks as transformers means it.

    transformers writes `nullable`, which is OpenAPI's word for a type or null, and has types
    for images and audio, which JSON does not know.
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
