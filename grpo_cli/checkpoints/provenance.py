"""Decides whether a checkpoint's stored recipe is trusted, since it can name code to import.

The recipe of one's own run is trusted, another's only with trust=true.

A run notes its folders as empty files in grpo's cache folder. Their names hash the recipe, the
model's code and its configs, which may name code or another model. A moved folder is therefore
still recognized. Imports nothing slow.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from grpo_cli.checkpoints.paths import RUN_ID, TRAINING
from grpo_cli.config.cache import cache_dir
from grpo_cli.config.parsing import first_line
from grpo_cli.errors import UserError

RECIPE = f"{TRAINING}/recipe.yaml"


def check(path: Path | str, trust: str) -> None:
    """Raises a UserError unless this user's runs wrote the checkpoint.

    Args:
        trust: the word that trusts it.
    """
    if not is_own(Path(path)):
        raise UserError(
            f"checkpoint = {path}: no run of yours has made it here, and its recipe, {RECIPE}, can "
            "run code and reach other files and machines. Read it first; if you trust who made "
            f"it, add {trust}."
        )


def note_own(path: Path) -> None:
    """Records a checkpoint or an exported model as this user's."""
    _note(path, _obeyed_files)


def is_own(path: Path) -> bool:
    """Returns whether this user wrote this checkpoint, or one with the same recipe and code."""
    return _is_noted(path, _obeyed_files)


def note_run(path: Path) -> None:
    """Records a run's folder as this user's; its checkpoints have their own notes.

    A shipped recipe is not unique to a user, so a random name is written beside it.
    """
    with suppress(OSError):
        if not (path / RUN_ID).exists():
            (path / RUN_ID).write_text(f"{uuid.uuid4()}\n", encoding="utf-8")
    _note(path, _recipe_of_run)


def _obeyed_files(path: Path) -> list[Path]:
    """Returns the recipe, the model's code and all its configs, all of which may name code."""
    found = [path / RECIPE] if (path / RECIPE).is_file() else []
    configs = (
        file
        for file in path.rglob("*.json")
        if file.parent != path / TRAINING  # skip the manifest and other hashes
        and not file.name.endswith(".index.json")
    )
    return found + sorted([*path.rglob("*.py"), *configs])


def _recipe_of_run(path: Path) -> list[Path]:
    return [path / "recipe.yaml", path / RUN_ID]


def _note(path: Path, files: Callable[[Path], list[Path]]) -> None:
    with suppress(OSError):  # without a note an evaluation requires trust=true
        note = _name(path, files(path))
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()


def _is_noted(path: Path, files: Callable[[Path], list[Path]]) -> bool:
    try:
        return _name(path, files(path)).is_file()
    except OSError:
        return False


def _name(path: Path, files: Iterable[Path]) -> Path:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(path)}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return cache_dir() / "own" / digest.hexdigest()


def check_links(path: Path, key: str) -> None:
    """Raises a UserError if a link in another user's folder points outside it.

    Args:
        path: folder of a run or an evaluation. key: name of the folder in error messages.
    """
    if not _is_noted(path, _recipe_of_run):
        _refuse_links(path, path, key, "remove the link, or put a copy of the file in its place.")


def check_model_links(path: Path) -> None:
    """Raises a UserError if a link in another user's checkpoint points outside it.

    A model in the hub's cache consists of links to files of the cache, ../../blobs/HASH.
    """
    cache = path.absolute().parent.parent
    root = cache if is_cached(path) else path
    trust = "if you trust who made it, add --trust=true."
    _refuse_links(path, root, "checkpoint", trust)


def is_cached(path: Path) -> bool:
    """Returns whether a model's folder is a snapshot in the hub's cache, named by its commit."""
    *_, model, snapshots, _ = ("", "", *path.absolute().parts)
    return snapshots == "snapshots" and model.startswith("models--")


def _refuse_links(path: Path, root: Path, key: str, hint: str) -> None:
    for folder, folders, files in os.walk(path):
        for link in (Path(folder, name) for name in (*folders, *files)):
            if link.is_symlink() and not _is_below(link, root):
                raise UserError(
                    f"{key} = {path}: no run of yours has made it here, and its link "
                    f"{link.relative_to(path)} leads out of it, to {os.readlink(link)}; {hint}"
                )


def _is_below(link: Path, folder: Path) -> bool:
    try:
        return link.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a loop
        return False


def read(path: Path) -> dict[str, Any]:
    """Reads the recipe that a checkpoint stores.

    Raises:
        UserError: the recipe cannot be read, or is not YAML.
    """
    try:
        tree = yaml.safe_load((path / RECIPE).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise UserError(
            f"checkpoint = {path}: its recipe, {RECIPE}, cannot be read: {first_line(error)}."
        ) from error
    return tree if isinstance(tree, dict) else {}
