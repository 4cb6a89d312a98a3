"""Makes the callbacks of a recipe, and finds the mistakes in them before a model is loaded."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

from grpo_cli.config.schema import Callback
from grpo_cli.config.user_code import import_function, is_coroutine_function
from grpo_cli.errors import UserError, listed, nearest
from grpo_cli.training.callbacks import HOOKS, Loaded

# The hooks of transformers' TrainerCallback that have a counterpart.
OTHER_NAMES = {
    "on_step_end": "on_step",
    "on_log": "on_step",
    "on_save": "on_checkpoint",
    "on_train_end": "on_end",
}


def load(configs: Mapping[str, Callback]) -> list[Loaded]:
    """Imports the classes of a recipe's callbacks and makes their objects.

    Raises:
        UserError: there is no such class, it has no hook or one that does not exist, or it cannot
            be made with its arguments.
    """
    return [load_one(name, config) for name, config in configs.items()]


def load_one(name: str, config: Callback) -> Loaded:
    """Makes one callback; see `load`."""
    where = f"callbacks.{name}.path = {config.path}"
    if ":" not in config.path:
        raise UserError(f"{where}: is no class; give it as my_module:MyCallback.")
    found = import_function(config.path, where)
    if not inspect.isclass(found):
        raise UserError(f"{where}: is no class; give one with the methods that are called.")
    hooks = tuple(hook for hook in HOOKS if callable(getattr(found, hook, None)))
    check_methods(found, hooks, where)
    has_state = hasattr(found, "state_dict")
    if has_state != hasattr(found, "load_state_dict"):
        raise UserError(f"{where}: of state_dict and load_state_dict it has one; it needs both.")
    is_called = getattr(found, "every_process", False) or os.environ.get("RANK", "0") == "0"
    target = make(name, config, found) if is_called else None
    return Loaded(name, config, hooks, has_state, target)


def check_methods(found: type, hooks: tuple[str, ...], where: str) -> None:
    """Checks the methods of a callback's class.

    Raises:
        UserError: it has no hook, one that does not exist, or one that does not take an event.
    """
    for method in (m for m in dir(found) if m.startswith("on_") and m not in HOOKS):
        meant = OTHER_NAMES.get(method)
        hint = f" It is called {meant} here." if meant else nearest(method, HOOKS)
        raise UserError(f"{where}: {method} is never called; there are {listed(HOOKS)}.{hint}")
    if not hooks:
        raise UserError(f"{where}: has nothing to call; it needs one or more of {listed(HOOKS)}.")
    for hook in hooks:
        function = getattr(found, hook)
        if is_coroutine_function(function):
            raise UserError(f"{where}: {hook} is async; it must be an ordinary method.")
        is_static = isinstance(inspect.getattr_static(found, hook), (staticmethod, classmethod))
        arguments = [None] if is_static else [None, None]
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            raise UserError(
                f"{where}: {hook} must take one argument, the event ({error})."
            ) from error


def make(name: str, config: Callback, found: type) -> Any:
    """Returns an object of a callback's class.

    Raises:
        UserError: the class does not take the arguments, or raises.
    """
    key = f"callbacks.{name}.args"
    parameters = inspect.signature(found).parameters.values()
    own = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [argument for argument in config.args if argument not in own and not takes_any]
    if unknown:
        raise UserError(
            f"{key}.{unknown[0]}: {config.path} takes no such argument; it takes {listed(own)}."
            f"{nearest(unknown[0], own)}"
        )
    missing = [
        p.name for p in parameters if p.default is p.empty and p.name in own
        and p.name not in config.args
    ]  # fmt: skip
    if missing:
        raise UserError(f"{key}.{missing[0]}: is missing; {config.path} has no default for it.")
    try:
        return found(**config.args)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{key}: {config.path} cannot be made with them: {type(error).__name__}: {error}"
        ) from error
