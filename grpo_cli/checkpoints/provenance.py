"""Decides which keys of a checkpoint's stored recipe are trusted, since it can name code.

    own run        a run of this user has noted the folder: its recipe is obeyed
    another's      numbers, booleans and choices are obeyed, and texts that pass the rule in
                   their knob's flag `trusted`; every other key must have its default value, or
                   needs trust=true

Notes are empty files in grpo's cache folder. Their names hash the recipe, the model's code and its
configs, which may name code or another model. A moved folder is therefore still recognized. Imports
nothing slow.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import os
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from grpo_cli.checkpoints.paths import RUN_ID, TRAINING
from grpo_cli.config import sources
from grpo_cli.config.cache import cache_dir
from grpo_cli.config.compose import is_stored
from grpo_cli.config.interpolation import leaves
from grpo_cli.config.keys import ENTRIES
from grpo_cli.config.knob import as_written, flags_of
from grpo_cli.config.recipe import Recipe
from grpo_cli.config.words import RECIPE_KEYS
from grpo_cli.errors import UserError, listed
from grpo_cli.evaluation.settings import Benchmark, Mode
from grpo_cli.files import open_file, read_json
from grpo_cli.rewards import shipped_name
from grpo_cli.scoring.settings import Reward

RECIPE = f"{TRAINING}/recipe.yaml"

Rule = Callable[[Any, Path], bool]  # takes a value and the checkpoint's folder


def _anything(value: Any, folder: Path) -> bool:
    return True


def _never(value: Any, folder: Path) -> bool:
    return value in (None, False)


def _plain(value: Any, folder: Path) -> bool:
    """Returns whether a value has only numbers and words: no module:function and no path."""
    if isinstance(value, list):
        return all(_plain(one, folder) for one in value)
    is_number = value is None or isinstance(value, bool | int | float)
    return is_number or re.fullmatch(r"\w+|[-+.\de]+", str(value), re.ASCII) is not None


def _class(value: Any, folder: Path) -> bool:
    """Returns whether a value is a name, or an optimizer of torch or bitsandbytes."""
    known = r"(torch|bitsandbytes)\.optim:\w+"
    return _plain(value, folder) or re.fullmatch(known, str(value), re.ASCII) is not None


def _guards(value: Any, folder: Path) -> bool:
    # With `limits`, the model's programs run without protection of the user's files.
    return value in ("auto", "namespaces")


def _template(value: Any, folder: Path) -> bool:
    return value is None or "{" in str(value) or _inside(str(value), folder)


def _json_text(value: Any, folder: Path) -> bool:
    return value is None or str(value).lstrip().startswith("{")  # otherwise a file


def _schema(value: Any, folder: Path) -> bool:
    """Returns whether a schema is written in the recipe or lies in the folder."""
    return isinstance(value, dict) or _json_text(value, folder) or _inside(str(value), folder)


def _model(value: Any, folder: Path) -> bool:
    return value is None or _is_hub_name(str(value)) or _inside(str(value), folder)


def _data(value: Any, folder: Path) -> bool:
    """Returns whether rows come from the hub, from grpo itself or from the folder."""
    if value is None or re.fullmatch(r"pkg://grpo_cli/samples/(\w+/)?\w[\w.]*", str(value)):
        return True
    # A name without an owner may be a `datasets` loader, such as json, that reads the working
    # folder.
    is_named = "/" in str(value) and _is_hub_name(str(value))
    return is_named or _inside(str(value), folder)


def _is_hub_name(value: str) -> bool:
    is_name = re.fullmatch(r"\w[\w.-]{,99}(/\w[\w.-]{,99})?", value, re.ASCII) is not None
    return is_name and sources.local_path(value) is None


def _inside(value: str, folder: Path) -> bool:
    is_there = os.path.exists(value)  # False for text that is not a path
    return is_there and Path(value).resolve().is_relative_to(folder.resolve())


def _reward(value: Any, folder: Path) -> bool:
    """Returns whether a reward is grpo's own and sends nothing to an address in the recipe."""
    return shipped_name(str(value)) not in (None, "judge")


def _argument(value: Any, folder: Path) -> bool:
    """Returns whether an argument of a reward names no address and no file outside the folder."""
    for text in (os.path.expanduser(one) for _, one in leaves(value) if isinstance(one, str)):
        is_elsewhere = os.path.exists(text) and not (text.isidentifier() or _inside(text, folder))
        if is_elsewhere or "://" in text:
            return False
    return True


def _arguments(reward: Any) -> dict[str, Rule]:
    """Returns the rules of a shipped reward's arguments, by the parameters of its signature."""
    name = shipped_name(str(reward))
    if not _reward(name, Path()):
        return {}
    function = getattr(importlib.import_module(f"grpo_cli.rewards.{name}"), name)
    given = inspect.signature(function).parameters.values()
    own = [p.name for p in given if p.kind is p.KEYWORD_ONLY or p.name in ARGUMENTS]
    return {name: ARGUMENTS.get(name, _argument) for name in own}


