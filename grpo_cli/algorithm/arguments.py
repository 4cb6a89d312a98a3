"""Checks what a recipe gives its policy loss and its advantage rule, before a model is loaded.

The functions declare their tensors, knobs and arguments in their signatures (`variants.py`).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Any

from grpo_cli.algorithm import advantages as advantages  # fills RULES
from grpo_cli.algorithm import losses as losses  # fills POLICY
from grpo_cli.algorithm.variants import (
    POLICY,
    RULES,
    find,
    knobs_read,
    own_arguments,
    parameters,
    traits_of,
)
from grpo_cli.config.knob import as_written, value_at, violation
from grpo_cli.config.parsing import unread
from grpo_cli.config.recipe import Recipe
from grpo_cli.errors import UserError, listed, nearest

TENSORS = {  # inputs that a function may name
    "loss.policy": (
        "log_ratio", "ratio", "logprobs", "advantages", "mask", "trained", "log_correction",
        "cov_selected",
    ),
    "advantage.rule": ("rewards", "parts", "weights", "lengths"),
}  # fmt: skip


def problems(recipe: Recipe, given: Collection[str] = ()) -> Iterator[str]:
    """Yields the mistakes in a recipe's loss and rule; fills in their arguments' defaults.

    Args:
        given: full keys set on the command line, as for `parsing.parse`.
    """
    checks = []
    for key, tensors in TENSORS.items():
        section, name = key.partition(".")[0], value_at(recipe, key)
        try:
            function = find(name, key)
        except UserError as error:
            yield str(error)
            continue
        if unknown := [t for t in parameters(function)[0] if t not in tensors]:
            yield (
                f"{key} = {name}: takes {unknown[0]!r}, which is not a tensor it can be given; "
                f"there are {listed(tensors)}."
            )
            continue
        yield from _unread(recipe, key, function, given)
        wrong = [*_argument_problems(recipe, section, name, function)]
        yield from wrong
        if (check := traits_of(function).check) is not None and not wrong:
            checks.append((check, section))
    yield from filter(None, (_asked(check, recipe, section) for check, section in checks))


def notices(recipe: Recipe) -> Iterator[str]:
    """Yields notices about settings that are allowed but have less effect than expected."""
    for key in TENSORS:
        notice = traits_of(find(value_at(recipe, key), key)).notice
        if notice is not None and (text := _asked(notice, recipe, key.partition(".")[0])):
            yield text


def _asked(function: Callable[..., str | None], recipe: Recipe, section: str) -> str | None:
    """Calls a trait's `check` or `notice` with the values that it names."""
    config, update = getattr(recipe, section), recipe.update
    values = {
        "num_generations": recipe.generation.num_generations,
        "dynamic_sampling": recipe.generation.dynamic_sampling,
        "kl_in_reward": recipe.needs_reference and recipe.loss.kl_in == "reward",
        "updates_per_step": update.num_iterations * update.minibatches,
        **vars(config),
        **config.args,
    }
    return function(**{n: values[n] for n in parameters(function)[1] if n in values})


def _unread(
    recipe: Recipe, key: str, function: Callable[..., Any], given: Collection[str]
) -> Iterator[str]:
    """Yields messages about knobs of the section that are set but not read by the function."""
    section = key.partition(".")[0]
    config = getattr(recipe, section)
    for f in dataclasses.fields(config):
        full = f"{section}.{f.name}"
        if f.name not in knobs_read(function) and (readers := readers_of(full)):
            when = f"with {key} = {' or '.join(readers)}; it is {value_at(recipe, key)}"
            yield from unread(recipe, full, getattr(type(config)(), f.name), given, when)


def readers_of(full: str) -> list[str]:
    """Returns the shipped losses or rules that read a knob, given by its full key."""
    section, _, name = full.partition(".")
    table = {"loss": POLICY, "advantage": RULES}.get(section, {})
    return [shipped for shipped, function in table.items() if name in knobs_read(function)]


def _argument_problems(
    recipe: Recipe, section: str, name: str, function: Callable[..., Any]
) -> Iterator[str]:
    config, prefix = getattr(recipe, section), f"{section}.args"
    known = own_arguments(function, config)
    there = f"it has {listed(known)}" if known else "it has none"
    for arg in config.args:
        if arg not in known:
            yield f"{prefix}.{arg}: {name} has no such argument; {there}.{nearest(arg, known)}"
    defaults = {arg: own.default for arg, own in known.items()}
    unset = (inspect.Parameter.empty, None)
    values = {k: v for k, v in defaults.items() if v not in unset} | config.args
    for arg, own in known.items():
        key = f"{prefix}.{arg}"
        if arg not in values:
            if own.default is not None:
                yield f"{key}: is missing; {name} has no default for it."
            continue
        if own.kind is float and type(values[arg]) is int:
            values[arg] = float(values[arg])
        value = values[arg]
        has_type = type(value) is own.kind or (value is None and own.is_optional)
        if own.kind in (float, int, bool, str) and not has_type:
            yield f"{key} = {as_written(value)}: must be of type {own.kind.__name__}."
            continue
        yield from violation(key, value, vars(own.arg))
    if all(arg in known for arg in config.args):
        config.args = values
