"""Parses the words of a command, `grpo VERB key=value PATH`, into a dataclass of knobs.

A command declares its settings as fields with `knob(default, "sentence", ge=1)`:

    @dataclass
    class Settings:
        port: int = knob(8000, "Port to listen on.", ge=1, le=65535)
        columns: dict[str, str] = knob({}, "Column to rename, as columns.NEW=NAME.")

    own, rest = split(Settings, ["port=81", "columns.a=b", "recipe=x"])   # rest: ["recipe=x"]
    settings = parse(Settings, own)                 # Settings(port=81, columns={"a": "b"})

Strings are taken literally; numbers, switches and entries of `dict[str, Any]` are YAML.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_cli.config.knob import TYPES, allowed, as_written, violation
from grpo_cli.config.recipe import Recipe
from grpo_cli.errors import UserError, listed, nearest

S = TypeVar("S")

RECIPE_KEYS = frozenset(f.name for f in dataclasses.fields(Recipe))


def split(
    kind: type, argv: Iterable[str], skip: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Separates the words that set fields of `kind` from all others: recipe keys, options, paths.

    Args:
        skip: fields that this command line cannot set.
    """
    fields = _fields(kind)
    own: list[str] = []
    rest: list[str] = []
    for word in argv:
        key = word.partition("=")[0]
        name, dot, _ = key.partition(".")
        is_own = name in fields and name not in skip and (not dot or _is_mapping(fields[name]))
        (own if is_own else rest).append(word)
    return own, rest


def recipe_key(word: str) -> str:
    """Returns the first part of an override's key: `loss` for `+loss.beta=0`."""
    return re.split(r"[.@=]", word.lstrip("+~"), maxsplit=1)[0]


def check_recipe_words(kind: type, words: Iterable[str]) -> None:
    """Checks that words are keys of a recipe.

    Raises:
        UserError: a word is not; the message has the nearest name.
    """
    for word in words:
        if recipe_key(word) not in RECIPE_KEYS:
            raise UserError(unknown(kind, word, RECIPE_KEYS, " and the keys of the recipe"))


def unknown(kind: type, word: str, others: Iterable[str] = (), besides: str = "") -> str:
    """Returns the message about a word that is neither a field of `kind` nor in `others`.

    Args:
        besides: description of `others` in the message.
    """
    key, known = word.partition("=")[0], _fields(kind)
    hint = nearest(key, {*known, *others})
    return f"{key}: there is no such word; there are {listed(known)}{besides}.{hint}"


def option(name: str) -> str:
    """Formats a field's name as an option: `--min-free-gb`."""
    return f"--{name.replace('_', '-')}"


def without_dashes(
    argv: Sequence[str], switches: Collection[str], options: Collection[str] = ()
) -> list[str]:
    """Rewrites options as words: `--free-gb=3` and `--free-gb 3` become `free_gb=3`.

    Switches are true without a value. The words in `options` stay as they are.

    Raises:
        UserError: an option lacks its value.
    """
    words, given = list[str](), list(argv)
    while given:
        word = given.pop(0)
        name, equals, value = word.partition("=")
        if word.startswith("--") and name not in options:
            key = name[2:].replace("-", "_")
            if not equals and key in switches:
                value = given.pop(0) if given and given[0].lower() in ("true", "false") else "true"
            elif not equals:
                if not given or given[0].startswith("--"):
                    raise UserError(f"{name}: lacks a value; write {name}=VALUE.")
                value = given.pop(0)
            word = f"{key}={value}"
        words.append(word)
    return words


def options_as_words(kind: type, argv: Sequence[str], command: str) -> list[str]:
    """Rewrites the options of a command that takes no recipe; see `without_dashes`.

    Raises:
        UserError: an option is not a field of `kind`, or lacks its value.
    """
    fields = _fields(kind)
    for argument in argv:
        given = argument.partition("=")[0]
        if given.startswith("-") and given.removeprefix("--").replace("-", "_") not in fields:
            known = [option(f) for f in fields]
            raise UserError(
                f"{command}: {given}: there is no such option; there are {listed(known)}."
                f"{nearest(given, known)}"
            )
    return without_dashes(argv, [name for name, f in fields.items() if _base(f) == "bool"])


