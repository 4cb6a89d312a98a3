"""Lets policy losses and advantage rules declare their needs in signatures and traits.

A loss or a rule is one pure function. Its positional parameters name its input tensors. Its
keyword-only parameters name the recipe's knobs that it reads: a field of `loss` or `advantage`, or
an argument of its own, `loss.args.NAME`, declared with its range:

    @policy_loss(metrics=(measure_gate,))
    def gated(ratio: Tensor, advantages: Tensor, *,
              slope: Annotated[float, Arg("Steepness of the gate.", gt=0)] = 2.0) -> Tensor: ...

All other properties of a loss or a rule are fields of its traits, so that nothing else branches on
its name.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from torch import Tensor

from grpo_cli.config.knob import Arg
from grpo_cli.config.user_code import import_function
from grpo_cli.errors import UserError, nearest

F = TypeVar("F", bound=Callable[..., Any])
POLICY: dict[str, Callable[..., Tensor]] = {}  # policy losses by name, in the order of losses.py
RULES: dict[str, Callable[..., Tensor]] = {}  # advantage rules by name


@dataclass(frozen=True)
class Traits:
    """The properties of a policy loss or an advantage rule.

    `metrics`, `select_tokens`, `check` and `notice` read knobs by keyword-only parameters, like the
    function itself. `check` and `notice` may also name the values that `arguments.py` gives them.
    """

    metrics: tuple[Callable[..., None], ...] = ()  # take metric_sums and tensors by name
    select_tokens: Callable[..., Tensor] | None = None  # (covariance, noise, *, knobs) -> [N] bool
    trains_without_advantage: bool = False  # has a gradient even where the advantage is 0
    one_gradient_per_completion: bool = False  # so step rewards would have no separate effect
    summands: Callable[..., Tensor] | None = None  # for a rule: its summands, [P, G, R], if
    # they are not the weighted reward of each function
    check: Callable[..., str | None] | None = None  # a contradiction
    notice: Callable[..., str | None] | None = None  # allowed, but with less effect than expected


def policy_loss(**traits: Any) -> Callable[[F], F]:
    """Declares a policy loss with its `Traits`; shipped losses are registered by name."""
    return _declare(POLICY, "grpo_cli.algorithm.losses", Traits(**traits))


def advantage_rule(name: str | None = None, **traits: Any) -> Callable[[F], F]:
    """Declares an advantage rule with its `Traits`, registered by `name` or the function's name."""
    return _declare(RULES, "grpo_cli.algorithm.advantages", Traits(**traits), name)


def _declare(
    table: dict[str, Callable[..., Tensor]], home: str, traits: Traits, name: str | None = None
) -> Callable[[F], F]:
    def declare(function: F) -> F:
        function.traits = traits  # type: ignore[attr-defined]
        if function.__module__ == home:  # a user's own function is named by its path
            table[name or function.__name__] = function
        return function

    return declare


@lru_cache
def find(name: str, key: str) -> Callable[..., Tensor]:
    """Returns the shipped or the user's own function that a recipe names under `key`.

    Raises:
        UserError: there is no such function or module.
    """
    table = POLICY if key == "loss.policy" else RULES
    if name in table:
        return table[name]
    if ":" not in name:
        raise UserError(
            f"{key} = {name!r}: must be one of {', '.join(table)}, or a function of yours as "
            f"my_module:my_function.{nearest(name, table)}"
        )
    return import_function(name, f"{key} = {name}")


def traits_of(function: Callable[..., Any]) -> Traits:
    """Returns a function's traits, or the defaults if it declares none."""
    traits: Traits = getattr(function, "traits", Traits())
    return traits


@lru_cache
def parameters(function: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns a function's parameter names as (positional, keyword-only)."""
    found = inspect.signature(function).parameters.values()
    return (
        tuple(p.name for p in found if p.kind is not p.KEYWORD_ONLY),
        tuple(p.name for p in found if p.kind is p.KEYWORD_ONLY),
    )


@dataclass(frozen=True)
class OwnArgument:
    """A keyword-only parameter of a function or its traits that is not a knob of the section."""

    kind: Any  # the annotated type without None; inspect.Parameter.empty if there is none
    is_optional: bool  # whether the annotation allows None
    default: Any  # inspect.Parameter.empty if the recipe must set it
    arg: Arg


def readers(function: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """Returns the functions that read knobs for a loss or a rule: itself and its traits'."""
    traits = traits_of(function)
    return (function, *traits.metrics, *([traits.select_tokens] if traits.select_tokens else []))


def knobs_read(function: Callable[..., Any]) -> set[str]:
    """Returns the names of all knobs and arguments that a loss or a rule reads."""
    names = {name for reader in readers(function) for name in parameters(reader)[1]}
    # A token selection compares tokens, so it needs the token-level ratio.
    if "ratio" in parameters(function)[0] and traits_of(function).select_tokens is None:
        names.add("ratio_level")
    return names


def own_arguments(function: Callable[..., Any], section: object) -> dict[str, OwnArgument]:
    """Returns the arguments that a recipe can set in `args`, by name.

    Args:
        section: the recipe's `loss` or `advantage`, whose fields are excluded.
    """
    out: dict[str, OwnArgument] = {}
    for reader in readers(function):
        try:
            hints = typing.get_type_hints(reader, include_extras=True)
        except Exception:  # names that a user's module imports for type checkers only
            hints = {}
        for name, p in inspect.signature(reader).parameters.items():
            if p.kind is not p.KEYWORD_ONLY or hasattr(section, name):
                continue
            hint = hints.get(name, p.empty)
            extras = getattr(hint, "__metadata__", ())
            arg = next((extra for extra in extras if isinstance(extra, Arg)), Arg())
            kind = getattr(hint, "__origin__", hint) if extras else hint
            types = [t for t in typing.get_args(kind) if t is not type(None)]
            is_optional = type(None) in typing.get_args(kind)
            kind = types[0] if is_optional and len(types) == 1 else kind
            found = OwnArgument(kind, is_optional, p.default, arg)
            if name not in out or out[name].default is p.empty:
                out[name] = found
    return out


def apply(function: Callable[..., Any], tensors: Mapping[str, Any], settings: object) -> Any:
    """Calls `function` with the tensors and the knobs that its parameters name.

    Args:
        settings: holds the knobs as attributes, and the function's own arguments in `args`.

    Raises:
        KeyError, TypeError: no such tensor or knob.
    """
    positional, _ = parameters(function)
    return function(*(tensors[name] for name in positional), **knob_values(function, settings))


def knob_values(function: Callable[..., Any], settings: object) -> dict[str, Any]:
    """Returns a function's keyword arguments; those that the settings lack keep their defaults."""
    known = {**vars(settings), **getattr(settings, "args", {})}
    return {name: known[name] for name in parameters(function)[1] if name in known}
