"""The rewards that ship with grpo: one plain function a file, named like the file.

A reward is called with keyword arguments, in TRL's convention: `prompts`, `completions`,
`completion_ids`, `episodes`, one list per dataset column, and the recipe's own arguments for it.
It returns one float per completion, or None where it does not apply. Parameters without a default
name the dataset columns it needs; keyword-only parameters with a default are its arguments; `**_`
says that it takes nothing else.

Nothing here imports from the rest of grpo_cli except `grpo_cli.sandbox`, which needs only Python.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

F = TypeVar("F", bound=Callable[..., Any])

# Short name -> dotted path of each function decorated with `@reward` in a module imported so far.
REGISTERED: dict[str, str] = {}


# Shipped rewards that compare final answers, so that completions can vote.
WITH_AN_ANSWER = ("math", "exact_match", "choice")


@dataclass(frozen=True)
class Traits:
    """Properties that a reward function declares; a recipe may change the timeout."""

    timeout: float | None = None
    cache: bool = False
    preload: tuple[str, ...] = ()
    describe: Callable[..., str] | None = None
    refuse: Callable[..., str] | None = None
    timeout_value: float | None = None
    positions: str = "characters"


@overload
def reward(function: F, /) -> F: ...


@overload
def reward(
    *,
    name: str | None = None,
    timeout: float | None = None,
    cache: bool | None = None,
    preload: Sequence[str] = (),
    describe: Callable[..., str] | None = None,
    refuse: Callable[..., str] | None = None,
    timeout_value: float | None = None,
    positions: str = "characters",
) -> Callable[[F], F]: ...


def reward(
    function: F | None = None,
    /,
    *,
    name: str | None = None,
    timeout: float | None = None,
    cache: bool | None = None,
    preload: Sequence[str] = (),
    describe: Callable[..., str] | None = None,
    refuse: Callable[..., str] | None = None,
    timeout_value: float | None = None,
    positions: str = "characters",
) -> F | Callable[[F], F]:
    """Registers a function under a short name, with the way in which it is to be called.

    Args:
        name: short name in recipes; the function's own unless given.
        timeout: seconds for one completion. With it the function is called with one completion at
            a time, in worker processes that are killed when they overrun.
        cache: whether the same completion of the same row always has the same reward, so that none
            is computed twice; by default it is if there is a timeout.
        preload: modules that a worker imports before the clock of its first completion starts.
        describe: called with the recipe's arguments; what the log says of the reward at the start.
        refuse: called with the columns of one row, its prompt as `prompts`, and the recipe's
            arguments, before the model is loaded; why no completion of the row can be scored, or
            "".
        timeout_value: value of a completion that overruns; None: the reward does not apply to it.
        positions: unit in which the function counts the ends of steps, "tokens" or "characters".
    """

    def register(function: F) -> F:
        path = f"{function.__module__}:{function.__qualname__}"
        known = REGISTERED.setdefault(name or function.__name__, path)
        if known != path:
            raise ValueError(
                f"{path} and {known} have one name; give one another, as in @reward(name=...)"
            )
        cached = timeout is not None if cache is None else cache
        traits = Traits(timeout, cached, tuple(preload), describe, refuse, timeout_value, positions)
        function.reward_traits = traits  # type: ignore[attr-defined]
        return function

    return register if function is None else register(function)


def traits_of(function: Callable[..., Any]) -> Traits:
    """Returns the traits that `@reward` gave a function; the defaults for an undecorated one."""
    traits = getattr(function, "reward_traits", None)
    return traits if isinstance(traits, Traits) else Traits()


def shipped() -> dict[str, str]:
    """Returns short name -> dotted path of each shipped reward."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return {name: f"grpo_cli.rewards.{name}:{name}" for name in names if name[0] != "_"}


def shipped_name(function: str) -> str | None:
    """Returns the short name of a shipped reward, given as such or as a path; else None."""
    name = function.rpartition(":")[2]
    return name if function in (name, shipped().get(name)) and name in shipped() else None


def has_votes(reward: str) -> bool:
    """Returns whether the reward of this name compares final answers, which can be voted on."""
    return shipped_name(reward) in WITH_AN_ANSWER
