"""Runs as a worker process of `pool.Pool`: `python -m grpo_cli.scoring.pool_worker FD`.

Imports almost nothing, so that it starts quickly.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import replace
from typing import Any

from grpo_cli.scoring import processes
from grpo_cli.scoring.guards import CallResult, answer, blame


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


if __name__ == "__main__":
    main()
