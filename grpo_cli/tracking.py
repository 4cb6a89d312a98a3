"""Trackers that metrics are sent to besides metrics.jsonl; each optional, imported when chosen."""

from __future__ import annotations

import importlib
import uuid
from pathlib import Path
from typing import Any, Protocol

from grpo_cli.config import Recipe
from grpo_cli.errors import UserError


class Tracker(Protocol):
    """Where metrics go."""

    def log(self, metrics: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


def require(backend: str) -> None:
    """Raises a UserError if the package of a tracker is missing."""
    if backend == "none":
        return
    try:
        importlib.import_module(backend)
    except ImportError as error:
        raise UserError(
            f"tracking.backend = {backend}: the package is not installed; "
            f"pip install 'grpo-cli[{backend}]', or tracking=none."
        ) from error


def start(
    recipe: Recipe, folder: Path, settings: dict[str, Any], known_as: str | None = None
) -> tuple[list[Tracker], str | None]:
    """The recipe's tracker, as a list of one or none, and by what it knows the run.

    Args:
        known_as: the same of a run that goes on: its curves go on too.
    """
    backend, name = recipe.tracking.backend, recipe.tracking.name or folder.name
    if backend == "none":
        return [], known_as
    if backend == "tensorboard":
        return [_TensorBoard(folder / "tensorboard")], known_as
    module = importlib.import_module(backend)  # wandb and trackio share an interface
    settings = {"project": recipe.tracking.project, "name": name, "config": settings}
    if backend == "trackio":  # knows a run by its name
        module.init(**settings, resume="allow")
        return [_Wandb(module)], name
    known_as = known_as or uuid.uuid4().hex[:8]
    module.init(**settings, id=known_as, resume="allow")
    return [_Wandb(module)], known_as


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder))

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class _Wandb:
    def __init__(self, module: Any) -> None:
        self.module = module

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.module.log(metrics, step=step)

    def close(self) -> None:
        self.module.finish()
