"""Imports a user's functions, which a recipe names as `my_module:my_function`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpo_cli
from grpo_cli.errors import UserError, nearest


def import_module(name: str, where: str) -> Any:
    """Imports a module, which may lie in the working directory.

    Args:
        where: key and value that name the module, for error messages.

    Raises:
        UserError: the module cannot be imported.
    """
    # The console script does not add the working directory; grpo's own modules do not need it.
    if name.partition(".")[0] != "grpo_cli" and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything on import
        hint, dotted = "", name.removesuffix(".py").removeprefix("./").replace("/", ".")
        if dotted != name and all(map(str.isidentifier, dotted.split("."))):
            hint = f"; write {dotted}"
        elif isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            hint = f"; it is looked for in {os.getcwd()} and among the installed packages"
        raise UserError(
            f"{where}: cannot import {name}: {type(error).__name__}: {error}{hint}"
        ) from error


@contextmanager
def off_import_path(is_off: bool = True) -> Iterator[None]:
    """Removes the working directory from the import path in the block; restores the path after."""
    before, here = sys.path[:], Path.cwd()
    own = {Path(folder).parent for folder in grpo_cli.__path__}  # folder of grpo itself
    if is_off and here not in own:
        sys.path[:] = [p for p in before if Path(p or ".").resolve() != here.resolve()]
    try:
        yield
    finally:
        if is_off:
            sys.path[:] = before


def import_function(path: str, where: str) -> Callable[..., Any]:
    """Imports the function that `module:function` names.

    Raises:
        UserError: there is no such module or function.
    """
    module_name, is_path, attribute = path.partition(":")
    if not is_path:
        raise UserError(f"{where}: is not a function; give it as my_module:my_function.")
    module = import_module(module_name, where)
    function = getattr(module, attribute, None)
    if not callable(function):
        there = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        found = nearest(attribute, there)
        raise UserError(f"{where}: {module_name} has no {attribute!r}.{found}")
    return function  # type: ignore[no-any-return]


def is_coroutine_function(function: Any) -> bool:
    """Returns whether a function, or an object's `__call__`, returns a coroutine."""
    if inspect.isclass(function):  # calling it returns an object
        return False
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
