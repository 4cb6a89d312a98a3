"""A recipe as it is kept beside a run, and what has changed since."""

from __future__ import annotations

import dataclasses
from typing import Any

import yaml

from grpo_cli.config.compose import recipe_files
from grpo_cli.config.interpolation import as_text
from grpo_cli.config.renamed import translate
from grpo_cli.config.schema import Recipe


def as_yaml(recipe: Recipe) -> str:
    """Returns the recipe with every knob spelt out, as a file that `recipe=FILE` reads."""
    # Groups come after the values, so that one chosen on the command line wins over what is stored.
    defaults: list[Any] = ["schema", "_self_", *({group: None} for group in groups())]
    values = as_text(dataclasses.asdict(recipe))
    # The stored run's folder is not the next one's.
    for own in ("output_dir", "overwrite", "resume"):
        del values[own]
    values["schedules"] = _by_section(values["schedules"])
    text: str = yaml.safe_dump(
        {"defaults": defaults, **values}, sort_keys=False, allow_unicode=True
    )
    return text


def _by_section(schedules: dict[str, Any]) -> dict[str, Any]:
    """Returns {loss.beta: …} as {loss: {beta: …}}, which an override can reach."""
    out: dict[str, Any] = {}
    for key, schedule in schedules.items():
        section, _, name = key.partition(".")
        out.setdefault(section, {})[name] = schedule
    return out


def groups() -> list[str]:
    """Returns the config groups that ship with the tool."""
    folders = (p for p in recipe_files()[0].parent.iterdir() if p.is_dir())
    return sorted(p.name for p in folders if any(p.glob("*.yaml")))


def differences(stored: dict[str, Any], recipe: Recipe) -> list[str]:
    """Returns the knobs that differ between a stored recipe and this one, as `key: old -> new`.

    A knob that an earlier version did not have was as its default is now.
    """
    defaults = _flat(as_text(dataclasses.asdict(Recipe())))
    old, new = defaults | _flat(translate(stored)), _flat(as_text(dataclasses.asdict(recipe)))
    skip = ("output_dir", "overwrite", "resume", "defaults", "description")
    return [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if not key.startswith(skip) and old.get(key) != new.get(key)
    ]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            out |= _flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out
