"""Reads a command line that composes a recipe: its file, options and overrides."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from grpo_cli.config.keys import KNOBS, entry_field
from grpo_cli.config.words import without_dashes
from grpo_cli.errors import UserError, listed, nearest

DEFAULT_RECIPE = "chat"
# Options that stay options: Hydra's, and the switches of verbs. Any other --NAME is a key.
OPTIONS = (
    "--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun",
    "--info", "--config-dir", "--config-name", "--config-path", "--json", "--submit",
)  # fmt: skip
SHORT_OPTIONS = ("-h", "-c", "-p", "-r", "-m", "-i", "-cd", "-cn", "-cp")
VALUED_OPTIONS = ("--cfg", "-c", "--package", "-p", "--info", "-i", "--config-dir", "-cd")


def recipe_files() -> list[Path]:
    """Returns the files of the shipped recipes."""
    import grpo_cli.recipes

    return sorted(p for folder in grpo_cli.recipes.__path__ for p in Path(folder).glob("*.yaml"))


def split_recipe(
    argv: Iterable[str], default: str = DEFAULT_RECIPE
) -> tuple[Path | None, str, list[str]]:
    """Extracts recipe=... and --config-dir from a command line.

    Returns:
        (folder of an external recipe or None, the recipe's name, the other arguments).

    Raises:
        UserError: no such recipe, file or folder.
    """
    name, folder, rest = default, None, []
    arguments = iter(argv)
    for argument in arguments:
        if argument.startswith("recipe="):
            name = argument.removeprefix("recipe=")
        elif argument in ("--config-dir", "-cd"):
            folder = Path(next(arguments, ""))
        elif argument.startswith("--config-dir="):
            folder = Path(argument.removeprefix("--config-dir="))
        else:
            rest.append(argument)
    if folder is not None:
        folder = folder.expanduser().resolve()
        if not folder.is_dir():
            raise UserError(f"--config-dir {folder}: there is no such folder.")
    if name.endswith((".yaml", ".yml")) or "/" in name:
        path = Path(name).expanduser()
        if (path / "recipe.yaml").is_file():
            raise UserError(
                f"recipe = {name}: is the folder of a run; recipe={path / 'recipe.yaml'} is its "
                f"recipe, and resume={name} continues it."
            )
        if not path.is_file():
            beside = [p.name for p in path.parent.glob("*.yaml")]
            raise UserError(f"recipe = {name}: there is no such file.{nearest(path.name, beside)}")
        path = path.resolve()
        return path.parent, path.stem, rest
    own = sorted(p.stem for p in folder.glob("*.yaml")) if folder is not None else []
    known = [*own, *(p.stem for p in recipe_files())]
    if name not in known and name != default:
        raise UserError(
            f"recipe = {name}: there is no such recipe; there are {listed(known)}, "
            f"or give a file as recipe=./my.yaml.{nearest(name, known)}"
        )
    return folder, name, rest


def as_words(argv: Iterable[str]) -> list[str]:
    """Rewrites `--key value` and `--key=value` as key=value, and a recipe's file as recipe=FILE.

    `--config FILE` is a recipe's file too. A switch needs no value.
    """
    switches = {key for key, f in KNOBS.items() if f.type == "bool"}
    switches |= {"trust", "eager", "check", "dataset.chat", "bf16", "use_peft", "use_vllm"}
    file = re.compile(r"config=|(?=[^=]+\.ya?ml$)")  # --config FILE, or FILE
    return [
        f"recipe={word.removeprefix('config=')}" if file.match(word) else word
        for word in without_dashes(list(argv), switches, OPTIONS)
    ]


def as_text(override: str) -> str:
    """Quotes an override's value for Hydra if its knob takes text; null stays null.

    Hydra would refuse `~/data`, umlauts and equal signs, and take [a] for a list.
    """
    key, equals, value = override.partition("=")
    name = key.lstrip("+~")
    entry = entry_field(name)
    f = KNOBS.get(name) or (entry[0] if entry else KNOBS.get(name.rpartition(".")[0]))
    kind = str(f.type).removesuffix(" | None") if f else ""
    is_text = kind == "str" if name in KNOBS or entry else kind == "dict[str, str]"
    if not (equals and is_text) or value == "null" or re.fullmatch(r"'.*'|\".*\"", value, re.S):
        return override
    return f"{key}={quoted(value)}"


def quoted(text: str) -> str:
    """Returns a text in quotes, as Hydra's grammar has them."""
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text)
    return f"'{escaped}'"


def split_options(argv: Iterable[str], once: str = "") -> tuple[list[str], list[str]]:
    """Splits off options with their values; Hydra's parser wants the overrides in one stretch.

    A command that refuses sweeps says what it does `once`.
    """
    options: list[str] = []
    rest: list[str] = []
    for argument in as_words(argv):
        is_value = bool(options) and options[-1] in VALUED_OPTIONS and "=" not in argument
        (options if argument.startswith("-") or is_value else rest).append(argument)
    if once and {"-m", "--multirun"} & {*options}:
        raise UserError(f"{once}; -m is for grpo train and grpo eval.")
    return options, rest
