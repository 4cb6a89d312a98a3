"""Trains and evaluates from Python (docs/tutorial.md has an example)."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from grpo_cli import cli
from grpo_cli.config.command_line import quoted
from grpo_cli.config.compose import error_message
from grpo_cli.errors import Stopped, UserError
from grpo_cli.files import read_json

REWARDS = "grpo_rewards"  # module that holds the reward functions of this process


def train(
    recipe: str | Path = "chat",
    *,
    rewards: Mapping[str, Callable[..., Any]] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Trains as `grpo train` does, and returns the contents of the run's summary.json.

    Args:
        recipe: the name of a recipe, or a file.
        rewards: reward functions by name, in TRL's calling convention.
        changes: knobs by their keys: `steps=20`, `**{"optimizer.learning_rate": 1e-5}`.

    Raises:
        UserError: a mistake in the recipe. TrainingError: the run failed.
        KeyboardInterrupt: the run was interrupted; a checkpoint has been written.
    """
    (folder,) = _run("train", [f"recipe={recipe}"], rewards or {}, changes)
    return read_json(folder / "summary.json")


def evaluate(
    checkpoint: str | Path,
    *,
    rewards: Mapping[str, Callable[..., Any]] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Evaluates a run, a model folder or a hub name as `grpo eval` does; returns its eval.json.

    See `train` for the arguments and the errors.
    """
    (folder,) = _run("eval", [str(checkpoint)], rewards or {}, changes)
    return read_json(folder / "eval.json")


def _run(
    command: str,
    words: list[str],
    rewards: Mapping[str, Callable[..., Any]],
    changes: Mapping[str, Any],
) -> list[Path]:
    module = sys.modules.setdefault(REWARDS, types.ModuleType(REWARDS))
    for name, function in rewards.items():
        setattr(module, name, function)
        words.append(f"reward.{name}.function={REWARDS}:{name}")
    words += [f"{key}={_text(value)}" for key, value in changes.items()]
    before = sys.argv
    try:
        return cli.COMMANDS[command](words)  # type: ignore[return-value]
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(error_message(error)) from error
    except Stopped as stopped:
        raise KeyboardInterrupt(str(stopped)) from stopped
    finally:
        sys.argv = before  # Hydra's words


def _text(value: Any) -> str:
    if isinstance(value, Mapping):  # Hydra's grammar has no quotes around keys
        return f"{{{','.join(f'{key}:{_text(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    return quoted(str(value)) if isinstance(value, str | Path) else json.dumps(value)
