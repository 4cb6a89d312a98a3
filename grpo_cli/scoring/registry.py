"""Finds reward functions by name or dotted path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import grpo_cli.rewards
from grpo_cli.config.user_code import import_function, import_module
from grpo_cli.errors import UserError, listed, nearest
from grpo_cli.rewards import shipped

# A value per completion: a number, None where the function does not apply, or step rewards.
RewardFunction = Callable[..., Sequence[float | list[tuple[int, float]] | None]]


def known() -> dict[str, str]:
    """Returns short name -> dotted path of the shipped and the `@reward` functions."""
    return {**grpo_cli.rewards.REGISTERED, **shipped()}


def import_modules(names: Iterable[str], key: str) -> None:
    """Imports the user's modules, which registers the short names of their `@reward` functions.

    Raises:
        UserError: a module cannot be imported, or a function has the name of a shipped reward.
    """
    for name in names:
        import_module(name, f"{key}: {name}")
    for name, path in grpo_cli.rewards.REGISTERED.items():
        if shipped().get(name, path) != path:
            raise UserError(
                f"{key}: {path} is called {name!r}, as a reward that ships is; "
                "give it another name, as in @reward(name=...)."
            )


def resolve(name: str, key: str = "reward") -> RewardFunction:
    """Imports the function of a short name or of `package.module:function`.

    Raises:
        UserError: there is no such name, module or function.
    """
    return import_function(path_of(name, key), f"{key} = {name}")


def full_name(name: str) -> str:
    """Expands a short name to `module:function`; returns other strings unchanged."""
    return known().get(name, name)


def path_of(name: str, key: str = "reward") -> str:
    """Expands a short name or a dotted path to `module:function`.

    Raises:
        UserError: there is no such name.
    """
    path = full_name(name)
    if ":" not in path:
        raise UserError(
            f"{key}: there is no reward {name!r}; there are {listed(known())}, or write your own "
            f"as my_package.my_module:function.{nearest(name, known())}"
        )
    return path
