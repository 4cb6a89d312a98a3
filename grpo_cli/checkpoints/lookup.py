"""Finds a model or a run from a folder or a hub name, and hashes models.

Imports nothing slow.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from grpo_cli.checkpoints import paths, provenance
from grpo_cli.config.command_line import as_words
from grpo_cli.errors import UserError, nearest
from grpo_cli.files import open_file, read_yaml, reading

HASHED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")  # files of a model folder


def find_checkpoint(name: str) -> Path | None:
    """Returns `name` if it is a checkpoint or a model, else the newest checkpoint of the run."""
    path = Path(name).expanduser()
    if paths.is_model(path) or paths.has_shards(path):
        return path
    saved = paths.steps_saved(path)
    return paths.checkpoint_path(path, saved[-1]) if saved else None


def find_model(name: str) -> str:
    """Resolves a model folder, a run's folder (its newest checkpoint) or a hub name.

    Returns:
        The path of a model folder, or the hub name.

    Raises:
        UserError: `name` is a path without a model.
    """
    found = find_checkpoint(name)
    if found is not None and paths.is_model(found):
        return str(found.resolve())
    if found is not None and paths.has_shards(found):
        raise UserError(
            f"checkpoint = {found}: holds shards and no model folder (checkpoint.model); make one "
            f"with grpo export {found} FOLDER, and evaluate that with "
            f"recipe={found / provenance.RECIPE}."
        )
    if Path(name).expanduser().exists():
        raise UserError(
            f"checkpoint = {name}: holds no model (config.json and *.safetensors), "
            "nor checkpoints/step-N."
        )
    if paths.looks_local(name):
        raise no_such_folder("checkpoint", name)
    return name


def check_model_folder(key: str, name: str) -> None:
    """Raises a UserError if `name`, the value of `key`, is a path without a model."""
    path = Path(name).expanduser()
    if path.is_dir() and not paths.is_model(path):
        raise UserError(f"{key} = {name}: the folder holds no model (config.json, *.safetensors).")
    if not path.is_dir() and paths.looks_local(name):
        raise no_such_folder(key, name)


def no_such_folder(key: str, name: str) -> UserError:
    """Returns the error for a folder that does not exist, with similar folder names."""
    beside = map(str, Path(name).expanduser().parent.glob("*"))
    return UserError(f"{key} = {name}: there is no such folder.{nearest(name, beside)}")


def model_hash(path: str) -> str | None:
    """Returns the SHA-256 of a folder's weights, config and tokenizer; None for a hub name."""
    folder = Path(path)
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for file in sorted({f for pattern in HASHED for f in folder.glob(pattern)}):
        digest.update(json.dumps([file.name, file.stat().st_size]).encode())
        _add(digest, file)
    return digest.hexdigest()


def file_hash(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    digest = hashlib.sha256()
    _add(digest, path)
    return digest.hexdigest()


def _add(digest: hashlib._Hash, file: Path) -> None:
    with reading(file), open_file(file) as opened:
        while block := opened.read(1 << 22):
            digest.update(block)


def with_recipe_of_run(argv: Sequence[str]) -> list[str]:
    """Completes `grpo train resume=RUN` with the recipe and the folder of the run.

    RUN is a run's folder, or one of its checkpoints. With `recipe=`, the words stay as they are.

    Raises:
        UserError: no run, or another user's run, whose recipe asks for what can run code.
    """
    words = as_words(argv)
    given = {key: value for key, _, value in (word.partition("=") for word in words)}
    start = Path(given.get("resume") or "auto").expanduser()
    runs = [p for p in (start, start.parent.parent) if os.path.lexists(p / "recipe.yaml")]
    names_recipe = "recipe" in given or (not runs and "model.path" in given)
    if names_recipe or str(start) in ("auto", "null"):
        return words
    if not runs:
        raise UserError(f"resume = {start}: holds no run (recipe.yaml); give outputs/NAME.")
    folder, file = runs[0], runs[0] / "recipe.yaml"
    if not provenance.is_own_run(folder):
        provenance.check_links(folder, "resume")
        stored = read_yaml(file)
        harmless = ("defaults", "output_dir", "resume")
        asked = {key: value for key, value in stored.items() if key not in harmless}
        found = [*provenance.unusual(stored), *provenance.refused(asked, folder)]
        provenance.check(folder, found, f"recipe={file}")
    rest = [word for word in words if not word.startswith("resume=")]
    in_place = start == folder and "output_dir" not in given
    rest.append("resume=auto" if in_place else f"resume={start}")
    return [f"recipe={file}", f"output_dir={folder}", *rest]
