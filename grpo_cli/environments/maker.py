"""Makes the environments of a worker: imports what the recipe names, and adapts its objects."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from grpo_cli.config.user_code import import_module, is_coroutine_function
from grpo_cli.environments.adapters import Adapted, MessageEnvironment, TrlEnvironment, names_of
from grpo_cli.environments.deadlines import Deadlines
from grpo_cli.environments.functions import Functions, Tool, load_tools, make_tool
from grpo_cli.environments.observations import Broken, described_value
from grpo_cli.environments.rollout_function import RolloutFunction
from grpo_cli.environments.settings import NAME_COLUMN, EnvironmentSettings
from grpo_cli.errors import UserError, listed, nearest
from grpo_cli.scoring.guards import blame

NO_TOOLS = ("reset", "get_reward", "close")  # public methods of TRL's classes that are not tools


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