def parse(kind: type[S], words: Iterable[str], shown: Callable[[str], str] = str) -> S:
    """Parses the words found by `split` into checked settings.

    Args:
        shown: formats keys in messages; `option` if the keys are options.

    Raises:
        UserError: a word that does not exist, has no value or is given twice; a value of another
            type or out of its range.
    """
    fields = _fields(kind)
    settings = kind()
    seen: set[str] = set()
    for word in words:
        key, equals, value = word.partition("=")
        name, _, entry = key.partition(".")
        if name not in fields:
            raise UserError(unknown(kind, word))
        f = fields[name]
        if key in seen and not _base(f).startswith("list"):
            raise UserError(f"{shown(key)}: is given twice.")
        seen.add(key)
        if not equals or not (value or f.default == ""):
            raise UserError(f"{shown(key)}: lacks a value; write {shown(key)}=VALUE.")
        if _base(f) == "str":
            is_null = value == "null" and "None" in str(f.type)
            setattr(settings, name, None if is_null else value)
        elif _base(f) == "list[str]":
            getattr(settings, name).append(value)
        elif _base(f) == "dict[str, str]":
            if not entry:  # `columns=a`, `columns.=a`
                raise UserError(f"{word}: write {name}.NAME=VALUE.")
            getattr(settings, name)[entry] = value
        else:
            settings = _merged(settings, word, f, shown(key))
    for name, f in fields.items():
        if (value := getattr(settings, name)) is not None:
            for problem in violation(shown(name), value, f.metadata):
                raise UserError(problem)
    return settings


def parse_with_runs(
    kind: type[S], argv: Sequence[str], command: str, most: int = 1
) -> tuple[list[str], S]:
    """Returns the runs, one to `most`, and the options of a command line.

    Raises:
        UserError: no run or too many, or a mistake in an option.
    """
    own, rest = split(kind, options_as_words(kind, argv, command))
    settings = parse(kind, own, option)
    if not 1 <= len(rest) <= most:
        given, wanted = " ".join(rest) or "nothing", "one run" + (" or two" if most > 1 else "")
        raise UserError(f"{command}: give {wanted}, such as outputs/NAME; got {given}.")
    return rest, settings


def _merged(settings: S, word: str, f: dataclasses.Field[Any], key: str) -> S:
    try:
        typed = OmegaConf.merge(OmegaConf.structured(settings), OmegaConf.from_dotlist([word]))
        return cast(S, OmegaConf.to_object(typed))
    except OmegaConfBaseException as error:
        value = word.partition("=")[2]
        raise UserError(f"{key} = {value}: must be {expected(f)}.") from error
    except (yaml.YAMLError, AttributeError, TypeError) as error:
        raise UserError(f"{word}: the value is not YAML.") from error


def described(kind: type, dashes: bool = False, names: Collection[str] = ()) -> str:
    """Formats the fields of `kind` for --help, one per line: name, default, sentence, choices.

    Args:
        dashes: write the names as options.
        names: the fields to describe; (): all.
    """
    lines: list[str] = []
    for name, f in _fields(kind).items():
        if names and name not in names:
            continue
        doc = f.metadata["doc"]
        if choices := f.metadata["choices"]:
            doc += f" ({', '.join(choices)})"
        head = f"  {option(name) if dashes else name}{_value_shown(f)}"
        lines += textwrap.wrap(
            f"{head:26} {doc}", 80, subsequent_indent=" " * 27, break_on_hyphens=False
        )
    return "\n".join(lines) + "\n"


def _value_shown(f: dataclasses.Field[Any]) -> str:
    if _is_mapping(f):
        return ".NAME=VALUE"
    if f.default is dataclasses.MISSING or (
        f.default in (None, "") and "null" not in f.metadata["doc"]
    ):
        return "=N" if _base(f) in ("int", "float") else "=VALUE"
    shown = f"{f.default:g}" if isinstance(f.default, float) else as_written(f.default)
    return f"={shown}"


def _fields(kind: type) -> dict[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(kind)}


def _base(f: dataclasses.Field[Any]) -> str:
    """Returns a field's type as text, without `| None`."""
    text = f.type if isinstance(f.type, str) else inspect.formatannotation(f.type)
    return text.removesuffix(" | None")


def _is_mapping(f: dataclasses.Field[Any]) -> bool:
    return _base(f).startswith("dict")


def expected(f: dataclasses.Field[Any]) -> str:
    """Describes the values that a field accepts: its type, and its range or choices."""
    if _is_mapping(f):
        return f"a mapping; write {f.name}.NAME=VALUE"
    return ", ".join(filter(None, [TYPES.get(_base(f), "text"), allowed(f.metadata)]))
