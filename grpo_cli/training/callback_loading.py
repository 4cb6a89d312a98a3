"""Makes the callbacks of a recipe, and finds the mistakes in them before a model is loaded."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping

from grpo_cli.config.user_code import import_function
from grpo_cli.errors import UserError, listed, nearest
from grpo_cli.training.callbacks import HOOKS, Loaded
from grpo_cli.training.settings import Callback

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
    for method in (m for m in dir(found) if m.startswith("on_") and m not in HOOKS):
        meant = OTHER_NAMES.get(method)
        hint = f" It is called {meant} here." if meant else nearest(method, HOOKS)
        raise UserError(f"{where}: {method} is never called; there are {listed(HOOKS)}.{hint}")
    if not hooks:
        raise UserError(f"{where}: has nothing to call; it needs one or more of {listed(HOOKS)}.")
    for hook in hooks:
        function = getattr(found, hook)
        if inspect.iscoroutinefunction(function):
            raise UserError(f"{where}: {hook} is async; it must be an ordinary method.")
        is_static = isinstance(inspect.getattr_static(found, hook), (staticmethod, classmethod))
        try:
            inspect.signature(function).bind(*[None] * (1 if is_static else 2))
        except TypeError as error:
            raise UserError(
                f"{where}: {hook} must take one argument, the event ({error})."
            ) from error
    has_state = hasattr(found, "state_dict")
    if has_state != hasattr(found, "load_state_dict"):
        raise UserError(f"{where}: of state_dict and load_state_dict it has one; it needs both.")
    target = None
    if getattr(found, "every_process", False) or os.environ.get("RANK", "0") == "0":
        try:
            target = found(**config.args)
        except (Exception, SystemExit) as error:
            raise UserError(
                f"callbacks.{name}.args: {config.path} cannot be made with them: "
                f"{type(error).__name__}: {error}"
            ) from error
    return Loaded(name, hooks, has_state, target)
