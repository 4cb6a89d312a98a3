"""Finds where the values of a composed recipe come from: default, group file, recipe, command line.

For example, the origins of `loss.epsilon_high` in `recipe=math_qwen loss.epsilon_high=0.3` are

    Origin("default", None)
    Origin("recipes/loss/dapo.yaml, line 9", 0.28, "loss = dapo: recipes/math_qwen.yaml, line 7")
    Origin("command line", 0.3, "loss.epsilon_high=0.3")

of which the last one counts. Where values are mappings, each origin adds entries to those before.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf

from grpo_cli.config.compose import RECIPES
from grpo_cli.config.schema import Recipe, entry_field

NOTHING = object()


@dataclass(frozen=True)
class Origin:
    """A place that sets a value."""

    place: str  # "default", "command line", or a file and its line
    value: Any  # as it is written there
    why: str = ""  # why a file of a group is read, or the words of the command line


@dataclass(frozen=True)
class Layer:
    """A YAML file of the composition, or the defaults that a choice of a group begins from."""

    path: Path | None  # None: defaults
    package: tuple[str, ...]  # the keys below which its values are; () for a recipe
    root: yaml.Node | None
    tree: dict[str, Any]
    choice: str = ""  # group = choice, for a file of a group
    why: str = ""  # the place that chose it

    def find(self, key: Sequence[str]) -> Origin | None:
        """Returns what the file sets a key to; None if it does not."""
        if tuple(key[: len(self.package)]) != self.package:
            return None
        value: Any = self.tree
        rest, line = list(key[len(self.package) :]), 0
        if self.path is None:
            for name in rest:
                if not isinstance(value, dict) or name not in value:
                    return None
                value = value[name]
            return Origin("default", value, f"{self.choice} begins from the defaults")
        found = self.root
        while rest and value is not None:  # all that is below null is null, too
            entry = _entry(found, rest)
            if entry is None:
                return None
            name, found, line, rest = entry
            value = value[name]
        place = f"{shown(self.path)}, line {line}" if line else shown(self.path)
        return Origin(place, value, ": ".join(filter(None, [self.choice, self.why])))


def _entry(node: yaml.Node | None, rest: list[str]) -> tuple[str, yaml.Node, int, list[str]] | None:
    """Finds an entry of a mapping whose key is the next part of `rest`, or several with dots.

    Returns:
        (its key, its value, its line, what is left of `rest`).
    """
    if not isinstance(node, yaml.MappingNode):
        return None
    for key, value in node.value:
        parts = str(key.value).split(".")
        if rest[: len(parts)] == parts:
            return key.value, value, key.start_mark.line + 1, rest[len(parts) :]
    return None


@dataclass(frozen=True)
class Composition:
    """The files and the words that a recipe is composed of, in the order in which they count."""

    layers: list[Layer]
    words: list[str]  # of the command line
    replaces_rewards: bool = False  # whether `reward=` on the command line drops the recipe's own
    overrides: list[Any] = field(default_factory=list)  # the words, parsed

    def origins(self, key: str) -> list[Origin]:
        """Returns what sets a key, or a part of its mapping; the last one counts."""
        parts, found = key.split("."), [Origin("default", default_of(key))]
        for layer in self.layers:
            if parts[0] == "reward" and self.replaces_rewards and not layer.package:
                continue
            origin = layer.find(parts)
            if origin is not None and (layer.path is not None or len(found) > 1):
                found.append(origin)
        return [*found, *self._given(key)]

    def _given(self, key: str) -> Iterator[Origin]:
        for given, override in zip(self.words, self.overrides, strict=True):
            word = given.lstrip("+")
            name = override.key_or_group
            if override.is_delete():
                if f"{key}.".startswith(f"{name}."):
                    yield Origin("command line", None, word)
                continue
            value = override.value()
            if isinstance(value, list | dict):
                value = OmegaConf.to_container(OmegaConf.create(value))
            if "." not in name and name in self._groups and not isinstance(value, dict):
                continue
            if name.startswith(f"{key}."):  # one entry of the mapping
                yield Origin("command line", {name.removeprefix(f"{key}."): value}, word)
            elif f"{key}.".startswith(f"{name}."):
                for part in key.removeprefix(name).split(".")[1:]:
                    value = value.get(part, NOTHING) if isinstance(value, dict) else NOTHING
                if value is not NOTHING:
                    yield Origin("command line", value, word)

    @property
    def _groups(self) -> set[str]:
        return {layer.choice.partition(" = ")[0] for layer in self.layers if layer.choice}


def default_of(key: str) -> Any:
    """Returns the default of a key; NOTHING if it has none, as an argument of a reward."""
    value: Any = Recipe()
    parts = key.split(".")
    if (entry := entry_field(key)) is not None:
        declared, parts = entry
        factory = declared.default_factory
        value = declared.default if factory is dataclasses.MISSING else factory()
    for part in parts:
        if isinstance(value, dict):
            value = value.get(part, NOTHING)
        elif value is not None:
            value = getattr(value, part, NOTHING)
    is_section = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return dataclasses.asdict(value) if is_section else value  # type: ignore[arg-type]


def composition(stored: Path | None = None) -> Composition:
    """Returns the files and words of the recipe that Hydra composes at the moment.

    Args:
        stored: the file of a recipe that a run has stored, which is composed under today's keys.
    """
    job = HydraConfig.get()
    loader = GlobalHydra.instance().config_loader()
    words: Any = OmegaConf.to_container(job.overrides.task, resolve=False)
    overrides = OverridesParser.create().parse_overrides(words)
    defaults = loader.compute_defaults_list(
        job.job.config_name, [*job.overrides.hydra, *words], RunMode.RUN
    )
    layers = [
        layer
        for default in defaults.defaults
        if default.config_path and not default.config_path.startswith("hydra")
        and (layer := _layer(default, stored)) is not None
    ]  # fmt: skip
    layers = [
        dataclasses.replace(layer, why=_chooser(layer, layers, words)) if layer.root else layer
        for layer in layers
    ]
    replaces = any(word.startswith("reward=") for word in words)
    return Composition(layers, words, replaces, overrides)


def _layer(default: Any, stored: Path | None) -> Layer | None:
    """Returns a layer of Hydra's list of defaults; None for what sets nothing of its own."""
    name: str = default.config_path
    package = tuple(filter(None, (default.package or "").split(".")))
    group, _, choice = name.rpartition("/")
    if choice == "_defaults":
        node = ConfigStore.instance().load(f"{name}.yaml").node
        tree: Any = OmegaConf.to_container(node, enum_to_str=True)
        return Layer(None, package, None, tree, group)
    path = stored if stored is not None and default.primary else _file_of(name)
    if path is None:
        return None
    text = path.read_text(encoding="utf-8")
    tree = OmegaConf.to_container(OmegaConf.create(text)) if text.strip() else {}
    root = yaml.compose(text, yaml.SafeLoader)
    return Layer(path, package, root, tree, f"{group} = {choice}" if group else "")


