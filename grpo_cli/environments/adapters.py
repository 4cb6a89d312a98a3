"""Adapts users' environments to one interface: classes of two protocols.

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
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from grpo_cli.environments.deadlines import result_of
from grpo_cli.environments.functions import Functions, calls_of, name_of
from grpo_cli.environments.observations import Broken, Number, Text, checked, observed, schemas_of
from grpo_cli.environments.protocol import Message, Observation
from grpo_cli.environments.settings import NAME_COLUMN
from grpo_cli.errors import listed

NO_TURN_YET = "and the model has taken no turn yet"


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
