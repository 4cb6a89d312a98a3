"""Finds the policy loss and the advantage rule that a recipe names, and checks their knobs.

Each is named as a shipped function or `my_module:my_function`. The knobs are checked before a model
is loaded, apart from other knobs, since the functions' signatures declare names and ranges.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor

# Imported because they fill the tables.
from grpo_cli.algorithm import advantages as advantages
from grpo_cli.algorithm import losses as losses
from grpo_cli.algorithm.variants import (
    POLICY,
    RULES,
    OwnArgument,
    knobs_read,
    own_arguments,
    parameters,
    traits_of,
)
from grpo_cli.config.knob import as_written, scheduled_violation, violation
from grpo_cli.config.parsing import unread
from grpo_cli.config.schedules import at_step, steps_to_check
from grpo_cli.config.schema import Advantage, Loss, Recipe
from grpo_cli.config.user_code import import_function
from grpo_cli.errors import UserError, listed, nearest

TENSORS = {  # inputs that a function may name
    "loss.policy": (
        "log_ratio", "ratio", "logprobs", "advantages", "mask", "trained", "log_correction",
        "cov_selected",
    ),
    "advantage.rule": ("rewards", "parts", "weights", "lengths"),
}  # fmt: skip


def loss_function(config: Loss) -> Callable[..., Tensor]:
    """Returns the policy loss that `loss.policy` names.

    Raises:
        UserError: there is no such loss, module or function.
    """
    return _find(config.policy, "loss.policy")


def rule_function(config: Advantage) -> Callable[..., Tensor]:
    """Returns the advantage rule that `advantage.rule` names.

    Raises:
        UserError: there is no such rule, module or function.
    """
    return _find(config.rule, "advantage.rule")


@lru_cache
def _find(name: str, key: str) -> Callable[..., Tensor]:
    table = POLICY if key == "loss.policy" else RULES
    if name in table:
        return table[name]
    if ":" not in name:
        raise UserError(
            f"{key} = {name!r}: must be one of {', '.join(table)}, or a function of yours as "
            f"my_module:my_function.{nearest(name, table)}"
        )
    return import_function(name, f"{key} = {name}")


def problems(recipe: Recipe, given: Collection[str] = ()) -> Iterator[str]:
    """Yields the mistakes in a recipe's loss and rule; fills in their arguments' defaults.

    Args:
        given: full keys set on the command line, as for `parsing.parse`.
    """
    found = []
    for key in ("loss.policy", "advantage.rule"):
        section = key.partition(".")[0]
        config = getattr(recipe, section)
        name = value = getattr(config, key.partition(".")[2])
        try:
            function = _find(value, key)
        except UserError as error:
            yield str(error)
            continue
        if unknown := [t for t in parameters(function)[0] if t not in TENSORS[key]]:
            yield (
                f"{key} = {name}: takes {unknown[0]!r}, which is no tensor it can be given; there "
                f"are {listed(TENSORS[key])}."
            )
            continue
        yield from _unread(recipe, key, function, given)
        wrong = list(_argument_problems(recipe, section, name, own_arguments(function, config)))
        yield from wrong
        if not wrong:
            found.append((function, section))
    yield from _contradictions(recipe, found)


def notices(recipe: Recipe) -> Iterator[str]:
    """Yields notices about settings that are allowed but have less effect than expected."""
    for function in (loss_function(recipe.loss), rule_function(recipe.advantage)):
        section = "loss" if function is loss_function(recipe.loss) else "advantage"
        if (notice := traits_of(function).notice) is not None:
            text = notice(**_named_by(notice, values_of(recipe, section)))
            if text:
                yield text


def values_of(recipe: Recipe, section: str) -> dict[str, Any]:
    """Returns the values that a `check` or a `notice` may name besides its section's fields."""
    config, update = getattr(recipe, section), recipe.update
    return {
        "num_generations": recipe.generation.num_generations,
        "dynamic_sampling": recipe.generation.dynamic_sampling,
        "kl_in_reward": recipe.needs_reference and recipe.loss.kl_in == "reward",
        "updates_per_step": update.num_iterations * update.minibatches,
        **vars(config),
        **config.args,
    }


def _named_by(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in parameters(function)[1]}


def _contradictions(recipe: Recipe, found: list[tuple[Callable[..., Any], str]]) -> Iterator[str]:
    checks = [(c, section) for f, section in found if (c := traits_of(f).check) is not None]
    for step in steps_to_check(recipe) if checks else ():
        now, _ = at_step(recipe, step)
        at = f" at step {step}" if recipe.schedules else ""
        said = [check(**_named_by(check, values_of(now, section))) for check, section in checks]
        if any(said):
            yield from (text.format(at=at) for text in said if text)
            return


def _unread(
    recipe: Recipe, key: str, function: Callable[..., Any], given: Collection[str]
) -> Iterator[str]:
    """Yields messages about knobs of the section that are set but not read by the function."""
    section, _, name = key.partition(".")
    config = getattr(recipe, section)
    read, defaults = knobs_read(function), type(config)()
    for f in dataclasses.fields(config):
        full = f"{section}.{f.name}"
        if f.name not in read and (readers := readers_of(full)):
            when = f"with {key} = {' or '.join(readers)}; it is {getattr(config, name)}"
            yield from unread(recipe, full, getattr(defaults, f.name), given, when)


def readers_of(full: str) -> list[str]:
    """Returns the shipped losses or rules that read a knob, given by its full key."""
    section, _, name = full.partition(".")
    table = {"loss": POLICY, "advantage": RULES}.get(section, {})
    return [shipped for shipped, function in table.items() if name in knobs_read(function)]


def _argument_problems(
    recipe: Recipe, section: str, name: str, known: Mapping[str, OwnArgument]
) -> Iterator[str]:
    config = getattr(recipe, section)
    prefix = f"{section}.args"
    empty = inspect.Parameter.empty
    there = f"it has {listed(known)}" if known else "it has none"
    scheduled = {
        key.removeprefix(f"{prefix}."): schedule
        for key, schedule in recipe.schedules.items()
        if key.startswith(f"{prefix}.")
    }
    for arg in dict.fromkeys([*config.args, *scheduled]):
        if arg not in known:
            yield (f"{prefix}.{arg}: {name} has no such argument; {there}.{nearest(arg, known)}")
    values = {arg: own.default for arg, own in known.items() if own.default is not empty}
    values |= config.args
    for arg, own in known.items():
        key = f"{prefix}.{arg}"
        if arg not in values:
            yield f"{key}: is missing; {name} has no default for it."
            continue
        if own.kind is float and isinstance(values[arg], int) and values[arg] is not True:
            values[arg] = float(values[arg])
        value = values[arg]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        has_type = type(value) is own.kind or (value is None and own.is_optional)
        if own.kind in (float, int, bool, str) and not has_type:
            yield f"{key} = {as_written(value)}: must be of type {own.kind.__name__}."
            continue
        yield from violation(key, value, own.metadata)
        if arg in scheduled:
            if not is_number:
                yield f"schedules.{key}: {key} = {as_written(value)} is no number."
            yield from scheduled_violation(key, scheduled[arg].to, own.metadata, own.kind)
    if all(arg in known for arg in config.args):
        config.args = values
