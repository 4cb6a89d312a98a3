"""Checkpoints: a plain transformers model folder, and the training state in a folder inside it.

    checkpoints/step-200/config.json, model.safetensors, tokenizer.json, ...   loads anywhere
    checkpoints/step-200/training/state.pt, recipe.yaml                        to go on from here
    checkpoints/step-200/training/reference/                                   with reference_every

A checkpoint is written under a temporary name and renamed, so that a folder called step-N is whole.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_cli.folders import TRAINING, checkpoint_path, steps_saved

REFERENCE = "reference"


def save(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    state: dict[str, Any],
    recipe_yaml: str,
    reference: PreTrainedModel | None = None,
) -> None:
    """Writes one checkpoint. Only the main process calls it.

    Args:
        path: its final name. state: what `load_state` gives back; tensors and plain values only.
        reference: the reference policy, where it is no longer the model that the run began with.
    """
    partial = path.with_name(path.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    training = partial / TRAINING
    training.mkdir(parents=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    torch.save(state, training / "state.pt")
    if reference is not None:
        reference.save_pretrained(training / REFERENCE)
    (training / "recipe.yaml").write_text(recipe_yaml, encoding="utf-8")
    for file in partial.rglob("*"):  # on the disk before the name says that it is whole
        if file.is_file():
            with file.open("r+b") as handle:
                os.fsync(handle.fileno())
    if path.exists():  # the same step again, after a resume from an earlier one
        shutil.rmtree(path)
    partial.rename(path)


def reference_path(path: Path) -> Path:
    """Where a checkpoint keeps a refreshed reference, if the run has one."""
    return path / TRAINING / REFERENCE


def has_reference(path: Path) -> bool:
    """Whether the checkpoint holds a reference of its own."""
    return reference_path(path).is_dir()


def load_state(path: Path) -> dict[str, Any]:
    """The training state of a checkpoint, on the CPU."""
    state: dict[str, Any] = torch.load(
        path / TRAINING / "state.pt", map_location="cpu", weights_only=True
    )
    return state


def prune(folder: Path, keep_last: int, best: int | None) -> None:
    """Removes all but the newest `keep_last` checkpoints of a run, and the best one."""
    for torn in (folder / "checkpoints").glob("step-*.tmp"):  # of a save that was killed
        shutil.rmtree(torn)
    for step in steps_saved(folder)[:-keep_last]:
        if step != best:
            shutil.rmtree(checkpoint_path(folder, step))


def set_aside(folder: Path, after: int) -> list[int]:
    """Renames a run's checkpoints of later steps than `after`, so that resume=auto ignores them.

    Returns:
        The steps of those renamed.
    """
    later = [step for step in steps_saved(folder) if step > after]
    for step in later:
        path = checkpoint_path(folder, step)
        old = path.with_name(path.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    return later


def rng_state() -> dict[str, Any]:
    """The random streams of this process, as tensors and plain values."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Puts back what `rng_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
