"""Tells whether the recipe that a checkpoint stores may be obeyed: it can run code, as a program.

    own run        the recipe was noted when the checkpoint was saved: it is obeyed
    another's      it is obeyed as far as it describes the model and the data; whatever runs other
                   code than grpo's, or reaches beyond this machine, needs trust=true

Notes are empty files in grpo's cache folder, named by a hash of the recipe and of the model's code.
Imports nothing heavy.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_cli.checkpoints.paths import TRAINING
from grpo_cli.config.cache import cache_dir
from grpo_cli.config.interpolation import leaves
from grpo_cli.config.knob import as_written
from grpo_cli.config.parsing import first_line
from grpo_cli.config.renamed import is_stored
from grpo_cli.config.schema import Benchmark
from grpo_cli.config.words import RECIPE_KEYS
from grpo_cli.errors import UserError, listed

RECIPE = f"{TRAINING}/recipe.yaml"


def check(path: Path | str, found: Iterable[str], trust: str) -> None:
    """Raises a UserError if another's checkpoint asks for more than its model and its data.

    Args:
        found: what it asks for, as `key = value`. trust: the word that allows it.
    """
    if names := [*dict.fromkeys(found)]:
        raise UserError(
            f"checkpoint = {path}: no run of yours has made it here, and its recipe can run code "
            f"or reach other machines: {listed(names)}. If you trust who made it, add {trust}."
        )


def note_own(path: Path) -> None:
    """Notes a checkpoint as one of this user's, if its recipe runs code."""
    # Without a note an evaluation asks for trust=true.
    with suppress(OSError, UserError, OmegaConfBaseException):
        if [*what_runs_code(read(path))]:
            note = _note(path)
            note.parent.mkdir(parents=True, exist_ok=True)
            note.touch()


def is_own(path: Path) -> bool:
    """Returns whether a run of this user has saved this checkpoint, or one of the same recipe."""
    try:
        return _note(path).is_file()
    except OSError:
        return False


def _note(path: Path) -> Path:
    digest = hashlib.sha256()
    for file in [path / RECIPE, *sorted(path.rglob("*.py"))]:
        digest.update(f"{file.relative_to(path)}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return cache_dir() / "own" / digest.hexdigest()


def read(path: Path) -> dict[str, Any]:
    """Returns the recipe that a checkpoint stores.

    Raises:
        UserError: it cannot be read, or is not YAML.
    """
    try:
        tree = yaml.safe_load((path / RECIPE).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise UserError(
            f"checkpoint = {path}: its recipe, {RECIPE}, cannot be read: {first_line(error)}."
        ) from error
    return tree if isinstance(tree, dict) else {}


def unusual(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yields the entries of a stored recipe that no run writes: Hydra would obey them."""
    if not is_stored(dict(tree)):
        yield "defaults"
    for entry in tree.get("defaults") or []:
        if isinstance(entry, dict) and [*entry.values()] == [None]:
            continue
        if entry not in ("schema", "_self_"):
            yield f"defaults: {entry}"
    yield from (str(key) for key in tree if key != "defaults" and key not in RECIPE_KEYS)


def what_runs_code(cfg: Any, given: Collection[str] = ()) -> Iterator[str]:
    """Yields what an evaluation would obey beyond the model and its data, as `key = value`.

    Args:
        cfg: a recipe, as Hydra has composed it or as it is stored. given: keys that the command
            line sets itself.
    """
    tree = OmegaConf.create(cfg)
    for key, text in leaves(OmegaConf.to_container(tree)):
        if isinstance(text, str) and re.search(r"\$\{[^}]*:", text):  # ${oc.env:NAME}
            yield f"{key} = {text}"
    try:
        plain: Any = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException:  # the check of the recipe says what is wrong
        return
    for key, value in [*_functions(plain), *leaves(plain)]:
        if key not in given and _reaches_out(key, value):
            yield f"{key} = {as_written(value)}"


def _functions(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, entry in (tree.get("reward") or {}).items():
        if isinstance(entry, Mapping):
            yield f"reward.{name}.function", entry.get("function") or name
    for name, entry in (tree.get("benchmark") or {}).items():
        if isinstance(entry, Mapping):
            yield f"benchmark.{name}.reward", entry.get("reward") or Benchmark().reward


def _reaches_out(key: str, value: Any) -> bool:
    section, name = key.partition(".")[0], key.rpartition(".")[2]
    if section in ("reward", "benchmark") and name in ("function", "reward"):
        return not _is_shipped(str(value))
    if name == "trust_remote_code":
        return value not in (None, False)
    if name == "guards":  # programs of the model would run without protection of one's files
        return bool(value == "limits")
    if key == "model.attn_implementation":  # OWNER/NAME: a kernel from the hub
        return "/" in str(value)
    if key in ("generation.engine", "loss.policy", "advantage.rule", "optimizer.algorithm"):
        return ":" in str(value)
    prefixes = ("scoring.modules", "generation.vllm.servers", "generation.vllm.engine_args.")
    return key.startswith(prefixes)


def _is_shipped(function: str) -> bool:
    """Returns whether a reward is grpo's own, and sends nothing to an address of the recipe."""
    name = function.rpartition(":")[2]
    return name != "judge" and function in (name, f"grpo_cli.rewards.{name}:{name}")
