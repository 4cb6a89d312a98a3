"""Adapts users' environments to one interface: classes of two protocols, and MCP servers.

The protocol of a class is recognised by its methods:

    protocol      methods                                        the model's turn
    ours          reset(row, seed), step(message)                a message, passed to `step`
    TRL's         reset(**row), public methods, get_reward()     calls of the public methods

A string that TRL's `reset` returns is a user message. The loop appends a single such message to
the last user message of the prompt, as TRL does.

Runs in the worker process of a session (`session_worker.py`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
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

from grpo_cli.config.user_code import import_module, is_coroutine_function
from grpo_cli.environments.deadlines import Deadlines, result_of
from grpo_cli.environments.functions import (
    Functions,
    Tool,
    calls_of,
    clean_text,
    load_tools,
    make_tool,
    name_of,
)
from grpo_cli.environments.protocol import Message, Observation, ToolCall
from grpo_cli.environments.settings import EnvironmentSettings
from grpo_cli.errors import UserError, listed, nearest
from grpo_cli.scoring.guards import blame, described
from grpo_cli.scoring.pool_worker import to_builtin

NAME_COLUMN = "environment"  # the column that names the environment of a row
NO_TOOLS = ("reset", "get_reward", "close")  # public methods of TRL's classes that are not tools
NO_TURN_YET = "and the model has taken no turn yet"


class Broken(Exception):  # noqa: N818
    """An environment violated the protocol; the message says how."""


@dataclass
class Spec(EnvironmentSettings):
    """The recipe's `environment` and `tools`, as worker processes receive them."""

    tools: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_state(self) -> bool:
        """Whether environments have state. Tools alone have none, and run in any worker."""
        return bool(self.path or self.by_name or self.mcp)

    @property
    def names(self) -> list[str]:
        """The names of the environments; [""] if there is only one."""
        return list(self.by_name) or [""]


class Maker:
    """Makes the environments of one worker; imports their classes and tools once."""

    def __init__(self, spec: Spec, deadlines: Deadlines | None = None) -> None:
        self.spec, self.deadlines = spec, deadlines or Deadlines()
        self._found: dict[str, tuple[str, Callable[..., Any], Mapping[str, Any]]] = {}
        self._shared: dict[str, Any] = {}  # connections shared by rollouts

    @functools.cached_property
    def tools(self) -> dict[str, Tool]:
        """The recipe's tools."""
        return load_tools(self.spec.tools)

    def preload(self) -> None:
        """Imports the classes and tools, and the client of an MCP server.

        Raises:
            UserError: one of them cannot be used.
        """
        _ = self.tools
        if self.spec.mcp:
            from grpo_cli.environments import mcp  # noqa: F401
        for name in self.spec.names if self.spec.path or self.spec.by_name else ():
            where, call, _ = self._class(name)
            if inspect.isclass(call) and manner_of(call, where) == "trl":
                methods_of(call, where)  # type: ignore[arg-type]

    async def close(self) -> None:
        """Closes the connections that rollouts share."""
        for shared in list(self._shared.values()):
            if hasattr(shared, "close"):
                await shared.close()

    def make(self, name: str) -> Adapted:
        """Returns a fresh environment.

        Args:
            name: key in `environment.by_name`; "" if there is only one environment.

        Raises:
            UserError: the class does not exist or is not an environment, or an argument is unknown.
        """
        functions = Functions(self.tools, self.deadlines)
        if self.spec.mcp:
            from grpo_cli.environments.mcp import McpTools

            check_args(self.spec.args, McpTools.__init__, "environment.mcp has", keyword_only=True)
            return McpTools(self.spec.mcp, functions, self._shared, **self.spec.args)
        if not self.spec.has_state:
            return Adapted(None, functions)
        where, call, args = self._class(name)
        if is_coroutine_function(call):
            from grpo_cli.environments.rollout_function import RolloutFunction

            return RolloutFunction(call, args, functions)
        try:
            given = call(**args)
        except UserError:
            raise
        except Exception as error:
            raise Broken(f"{where}: its constructor raised {blame(error)}") from error
        if manner_of(type(given), where) == "ours":
            return MessageEnvironment(given, functions)
        methods = methods_of(type(given), where)  # type: ignore[arg-type]
        bound = {n: replace(t, function=getattr(given, n)) for n, t in methods.items()}
        return TrlEnvironment(given, functions.joined(bound, where), bool(self.spec.by_name))

    def _class(self, name: str) -> tuple[str, Callable[..., Any], Mapping[str, Any]]:
        """Imports a user's class of environments, or a function that returns one.

        Returns:
            (the key and the value that name it, for messages; the class; its arguments).

        Raises:
            UserError: the class does not exist, or does not take the arguments.
        """
        if name in self._found:
            return self._found[name]
        by_name = self.spec.by_name
        args: Mapping[str, Any] = self.spec.args
        key, path = "environment.path", str(self.spec.path)
        if by_name:
            if name not in by_name:
                raise UserError(
                    f"the column {NAME_COLUMN}: there is no environment {name!r}; "
                    f"environment.by_name has {listed(by_name)}.{nearest(name, by_name)}"
                )
            key, path = f"environment.by_name.{name}", by_name[name]
            if unknown := [n for n in args if n not in by_name]:
                raise UserError(
                    f"environment.args.{unknown[0]}: there is no environment {unknown[0]!r}; "
                    f"environment.by_name has {listed(by_name)}.{nearest(unknown[0], by_name)}"
                )
            args = args.get(name, {})
            if not isinstance(args, Mapping):
                raise UserError(
                    f"environment.args.{name}: {described_value(args)} is no mapping; give the "
                    f"arguments of the environment {name!r} by name."
                )
        where = f"{key} = {path}"
        if ":" not in path:
            raise UserError(f"{where}: is no class; give it as my_module:MyClass.")
        module_name, _, attribute = path.partition(":")
        module = import_module(module_name, where)
        if not callable(call := getattr(module, attribute, None)):
            there = [n for n, v in vars(module).items() if inspect.isclass(v) and n[0] != "_"]
            hint = nearest(attribute, there)
            raise UserError(f"{where}: {module_name} has no class {attribute!r}.{hint}")
        if inspect.isclass(call):
            manner_of(call, where)
        check_args(args, call, f"{path} takes")
        if is_coroutine_function(call):
            try:
                inspect.signature(call).bind(None, **args)
            except TypeError as error:
                raise UserError(
                    f"{where}: a rollout function must take a conversation, and nothing else that "
                    f"environment.args does not give ({error})."
                ) from error
        self._found[name] = where, call, dict(args)
        return self._found[name]


