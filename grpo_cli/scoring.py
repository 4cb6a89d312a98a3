"""Looks up the recipe's reward functions, calls them on a step's rollouts, and adds up."""

from __future__ import annotations

import bisect
import importlib
import inspect
import math
import numbers
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpo_cli.rewards
from grpo_cli.config import Reward
from grpo_cli.errors import TrainingError, UserError, listed, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_cli.rollouts import Rollout

# A value for each completion: a number, None where it does not apply, or its steps' rewards.
RewardFunction = Callable[..., Sequence[float | list[tuple[int, float]] | None]]

# What every function is called with besides the columns (TRL's calling convention).
STANDARD = ("prompts", "completions", "completion_ids")
LIMIT = "max_completion_tokens"  # an argument that follows the run, unless the recipe sets it


def shipped() -> dict[str, str]:
    """Short name -> dotted path of each reward that comes with the tool."""
    return {
        module.name: f"grpo_cli.rewards.{module.name}:{module.name}"
        for module in pkgutil.iter_modules(grpo_cli.rewards.__path__)
        if not module.name.startswith("_")
    }


def resolve(name: str, key: str = "reward") -> RewardFunction:
    """The function of a short name or of `package.module:function`.

    Raises:
        UserError: no such name, module or function.
    """
    path = shipped().get(name, name)
    module_name, colon, attribute = path.partition(":")
    if not colon:
        raise UserError(
            f"{key}: there is no reward {name!r}; there are {listed(shipped())}, or write your own "
            f"as my_package.my_module:function.{nearest(name, shipped())}"
        )
    if os.getcwd() not in sys.path:  # the console script does not put the working directory there
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything on import
        raise UserError(
            f"{key} = {name}: cannot import {module_name}: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        there = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise UserError(
            f"{key} = {name}: {module_name} has no function {attribute!r}."
            + nearest(attribute, there)
        )
    if inspect.iscoroutinefunction(function):
        raise UserError(f"{key} = {name}: is an async function; a reward is a plain one.")
    return function  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Signature:
    """What a reward function takes besides `STANDARD`.

    Positional parameters are columns of the data set, required unless they have a default;
    keyword-only ones (after a `*`) are the recipe's to set, and no column of that name fills them.
    """

    required: tuple[str, ...]  # columns
    optional: tuple[str, ...]  # columns
    arguments: tuple[str, ...]
    open_ended: bool  # **kwargs: takes every other column too

    @classmethod
    def of(cls, function: RewardFunction) -> Signature:
        required: list[str] = []
        optional: list[str] = []
        arguments: list[str] = []
        open_ended = False
        for name, p in inspect.signature(function).parameters.items():
            if p.kind is p.VAR_KEYWORD:
                open_ended = True
            elif name in STANDARD or p.kind is p.VAR_POSITIONAL:
                continue
            elif p.kind is p.KEYWORD_ONLY:
                arguments.append(name)
            else:
                (required if p.default is p.empty else optional).append(name)
        return cls(tuple(required), tuple(optional), tuple(arguments), open_ended)

    @property
    def named(self) -> tuple[str, ...]:
        """Everything but what **kwargs would swallow."""
        return self.required + self.optional + self.arguments

    def takes(self, name: str) -> bool:
        """Whether a column of this name is passed."""
        is_column = name in self.required + self.optional
        return is_column or (self.open_ended and name not in self.arguments)


@dataclass(frozen=True)
class _Term:
    function: RewardFunction
    weight: float
    args: Mapping[str, Any]
    signature: Signature
    standard: tuple[str, ...]  # those of STANDARD that it takes
    positions: str  # what it counts the ends of steps in

    def __call__(self, rollouts: Sequence[Rollout]) -> Any:
        chat = isinstance(rollouts[0].prompt.text, list)
        arguments: dict[str, Any] = {
            "prompts": [r.prompt.text for r in rollouts],
            "completions": [
                [{"role": "assistant", "content": r.text}] if chat else r.text for r in rollouts
            ],
            "completion_ids": [r.completion.ids for r in rollouts],
        }
        arguments = {name: arguments[name] for name in self.standard}
        for column in rollouts[0].prompt.columns:
            if column not in STANDARD and self.signature.takes(column):
                arguments[column] = [r.prompt.columns[column] for r in rollouts]
        return self.function(**{**arguments, **self.args})


