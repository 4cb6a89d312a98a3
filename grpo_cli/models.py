"""Which model is meant, and which it is: folders, runs and hub names. Imports nothing heavy."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from grpo_cli import folders
from grpo_cli.errors import UserError, nearest

HASHED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")  # of a model's folder


def find_model(given: str) -> str:
    """What `grpo eval` is given: a model's folder, a run's (its newest checkpoint), a hub name.

    Raises:
        UserError: a path that holds no model.
    """
    path = Path(given).expanduser()
    if folders.is_model(path):
        return str(path.resolve())
    saved = folders.steps_saved(path)
    newest = folders.checkpoint_path(path, saved[-1]) if saved else path
    if folders.is_model(newest):
        return str(newest.resolve())
    if folders.has_training_state(newest):
        raise UserError(
            f"checkpoint = {newest}: holds shards and no model folder (checkpoint.model); make one "
            f"with grpo export {newest} FOLDER, and evaluate that with recipe=NAME."
        )
    if path.exists():
        raise UserError(
            f"checkpoint = {given}: holds no model (config.json and *.safetensors), "
            "nor checkpoints/step-N."
        )
    if folders.looks_local(given):
        beside = [str(p) for p in path.parent.glob("*")] if path.parent.is_dir() else []
        raise UserError(f"checkpoint = {given}: there is no such folder.{nearest(given, beside)}")
    return given


def model_hash(path: str) -> str | None:
    """SHA-256 over a model folder's weights, configuration and tokenizer; None of a hub name."""
    folder = Path(path)
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for file in sorted({f for pattern in HASHED for f in folder.glob(pattern)}):
        digest.update(json.dumps([file.name, file.stat().st_size]).encode())
        _add(digest, file)
    return digest.hexdigest()


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    _add(digest, path)
    return digest.hexdigest()


def _add(digest: hashlib._Hash, file: Path) -> None:
    with file.open("rb") as opened:
        while block := opened.read(1 << 22):
            digest.update(block)
