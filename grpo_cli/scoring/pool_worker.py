"""Runs as a worker process of `pool.Pool`: `python -m grpo_cli.scoring.pool_worker FD`.

Imports almost nothing, so that it starts quickly.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from grpo_cli.errors import SignalReceived
from grpo_cli.images import opened
from grpo_cli.scoring import processes
from grpo_cli.scoring.guards import blame, no_second_run
from grpo_cli.scoring.pool import CallResult


def main() -> None:
    """Answers calls until the pool closes the pipe."""
    pipe, preload = processes.connect()
    for module in preload:
        with contextlib.suppress(Exception, SystemExit):  # reported by the first call
            importlib.import_module(module)
    pipe.send("ready")
    log_history: list[dict[str, Any]] = []
    while True:
        try:
            path, arguments, (known, new) = pipe.recv()
        except EOFError:
            return
        log_history[known:] = new
        if (state := arguments.get("trainer_state")) is not None:
            arguments["trainer_state"] = replace(state, log_history=list(log_history))
        try:
            pipe.send(call(path, arguments))
        except (BrokenPipeError, ConnectionResetError):
            return
        except Exception as error:  # the value cannot be pickled
            pipe.send(CallResult(error=f"it returned what cannot be sent: {error}"))


def call(path: str, arguments: dict[str, Any]) -> CallResult:
    """Imports the function of `module:function` and calls it."""
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        why = f"in its worker process, {path} cannot be imported: {blame(error)}"
        return CallResult(error=f"ImportError: {why}")
    return answer(function, arguments)


def answer(function: Callable[..., Any], arguments: dict[str, Any]) -> CallResult:
    """Calls a function with keyword arguments; exceptions become `CallResult.error`."""
    metrics, extras = recorders(arguments)
    start = time.perf_counter()
    try:
        with no_second_run():
            values, error = with_opened(function, arguments), None
    except (KeyboardInterrupt, SignalReceived):
        raise
    except BaseException as raised:  # user functions may raise anything
        values, error = None, blame(raised)
    return CallResult(values, metrics, extras, time.perf_counter() - start, error)


def with_opened(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Calls a function with its images opened; they are sent encoded, for it alone to decode."""
    return function(**opened(arguments))


def recorders(
    arguments: dict[str, Any],
) -> tuple[list[tuple[str, float]], list[tuple[str, list[Any]]]]:
    """Sets the arguments log_metric and log_extra; returns the lists that they append to."""
    metrics: list[tuple[str, float]] = []
    extras: list[tuple[str, list[Any]]] = []
    if "log_metric" in arguments:
        arguments["log_metric"] = lambda name, value: metrics.append((str(name), float(value)))
    if "log_extra" in arguments:
        arguments["log_extra"] = lambda column, values: extras.append(
            (str(column), [to_builtin(value) for value in values])
        )
    return metrics, extras


def to_builtin(value: Any) -> Any:
    """Converts a value to JSON types: tensors, arrays and sets to lists, other objects to str.

    Objects are not stored or sent, since they may hold GPU memory or fail to pickle.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=str)
    if isinstance(value, (list, tuple)):
        return [to_builtin(inner) for inner in value]
    if isinstance(value, Mapping):
        return {str(key): to_builtin(inner) for key, inner in value.items()}
    if value is None or type(value) in (bool, int, float, str):
        return value
    return str(value)


if __name__ == "__main__":
    main()