class Scorer:
    """The recipe's rewards, ready to be called."""

    def __init__(
        self,
        rewards: Mapping[str, Reward],
        columns: Sequence[str],
        source: str,
        max_completion_tokens: int | None = None,
    ) -> None:
        """Resolves and checks every function.

        Args:
            rewards: the recipe's rewards by name.
            columns: what the data set offers; source: what it is called in messages.
            max_completion_tokens: the run's own limit, for functions with an argument of that name
                which the recipe does not set.

        Raises:
            UserError: an unknown function, an argument it does not take, a column the data lacks.
        """
        self.terms: dict[str, _Term] = {}
        for name, spec in rewards.items():
            function = resolve(spec.function, f"reward.{name}.function")
            signature = Signature.of(function)
            arguments = dict(spec.args)
            if LIMIT in signature.arguments and max_completion_tokens is not None:
                arguments.setdefault(LIMIT, max_completion_tokens)
            # **kwargs is there for columns; an argument that only it would take is a typo.
            for argument in spec.args:
                if argument not in signature.named:
                    raise UserError(
                        f"reward.{name}.args.{argument}: {spec.function} takes no such argument; "
                        f"it takes {listed(signature.named)}.{nearest(argument, signature.named)}"
                    )
            for argument, p in inspect.signature(function).parameters.items():
                if p.kind is p.KEYWORD_ONLY and p.default is p.empty and argument not in arguments:
                    raise UserError(
                        f"reward.{name}: {spec.function} needs the argument {argument!r}; set "
                        f"reward.{name}.args.{argument}."
                    )
            missing = [c for c in signature.required if c not in columns and c not in spec.args]
            if missing:
                raise UserError(
                    f"reward.{name}: {spec.function} needs the column {missing[0]!r}, which "
                    f"{source} lacks; it has {listed(columns)}. Rename one with "
                    f"dataset.columns.{missing[0]}=NAME."
                )
            given = inspect.signature(function).parameters
            standard = tuple(n for n in STANDARD if n in given or signature.open_ended)
            self.terms[name] = _Term(
                function, spec.weight, arguments, signature, standard, spec.positions
            )

    def score(
        self, rollouts: Sequence[Rollout], tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        """Fills in `reward_parts`, `step_rewards`, `outcome` and `reward` of each rollout.

        Args:
            tokenizer: finds the token of a character, where a function rewards steps by characters.

        Raises:
            TrainingError: a function raised, or returned something that is no list of numbers or
                steps; the message names the function, the row and the completion.
        """
        if not rollouts:
            return
        for name, term in self.terms.items():
            for rollout, value in zip(rollouts, _call(name, term, rollouts), strict=True):
                if isinstance(value, (list, tuple)):
                    steps = _steps(name, term, value, rollout, tokenizer)
                    rollout.step_rewards[name] = [(t, term.weight * v) for t, v in steps]
                    rollout.reward_parts[name] = math.fsum(v for _, v in steps)
                else:
                    rollout.reward_parts[name] = _number(name, value, rollout)
        for rollout in rollouts:
            applied = {
                name: self.terms[name].weight * value
                for name, value in rollout.reward_parts.items()
                if value is not None
            }
            outcomes = [v for name, v in applied.items() if name not in rollout.step_rewards]
            rollout.outcome = math.fsum(outcomes) if outcomes else math.nan
            rollout.reward = math.fsum(applied.values()) if applied else math.nan


def _call(name: str, term: _Term, rollouts: Sequence[Rollout]) -> Sequence[Any]:
    try:
        values = term(rollouts)
    except (Exception, SystemExit) as error:  # the user's code may do anything
        raise TrainingError(_blame(name, term, rollouts, error)) from error
    if not isinstance(values, Sequence) and hasattr(values, "tolist"):  # a tensor or an array
        values = values.tolist()
    if not isinstance(values, (list, tuple)) or len(values) != len(rollouts):
        got = f"{len(values)} values" if isinstance(values, (list, tuple)) else repr(values)
        raise TrainingError(
            f"reward {name!r} must return a list of {len(rollouts)} values, one a completion; "
            f"it returned {got}."
        )
    return values


def _number(name: str, value: Any, rollout: Rollout) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, str) or not math.isfinite(number):
        raise TrainingError(
            f"reward {name!r} returned {value!r}, which is not a finite number, a list of "
            f"(position, value) or None, for {_where(rollout)}"
        )
    return number


def _steps(
    name: str,
    term: _Term,
    steps: Sequence[Any],
    rollout: Rollout,
    tokenizer: PreTrainedTokenizerBase | None,
) -> list[tuple[int, float]]:
    """(token at which a step ends, value) of what a function that rewards steps has returned."""
    ids = rollout.completion.ids
    size = len(ids) if term.positions == "tokens" else len(rollout.text)
    out = []
    for step in steps:
        pair = isinstance(step, (list, tuple)) and len(step) == 2
        position, value = step if pair else (-1, None)
        whole = isinstance(position, numbers.Integral) and not isinstance(position, bool)
        if not whole or not 0 <= position < size:
            raise TrainingError(
                f"reward {name!r} returned the step {step!r}: must be (position of its last of "
                f"{size} {term.positions}, counted from 0; value), for {_where(rollout)}"
            )
        number, position = _number(name, value, rollout), int(position)
        if number is None:
            continue
        if term.positions == "characters":
            assert tokenizer is not None, "characters are found by the tokenizer"
            # What ends with the text ends with the completion: its eos is a part of the last step.
            at_end = position == size - 1
            position = len(ids) - 1 if at_end else token_of_character(ids, position, tokenizer)
        out.append((position, number))
    return out


def token_of_character(
    ids: Sequence[int], position: int, tokenizer: PreTrainedTokenizerBase
) -> int:
    """The token that writes the character at `position` of the decoded completion."""
    return bisect.bisect_right(
        range(len(ids) - 1),
        position,
        # A character of which some bytes are still to come decodes to a mark of its own.
        key=lambda t: len(
            tokenizer.decode(ids[: t + 1], skip_special_tokens=True).rstrip("\ufffd")
        ),
    )


def _blame(
    name: str, term: _Term, rollouts: Sequence[Rollout], error: Exception | SystemExit
) -> str:
    """Calls the function again row by row to find the completion at which it raises."""
    where = "some completion of the batch (not one by itself)"
    for rollout in rollouts:
        try:
            term([rollout])
        except (Exception, SystemExit) as single:
            error, where = single, _where(rollout)
            break
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"reward {name!r} raised {type(error).__name__}: {error}{place}, for {where}"


def _where(rollout: Rollout) -> str:
    text = rollout.text if len(rollout.text) <= 300 else rollout.text[:297] + "..."
    return f"row {rollout.prompt.row}, completion {text!r}"