def _file_of(name: str) -> Path | None:
    """Returns the file of a config in Hydra's search path; None for one of Hydra's store."""
    for source in HydraConfig.get().runtime.config_sources:
        if source.schema == "pkg" and source.path == RECIPES:
            folder = Path(str(importlib.resources.files(RECIPES)))
        elif source.schema == "file":
            folder = Path(source.path)
        else:
            continue
        if (path := folder / f"{name}.yaml").is_file():
            return path
    return None


def _chooser(layer: Layer, layers: Sequence[Layer], words: Sequence[str]) -> str:
    """Returns the place that chose a file of a group: a word of the command line, or a line."""
    group, _, choice = layer.choice.partition(" = ")
    if not group:
        return ""
    for word in reversed(words):
        key, _, chosen = word.lstrip("+").partition("=")
        if key.partition("@")[0] == group and choice in re.split(r"[\[\],\s]+", chosen):
            return f"command line, {word}"
    for other in reversed(layers):
        for line, text in enumerate(_defaults(other), start=1):
            named = re.match(rf"[\s\-]*(override\s+)?/?{group}(@\S+)?\s*:", text)
            nested = group.rpartition("/")[2] if other.choice else ""
            within = nested and re.match(rf"[\s\-]*(override\s+)?{nested}(@\S+)?\s*:", text)
            if not other.path or not (named or within):
                continue
            if re.search(rf"\b{re.escape(choice)}\b", text):
                return f"{shown(other.path)}, line {line}"
    return ""


def _defaults(layer: Layer) -> list[str]:
    """Returns the lines of a file up to the end of its list of defaults."""
    entry = _entry(layer.root, ["defaults"])
    if entry is None or layer.path is None:
        return []
    return layer.path.read_text(encoding="utf-8").splitlines()[: entry[1].end_mark.line + 1]


def shown(path: Path) -> str:
    """Returns a path for people: `recipes/...` for a shipped file, else from where they are."""
    shipped = Path(str(importlib.resources.files(RECIPES)))
    if path.is_relative_to(shipped):
        return str(Path("recipes") / path.relative_to(shipped))
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
