"""Makes users' environments, and adapts them to one interface: classes of two protocols.

The protocol of a class is recognised by its methods:

    protocol      methods                                        the model's turn
    ours          reset(row, seed), step(message)                a message, passed to `step`
    TRL's         reset(**row), public methods, get_reward()     calls of the public methods

A string that TRL's `reset` returns is a user message. A single such message is appended to the last
user message of the prompt, as TRL does.

Runs in the worker process of a session (`session_worker.py`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from grpo_cli.config.user_code import import_module, is_coroutine_function
from grpo_cli.environments.deadlines import Deadlines, result_of
from grpo_cli.environments.functions import (
    Functions,
    Tool,
    calls_of,
    load_tools,
    make_tool,
    name_of,
)
from grpo_cli.environments.observations import (
    Broken,
    Number,
    Text,
    checked,
    described_value,
    observed,
    schemas_of,
)
from grpo_cli.environments.protocol import Message, Observation
from grpo_cli.environments.settings import NAME_COLUMN, EnvironmentSettings
from grpo_cli.errors import UserError, listed, nearest
from grpo_cli.scoring.guards import blame

NO_TOOLS = ("reset", "get_reward", "close")  # public methods of TRL's classes that are not tools
NO_TURN_YET = "and the model has taken no turn yet"


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
        self._class = functools.cache(self._find_class)
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

    def _find_class(self, name: str) -> tuple[str, Callable[..., Any], Mapping[str, Any]]:
        """Imports a user's class of environments, or a function that returns one.

        Returns:
            (the key and the value that name it, for messages; the class; its arguments).

        Raises:
            UserError: the class does not exist, or does not take the arguments.
        """
        by_name, args = self.spec.by_name, self.spec.args
        key, path = "environment.path", str(self.spec.path)
        if by_name:
            named = [(f"the column {NAME_COLUMN}", name)]
            named += [(f"environment.args.{used}", used) for used in args]
            for where, used in named:
                if used not in by_name:
                    raise UserError(
                        f"{where}: there is no environment {used!r}; environment.by_name has "
                        f"{listed(by_name)}.{nearest(used, by_name)}"
                    )
            key, path = f"environment.by_name.{name}", by_name[name]
            args = args.get(name, {})
            if not isinstance(args, Mapping):
                raise UserError(
                    f"environment.args.{name}: {described_value(args)} is not a mapping; give the "
                    f"arguments of the environment {name!r} by name."
                )
        where = f"{key} = {path}"
        if ":" not in path:
            raise UserError(f"{where}: is not a class; give it as my_module:MyClass.")
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
        return where, call, dict(args)


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
    reset, step = (getattr(cls, name, None) for name in ("reset", "step"))
    if not callable(reset):
        raise UserError(
            f"{where}: {cls.__name__} has no method reset; an environment has reset(row, seed) and "
            "step(message), or reset(**row) and public methods as tools (TRL)."
        )
    takes_message = callable(step) and names_of(step)[:1] == ["message"]
    takes_row = callable(step) and names_of(reset)[:1] == ["row"]
    return "ours" if takes_message or takes_row else "trl"


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
        reward = None if get_reward is None else await result_of(get_reward())
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
        own = schemas_of(getattr(self.given, "tools", ()))
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
        made = await self.functions.answer(ours)
        if len(ours) == len(calls):
            return made
        rest = {**message, "tool_calls": [c for c in calls if c not in ours]}
        self.functions.deadlines.begin()
        own = observed(await result_of(self.given.step(rest)))
        answers, more = iter(made.messages), [m for m in own.messages if m["role"] != "tool"]
        theirs = iter([m for m in own.messages if m["role"] == "tool"])
        answered = filter(None, [next(answers if c in ours else theirs, None) for c in calls])
        return replace(own, messages=[*answered, *theirs, *more], calls=[*made.calls, *own.calls])


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
        text = await result_of(self.given.reset(**accepted(self.given.reset, columns)))
        if text is None:
            return Observation(tools=self.schemas)
        content = checked(Text, text, "its text")
        return Observation([{"role": "user", "content": content}], tools=self.schemas)


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
