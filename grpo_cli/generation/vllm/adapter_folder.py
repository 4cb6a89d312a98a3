"""The folder in which vLLM reads the policy's adapter (`adapter.sync=adapter`).

The engine keeps the base model's weights. At each update the trainer writes the adapter's weights
in peft's format, and the engine reads them from there: megabytes instead of all weights.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from grpo_cli.config.recipe import Recipe
from grpo_cli.errors import UserError
from grpo_cli.generation.vllm import lora
from grpo_cli.models import adapters


class AdapterFolder:
    """A folder with peft's two files, which vLLM reads; each update replaces the weights' file."""

    def __init__(self, path: Path, model: nn.Module) -> None:
        """Creates the folder and writes the config.

        Raises:
            OSError: the folder cannot be written.
        """
        self.path = path
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        (path / adapters.CONFIG).write_bytes(adapters.config_file(model))

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces the weights atomically: a reader gets all old ones or all new ones."""
        partial = self.path / f"{adapters.WEIGHTS}.partial"
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors}, partial)
        os.replace(partial, self.path / adapters.WEIGHTS)

    def remove(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.path, ignore_errors=True)


def rank_on(model: nn.Module, recipe: Recipe) -> int | None:
    """Returns the largest rank of the model's adapter; None if merged weights are sent.

    Raises:
        UserError: the model has an adapter on a layer that is not linear, such as experts.
    """
    config = adapters.attached_config(model)
    if config is None or recipe.adapter.sync == "merge":
        return None
    lora.check(config)
    for name, base in adapters.base_layers(model):
        if not isinstance(base, nn.Linear):
            raise UserError(
                f"adapter.sync = adapter: vLLM gets adapters of linear layers only, and {name} is "
                f"a {type(base).__name__}; {lora.OTHER_WAY}, or name the layers in "
                "adapter.target_modules."
            )
    return lora.largest_rank(config)