def check_args(
    args: Mapping[str, Any], call: Callable[..., Any], who: str, *, keyword_only: bool = False
) -> None:
    """Raises a UserError if a class or function does not take an argument of environment.args."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):  # its parameters cannot be read
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY or not keyword_only]
    if unknown := [name for name in args if name not in known]:
        raise UserError(
            f"environment.args.{unknown[0]}: {who} no such argument; it {who.rpartition(' ')[2]} "
            f"{listed(known)}.{nearest(unknown[0], known)}"
        )


@functools.cache
def methods_of(cls: type, where: str) -> dict[str, Tool]:
    """Returns the public methods of a TRL class as tools, by name.

    They are looked up on the class, since an attribute of an object may be a property with side
    effects. Class methods and static methods are included.
    """
    methods = dict(inspect.getmembers(cls, lambda m: inspect.isfunction(m) or inspect.ismethod(m)))
    public = [n for n in methods if not n.startswith("_") and n not in NO_TOOLS]
    return {n: make_tool(methods[n], n, f"{where}, method {n}") for n in public}


def manner_of(cls: type, where: str) -> Literal["ours", "trl"]:
    """Returns the protocol of a class.

    A TRL class may have a tool named `step`; its parameters distinguish it from our `step`.

    Raises:
        UserError: the class follows neither protocol.
    """
    reset, step = (
        getattr(cls, n, None) if callable(getattr(cls, n, None)) else None
        for n in ("reset", "step")
    )
    if reset is not None:
        takes_message = step is not None and names_of(step)[:1] == ["message"]
        if step is not None and (takes_message or names_of(reset)[:1] == ["row"]):
            return "ours"
        return "trl"
    raise UserError(
        f"{where}: {cls.__name__} has no method reset; an environment has reset(row, seed) and "
        "step(message), or reset(**row) and public methods as tools (TRL)."
    )


def names_of(function: Any) -> list[str]:
    """Returns the names of a function's parameters, without self, *args and **kwargs."""
    with contextlib.suppress(TypeError, ValueError):
        found = inspect.signature(function).parameters.values()
        named = [p.name for p in found if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        return [n for n in named if n != "self"]
    return []


def accepted(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that match a function's parameters."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(given)
    return {name: given[name] for name in names_of(function) if name in given}


class Adapted:
    """An environment as sessions use it. This base class has the recipe's tools only."""

    is_reusable = True  # whether the object can be reset for another episode

    def __init__(self, given: Any, functions: Functions) -> None:
        """Makes an environment.

        Args:
            given: the user's object, or None.
            functions: the tools that the model may call.
        """
        self.given, self.functions = given, functions

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """The JSON schemas of the tools that are known before `reset`."""
        return self.functions.schemas

    async def open(self) -> None:
        """Connects to a server that lists the tools, if there is one."""

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Begins an episode."""
        return Observation(tools=self.schemas)

    async def step(self, message: Message) -> Observation:
        """Answers the calls of a turn; a turn without a call ends the episode."""
        return await self.functions.step(message)

    async def finish(self) -> Observation:
        """Returns the rewards of the episode by name."""
        get_reward = getattr(self.given, "get_reward", None)
        if get_reward is None:
            return Observation()
        reward = await result_of(get_reward())
        if reward is None:
            return Observation()
        if not isinstance(reward, Mapping):
            reward = {type(self.given).__name__: reward}
        return Observation(
            rewards={str(k): checked(Number, v, f"its reward {k!r}") for k, v in reward.items()}
        )

    async def close(self) -> None:
        """Calls the object's `close`, if it has one."""
        close = getattr(self.given, "close", None)
        if close is not None:
            await result_of(close())


class MessageEnvironment(Adapted):
    """An environment of our own protocol; its optional attribute `tools` has JSON schemas."""

    is_reusable = False

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """The JSON schemas of the environment's tools and the recipe's."""
        tools = getattr(self.given, "tools", ())
        checked(list[_Tool], tools, "its tools")
        own: list[dict[str, Any]] = [to_builtin(tool) for tool in tools]
        names = [schema["function"]["name"] for schema in own]
        self.functions.check_names(names, type(self.given).__name__)
        return [*own, *self.functions.schemas]

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Begins an episode."""
        given = accepted(self.given.reset, {"row": dict(row), "seed": seed})
        first = observed(await result_of(self.given.reset(**given)))
        if first.done:
            raise Broken(f"it returned done=True, {NO_TURN_YET}")
        if first.reward is not None:
            raise Broken(f"it returned the reward {first.reward:g}, {NO_TURN_YET}")
        return first if first.tools else replace(first, tools=self.schemas)

    async def step(self, message: Message) -> Observation:
        """Answers the calls of the recipe's tools; passes other calls to the environment."""
        calls = calls_of(message)
        ours = [c for c in calls if name_of(c) in self.functions.tools]
        if not ours:
            return observed(await result_of(self.given.step(message)))
        answers = await self.functions.answer(ours)
        made = Observation([m for m, _ in answers], calls=[c for _, c in answers])
        if len(ours) == len(calls):
            return made
        rest = {**message, "tool_calls": [c for c in calls if c not in ours]}
        self.functions.deadlines.begin()
        own = observed(await result_of(self.given.step(rest)))
        return replace(
            own, messages=[*made.messages, *own.messages], calls=[*made.calls, *own.calls]
        )


class TrlEnvironment(Adapted):
    """An environment of TRL's protocol: its public methods are tools that the model may call."""

    def __init__(self, given: Any, functions: Functions, is_chosen: bool) -> None:
        """is_chosen: whether a column of the row names the environment; `reset` does not get it."""
        super().__init__(given, functions)
        self.is_chosen = is_chosen

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Begins an episode; a string that `reset` returns becomes a user message."""
        columns = {k: v for k, v in row.items() if not (self.is_chosen and k == NAME_COLUMN)}
        if "seed" in names_of(self.given.reset):
            columns.setdefault("seed", seed)
        missing = [
            p.name
            for p in inspect.signature(self.given.reset).parameters.values()
            if p.default is p.empty
            and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
            and p.name not in columns
        ]
        if missing:
            raise Broken(f"it takes {missing[0]!r}, and the data has {listed(columns)}")
        text = await result_of(self.given.reset(**accepted(self.given.reset, columns)))
        if text is None:
            return Observation(tools=self.schemas)
        content = checked(Text, text, "its text")
        return Observation([{"role": "user", "content": content}], tools=self.schemas)


# Checks of the values that environments return


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


class _Function(BaseModel, extra="allow"):
    name: str
    parameters: dict[str, Any]


class _Tool(BaseModel, extra="allow"):
    function: _Function


class _Observation(BaseModel, extra="forbid"):
    messages: list[_Message] = []
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
    messages = [m.model_dump(exclude_none=True) for m in found.messages]
    tools = [to_builtin(tool) for tool in given.get("tools", ())]
    return Observation(**{**dict(found), "messages": messages, "tools": tools})


def as_messages(messages: Any) -> list[Message]:
    """Checks messages of an environment, and returns them with their content cleaned."""
    found = checked(list[_Message], messages, "its messages")
    return [m.model_dump(exclude_none=True) for m in found]


def described_value(value: Any) -> str:
    """Returns a short repr of a value, even if its __repr__ raises."""
    try:
        return clean_text(repr(value), 200)
    except Exception as error:
        return f"a {type(value).__name__} ({described(error)})"
