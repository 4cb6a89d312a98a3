"""Finds reward functions by name or dotted path, and inspects their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpo_cli.rewards
from grpo_cli.config.user_code import import_function, import_module
from grpo_cli.errors import UserError, listed, nearest
from grpo_cli.rewards import shipped

# A value per completion: a number, None where the function does not apply, or step rewards.
RewardFunction = Callable[..., Sequence[float | list[tuple[int, float]] | None]]

# Arguments that any function may take besides the columns (TRL's calling convention).
STANDARD = (
    "prompts", "completions", "completion_ids", "episodes", "trainer_state", "log_metric",
    "log_extra",
)  # fmt: skip


@dataclass(frozen=True)
class TrainerState:
    """The run's progress, as passed to reward functions (with transformers' names)."""

    global_step: int = 0  # completed steps
    max_steps: int = 0  # steps of the complete run
    epoch: float = 0.0  # passes over the data, with fractions
    num_input_tokens_seen: int = 0  # prompt and completion tokens so far, over all processes
    best_metric: float | None = None  # best value of `eval.best`; None before an evaluation
    best_global_step: int | None = None  # step of the best metric
    log_history: list[dict[str, Any]] = field(default_factory=list)  # lines of metrics.jsonl


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


@dataclass(frozen=True)
class Signature:
    """The parameters of a reward function.

    Positional parameters are columns of the data set, required unless they have a default.
    Keyword-only parameters (after a `*`) are set by the recipe, never from a column.
    """

    standard: tuple[str, ...]  # parameters in STANDARD
    needed_standard: tuple[str, ...]  # parameters in STANDARD without a default
    required: tuple[str, ...]  # columns without a default
    optional: tuple[str, ...]  # columns with a default
    needed: tuple[str, ...]  # keyword-only parameters without a default
    arguments: tuple[str, ...]  # keyword-only parameters
    open_ended: bool  # has **kwargs, which receives every other column; **_ receives none

    @classmethod
    def of(cls, function: RewardFunction) -> Signature:
        """Reads a function's signature."""
        found = inspect.signature(function).parameters.values()
        passed = [p for p in found if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        standard = [p for p in passed if p.name in STANDARD]
        own = [p for p in passed if p.name not in STANDARD]
        arguments = [p for p in own if p.kind is p.KEYWORD_ONLY]
        columns = [p for p in own if p.kind is not p.KEYWORD_ONLY]
        required = _without_default(columns)
        return cls(
            standard=tuple(p.name for p in standard),
            needed_standard=_without_default(standard),
            required=required,
            optional=tuple(p.name for p in columns if p.name not in required),
            needed=_without_default(arguments),
            arguments=tuple(p.name for p in arguments),
            open_ended=any(p.kind is p.VAR_KEYWORD and p.name[0] != "_" for p in found),
        )

    @property
    def named(self) -> tuple[str, ...]:
        """The names that a recipe may set, without those that only **kwargs would accept."""
        return self.required + self.optional + self.arguments

    def takes(self, name: str) -> bool:
        """Returns whether a column of this name is passed to the function."""
        is_column = name in self.required + self.optional
        return is_column or (self.open_ended and name not in self.arguments)


def _without_default(parameters: Iterable[inspect.Parameter]) -> tuple[str, ...]:
    return tuple(p.name for p in parameters if p.default is p.empty)
