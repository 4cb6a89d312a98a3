"""Finds the places that set a value of a composed recipe, from the default to the command line.

For example, the origins of `loss.epsilon_high` in `recipe=math_qwen loss.epsilon_high=0.3` are

    Origin("default", None)
    Origin("recipes/loss/dapo.yaml, line 10", 0.28)
    Origin("command line", 0.3)

of which the last one counts.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf

from grpo_cli.config.compose import RECIPES, STORED
from grpo_cli.config.keys import entry_field, flat
from grpo_cli.config.recipe import Recipe
from grpo_cli.files import read_text

NOTHING = dataclasses.MISSING
SHIPPED = Path(str(importlib.resources.files(RECIPES)))


@dataclass(frozen=True)
class Origin:
    """A place that sets a value."""

    place: str  # "default", "command line", or a file and its line
    value: Any  # as written there


@dataclass(frozen=True)
class RecipeLayer:
    """A YAML file of the composition, or the defaults of a group's choice."""

    path: Path | None  # None for defaults
    package: list[str]  # keys under which the file's values are placed; [] for a recipe
    root: yaml.Node | None

    def find(self, key: list[str]) -> Origin | None:
        """Returns the place in the file that sets a key; None if the file does not set it."""
        depth = len(self.package)
        if key[:depth] != self.package:
            return None
        node, line, rest = self.root, 0, key[depth:]
        while rest:
            for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
                parts = name.value.split(".")  # several parts: names may have dots
                if rest[: len(parts)] == parts:
                    node, line, rest = value, name.start_mark.line + 1, rest[len(parts) :]
                    break
            else:
                return None
        place = "default" if self.path is None else f"{shown(self.path)}, line {line}"
        return Origin(place, yaml.SafeLoader("").construct_document(node))


@dataclass(frozen=True)
class Composition:
    """The files and words that compose a recipe, in order of increasing priority."""

    layers: list[RecipeLayer]
    overrides: list[Any]  # of the command line, parsed by Hydra

    def origins(self, key: str) -> list[Origin]:
        """Returns the places that set a key; the last one counts."""
        parts, found = key.split("."), [Origin("default", default_of(key))]
        replaces_rewards = any(o.key_or_group == "reward" for o in self.overrides)
        for layer in self.layers:
            if parts[0] == "reward" and replaces_rewards and not layer.package:
                continue
            origin = layer.find(parts)
            if origin is not None and (layer.path or len(found) > 1):
                found.append(origin)
        for override in self.overrides:
            name = override.key_or_group
            if override.is_delete() or not f"{key}.".startswith(f"{name}."):
                continue
            value = override.value()
            for part in key.removeprefix(name).split(".")[1:]:
                value = value.get(part, NOTHING) if isinstance(value, dict) else NOTHING
            if value is not NOTHING:
                found.append(Origin("command line", value))
        return found


def default_of(key: str) -> Any:
    """Returns the default of a key; NOTHING if it has none, such as a reward's argument."""
    if (entry := entry_field(key)) is not None:
        return NOTHING if entry[1] else entry[0].default
    return flat(dataclasses.asdict(Recipe())).get(key, NOTHING)


def composition(file: Path | None = None) -> Composition:
    """Returns the files and overrides of the recipe that Hydra is composing.

    Args:
        file: the recipe's file, if it lies outside the package.
    """
    job = HydraConfig.get()
    loader = GlobalHydra.instance().config_loader()
    words: Any = OmegaConf.to_container(job.overrides.task, resolve=False)
    defaults = loader.compute_defaults_list(
        job.job.config_name, [*job.overrides.hydra, *words], RunMode.RUN
    )
    layers = [_layer(d, file) for d in defaults.defaults if d.config_path]
    overrides = OverridesParser.create().parse_overrides(words)
    return Composition([*filter(None, layers)], overrides)


def _layer(default: Any, file: Path | None) -> RecipeLayer | None:
    """Converts an entry of Hydra's defaults list to a layer; None if it sets no values."""
    name: str = default.config_path
    package = [part for part in (default.package or "").split(".") if part]
    if name.endswith("/_defaults"):
        text = OmegaConf.to_yaml(ConfigStore.instance().load(f"{name}.yaml").node)
        return RecipeLayer(None, package, yaml.compose(text))
    path = file if name == STORED else _file_of(name)
    if path is None:
        return None
    root = yaml.compose(read_text(path), yaml.SafeLoader)
    return RecipeLayer(path, package, root)


def _file_of(name: str) -> Path | None:
    """Returns the file of a config in Hydra's search path; None for a config of Hydra's store."""
    for source in HydraConfig.get().runtime.config_sources:
        if source.schema == "file" or source.path == RECIPES:
            folder = SHIPPED if source.path == RECIPES else Path(source.path)
            if (path := folder / f"{name}.yaml").is_file():
                return path
    return None


def shown(path: Path) -> str:
    """Formats a path: `recipes/...` for shipped files, otherwise relative to the working folder."""
    is_shipped = path.is_relative_to(SHIPPED)
    return f"recipes/{path.relative_to(SHIPPED)}" if is_shipped else os.path.relpath(path)
