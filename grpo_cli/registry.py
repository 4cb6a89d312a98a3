"""The reward functions that are known by name, and what each takes."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpo_cli.rewards
from grpo_cli.errors import UserError, listed, nearest

# A value for each completion: a number, None where it does not apply, or its steps' rewards.
RewardFunction = Callable[..., Sequence[float | list[tuple[int, float]] | None]]

# What every function is called with besides the columns (TRL's calling convention).
STANDARD = (
    "prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra",
)  # fmt: skip


@dataclass(frozen=True)
class TrainerState:
    """Where a run stands, as reward functions see it (transformers' names)."""

    global_step: int = 0  # steps done
    max_steps: int = 0  # of the whole run
    epoch: float = 0.0  # passes over the data, in parts


def shipped() -> dict[str, str]:
    """Short name -> dotted path of each reward that comes with the tool."""
    return {
        module.name: f"grpo_cli.rewards.{module.name}:{module.name}"
        for module in pkgutil.iter_modules(grpo_cli.rewards.__path__)
        if not module.name.startswith("_")
    }


def known() -> dict[str, str]:
    """Short name -> dotted path of what ships and what `@reward` has named so far."""
    return {**grpo_cli.rewards.REGISTERED, **shipped()}


def import_modules(names: Iterable[str], key: str) -> None:
    """Imports the user's modules, so that their `@reward` functions have short names.

    Raises:
        UserError: a module cannot be imported, or names a function as a shipped one.
    """
    for name in names:
        _import(name, f"{key}: {name}")
    for name, path in grpo_cli.rewards.REGISTERED.items():
        if shipped().get(name, path) != path:
            raise UserError(
                f"{key}: {path} is called {name!r}, as a reward that ships is; "
                "give it another name, as in @reward(name=...)."
            )


def resolve(name: str, key: str = "reward") -> RewardFunction:
    """The function of a short name or of `package.module:function`.

    Raises:
        UserError: no such name, module or function.
    """
    path = path_of(name, key)
    module_name, _, attribute = path.partition(":")
    module = _import(module_name, f"{key} = {name}")
    function = getattr(module, attribute, None)
    if not callable(function):
        there = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise UserError(
            f"{key} = {name}: {module_name} has no function {attribute!r}."
            + nearest(attribute, there)
        )
    return function  # type: ignore[no-any-return]


def full_name(name: str) -> str:
    """`module:function` of a short name; what is none stays as it is."""
    return known().get(name, name)


def path_of(name: str, key: str = "reward") -> str:
    """`module:function` of a short name, or of what is one already.

    Raises:
        UserError: no such name.
    """
    path = full_name(name)
    if ":" not in path:
        raise UserError(
            f"{key}: there is no reward {name!r}; there are {listed(known())}, or write your own "
            f"as my_package.my_module:function.{nearest(name, known())}"
        )
    return path


def _import(module: str, where: str) -> Any:
    if os.getcwd() not in sys.path:  # the console script does not put the working directory there
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # the user's module may raise anything on import
        raise UserError(
            f"{where}: cannot import {module}: {type(error).__name__}: {error}"
        ) from error


@dataclass(frozen=True)
class Signature:
    """What a reward function takes besides `STANDARD`.

    Positional parameters are columns of the data set, required unless they have a default;
    keyword-only ones (after a `*`) are the recipe's to set, and no column of that name fills them.
    """

    standard: tuple[str, ...]  # those of STANDARD that it names
    needed_standard: tuple[str, ...]  # and of these, those without a default
    required: tuple[str, ...]  # columns
    optional: tuple[str, ...]  # columns
    needed: tuple[str, ...]  # arguments without a default
    arguments: tuple[str, ...]
    open_ended: bool  # **kwargs, unless it is called _: takes every other column too

    @classmethod
    def of(cls, function: RewardFunction) -> Signature:
        standard: list[str] = []
        needed_standard: list[str] = []
        required: list[str] = []
        optional: list[str] = []
        needed: list[str] = []
        arguments: list[str] = []
        open_ended = False
        for name, p in inspect.signature(function).parameters.items():
            if p.kind is p.VAR_KEYWORD:
                open_ended = not name.startswith("_")
            elif name in STANDARD:
                standard.append(name)
                if p.default is p.empty:
                    needed_standard.append(name)
            elif p.kind is p.KEYWORD_ONLY:
                arguments.append(name)
                if p.default is p.empty:
                    needed.append(name)
            elif p.kind is not p.VAR_POSITIONAL:
                (required if p.default is p.empty else optional).append(name)
        return cls(
            tuple(standard),
            tuple(needed_standard),
            tuple(required),
            tuple(optional),
            tuple(needed),
            tuple(arguments),
            open_ended,
        )

    @property
    def named(self) -> tuple[str, ...]:
        """Everything a recipe may set: all but what **kwargs would swallow."""
        return self.required + self.optional + self.arguments

    def takes(self, name: str) -> bool:
        """Whether a column of this name is passed."""
        is_column = name in self.required + self.optional
        return is_column or (self.open_ended and name not in self.arguments)

    def takes_standard(self, name: str) -> bool:
        """Whether it is called with this one of STANDARD."""
        return name in self.standard or self.open_ended