# Arguments of shipped rewards whose values need a rule of their own.
ARGUMENTS = {"guards": _guards, "model": _model, "schema": _schema, "trust_remote_code": _never}
# Rules by their names in the flag `trusted`. A dictionary has a rule for each entry of a mapping.
RULES: dict[str, Any] = {
    "anything": _anything, "never": _never, "plain": _plain, "model": _model, "data": _data,
    "template": _template, "json": _json_text, "guards": _guards, "class": _class,
    "reward": _reward, "modes": {"*": Mode},
    "lora": {
        "lora_dropout": _plain, "init_lora_weights": _plain, "target_parameters": _anything,
        "modules_to_save": _anything,
    },
}  # fmt: skip


def rule_of(key: str, field: dataclasses.Field[Any]) -> Any:
    """Returns the rule of a knob's value, or the class of its knobs; None: only its default."""
    flags, meta = flags_of(field), field.metadata
    if flags.trusted or flags.of_start:
        return RULES.get(flags.trusted)
    if key in ENTRIES:
        return {"*": ENTRIES[key]}
    is_number = re.fullmatch(r"(int|float|bool|None|list|dict|[][, |])+", str(field.type))
    return meta["kind"] or (_plain if is_number or meta["choices"] else None)


def check(path: Path | str, found: Iterable[str], trust: str) -> None:
    """Raises a UserError if another user's checkpoint sets untrusted keys.

    Args:
        found: the untrusted entries, as `key = value`. trust: the word that allows them.
    """
    if names := [*dict.fromkeys(found)]:
        raise UserError(
            f"checkpoint = {path}: no run of yours has made it here, and it asks for what can run "
            f"code or reach other files and machines: {listed(names)}. If you trust who made it, "
            f"add {trust}."
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
        with open_file(file) as opened:
            digest.update(opened.read())
    return cache_dir() / "own" / digest.hexdigest()


def is_own_run(path: Path) -> bool:
    """Returns whether a run of this user has made this folder."""
    return _is_noted(path, _recipe_of_run)


def check_links(path: Path, key: str) -> None:
    """Raises a UserError if a link in another user's folder points outside it.

    Args:
        path: folder of a run or an evaluation. key: name of the folder in error messages.
    """
    if not is_own_run(path):
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


def unusual(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yields entries of a stored recipe that no run writes, since Hydra would follow them."""
    if not is_stored(tree):
        yield "defaults"
    for entry in tree.get("defaults") or []:
        if isinstance(entry, dict) and [*entry.values()] == [None]:
            continue
        if entry not in ("schema", "_self_"):
            yield f"defaults: {entry}"
    yield from (str(key) for key in tree if key != "defaults" and key not in RECIPE_KEYS)


def refused_model(key: str, name: Any, folder: Path) -> Iterator[str]:
    """Yields a model named in another user's folder, if it lies elsewhere on this machine."""
    if not _model(name, folder):
        yield f"{key} = {name}"


def refused_base(path: Path) -> Iterator[str]:
    """Yields an adapter's base model as `refused_model` does."""
    base = None
    with suppress(UserError):  # reported when the adapter is loaded
        base = read_json(path / sources.ADAPTER_CONFIG).get("base_model_name_or_path")
    yield from refused_model(f"{sources.ADAPTER_CONFIG}: base_model_name_or_path", base, path)


def refused(cfg: Any, folder: Path, given: Collection[str] = ()) -> Iterator[str]:
    """Yields a recipe's untrusted entries in another user's folder, as `key = value`.

    Args:
        cfg: a recipe, as composed by Hydra or as stored.
        folder: the checkpoint's folder. given: keys that the command line sets.
    """
    tree: Any = OmegaConf.to_container(OmegaConf.create(cfg))
    for section, key in (("reward", "function"), ("benchmark", "reward")):
        for name, entry in (tree.get(section) or {}).items():
            if isinstance(entry, dict):  # a reward without a function uses its entry's name
                entry[key] = entry.get(key) or (name if key == "function" else Benchmark.reward)
    yield from _refused(tree, Recipe, dataclasses.asdict(Recipe()), "", folder, given)


def _refused(
    value: Any, rule: Any, default: Any, key: str, folder: Path, given: Collection[str]
) -> Iterator[str]:
    if key in given or value == default or (value is None and key.rpartition(".")[0] in ENTRIES):
        return
    is_rule = inspect.isfunction(rule)
    is_computed = any("${" in str(text) for _, text in leaves({"": value}))
    if is_rule and not is_computed and rule(value, folder):
        return
    if not isinstance(value, dict):
        yield f"{key} = {as_written(value)}"
        return
    rules = rule if isinstance(rule, dict) else {}
    if isinstance(rule, type):
        fields = dataclasses.fields(rule)
        rules = {f.name: rule_of(f"{key}.{f.name}".lstrip("."), f) for f in fields}
        if rule in (Reward, Benchmark):
            rules["args"] = _arguments(value.get("function", value.get("reward")))
    if key in ENTRIES:
        default = dict.fromkeys(value, dataclasses.asdict(ENTRIES[key]()))
    for name, below in value.items():
        inner = rule if is_rule else rules.get(name, rules.get("*"))
        standard = default.get(name, ...) if isinstance(default, dict) else ...
        where = f"{key}.{name}" if key else str(name)
        yield from _refused(below, inner, standard, where, folder, given)
