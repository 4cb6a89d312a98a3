"""Distinguishes local data (files, folders, patterns) from names of hub data sets."""

from __future__ import annotations

import importlib.resources
import os
from pathlib import Path

ADAPTER_CONFIG = "adapter_config.json"  # written by peft beside the adapter's weights
FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def local_path(source: str) -> Path | None:
    """Returns the file, folder or pattern that `source` names, or None for a hub name.

    `pkg://a.b/c` is a file of a package.

    Raises:
        ModuleNotFoundError: there is no such package.
    """
    if source.startswith("pkg://"):
        package, _, name = source.removeprefix("pkg://").partition("/")
        return Path(str(importlib.resources.files(package).joinpath(name)))
    path = Path(os.path.expanduser(source))
    looks_local = file_format(path) is not None or source.startswith((".", "/", "~"))
    return path if path.exists() or looks_local or is_pattern(path) else None


def template_file(template: str) -> Path | None:
    """Returns the file of a chat template (`hermes` is shipped); None if it is template text."""
    if "{" in template:
        return None
    if template == "hermes":
        return Path(str(importlib.resources.files("grpo_cli.models") / "hermes.jinja"))
    return Path(template).expanduser()


def is_pattern(path: Path) -> bool:
    """Returns whether a path is a pattern such as data/*.parquet."""
    return not path.exists() and any(sign in str(path) for sign in "*?[")


def is_local(source: str) -> bool:
    """Returns whether `source` names local data, even if its package is missing."""
    return source.startswith("pkg://") or local_path(source) is not None


def has_splits(source: str) -> bool:
    """Returns whether `source` may have splits: it is a hub name or a folder."""
    if source.startswith("pkg://"):
        return False
    path = local_path(source)
    return path is None or path.is_dir()


def short_name(source: str) -> str:
    """Returns a short name of data: the last part of its path that is not a pattern."""
    parts = [part for part in source.split("/") if part and not is_pattern(Path(part))]
    return parts[-1].split(".")[0] if parts else ""


def absolute(source: str) -> str:
    """Makes a local source's path absolute; sources in packages stay unchanged."""
    path = None if source.startswith("pkg://") or "{" in source else local_path(source)
    if path is None or not (path.exists() or is_pattern(path)):
        return source
    return str(path.absolute() if is_pattern(path) else path.resolve())


def file_format(path: Path) -> str | None:
    """Returns the `datasets` builder for a file name; None if the type is unknown."""
    suffixes = [s for s in path.suffixes if s != ".gz"]
    return FORMATS.get(suffixes[-1].lower()) if suffixes else None


def is_adapter(path: Path) -> bool:
    """Returns whether a folder holds a low-rank adapter written by peft, and no model."""
    return (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file()
