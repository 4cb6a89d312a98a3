"""Keeps environment values that a recipe reads out of all files that a run writes.

`api_key: ${oc.env:NAME}` is stored and sent to trackers as this text, so that a resumed run reads
the variable again. Messages and logs also show the text instead of the value. They mask any
variable whose name marks it as secret, such as HF_TOKEN or OPENAI_API_KEY. Published files also
omit secrets that a recipe holds as plain text.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

SECRET = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD)(_|$)")  # matches names of secret variables
SECRET_KNOB = re.compile(  # matches the last part of a key
    r"(?i)(^|_)(api_?key|access_?key|secret|password|(api|auth|access|bearer|hf|hub)_?token)$"
)
SHORTEST = 6  # characters; shorter values are not masked
# Texts of rows, models, tools and exceptions may hold control sequences of a terminal, and
# characters that reverse the direction of the text after them. Line breaks and tabs stay.
_SUSPECT = re.compile(r"[^\n\t\x20-\x7e]")
_NO_TEXT = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # Unicode's categories of control and format characters
_JOINERS = "\u200c\u200d"  # format characters that belong to words of some languages

# Interpolations of the last parsed recipe: full key -> (value, interpolation).
_texts: dict[str, tuple[Any, str]] = {}
_shown: dict[str, str] = {}  # value -> its replacement in messages


def note(cfg: Any) -> None:
    """Records which knobs of a composed recipe are read from the environment."""
    _texts.clear()
    written = [(k, v) for k, v in leaves(OmegaConf.to_container(cfg)) if _is_interpolation(v)]
    for _, text in written:
        for name in re.findall(r"\$\{\s*oc\.env\s*:\s*['\"]?(\w+)", text):
            if len(value := os.environ.get(name, "")) >= SHORTEST:
                _shown[value] = f"${{oc.env:{name}}}"
    for key, text in written:
        try:
            value = OmegaConf.select(cfg, key)
        except OmegaConfBaseException:  # reported by the check of the recipe
            continue
        if "oc.env" in text or any(secret in str(value) for secret in _shown):
            _texts[key] = value, text


def as_text(tree: Any, prefix: str = "") -> Any:
    """Restores the interpolations in a recipe's values, or in a part of them.

    Args:
        prefix: full key of the part.
    """
    if prefix in _texts and tree == _texts[prefix][0]:
        return _texts[prefix][1]
    if isinstance(tree, dict):
        inner = f"{prefix}." if prefix else ""
        return {name: as_text(value, f"{inner}{name}") for name, value in tree.items()}
    if isinstance(tree, list):
        return [as_text(value, f"{prefix}[{i}]") for i, value in enumerate(tree)]
    return tree


def masked(text: str) -> str:
    """Masks the secret values in a message."""
    return masker()(text)


def masker() -> Callable[[str], str]:
    """Returns `masked` as a function for many strings, using the current environment."""
    secrets = {v: f"${n}" for n, v in os.environ.items() if SECRET.search(n) and len(v) >= SHORTEST}
    values = sorted((secrets | _shown).items(), key=lambda pair: -len(pair[0]))

    def mask(text: str) -> str:
        for value, shown in values:
            text = text.replace(value, shown)
        return text

    return mask


def printable(text: str) -> str:
    """Returns a string without secrets, and with control characters escaped as in Python."""
    return _SUSPECT.sub(lambda found: _escaped(found[0]), masked(text))


def _escaped(character: str) -> str:
    if character in _JOINERS or unicodedata.category(character) not in _NO_TEXT:
        return character
    return character.encode("unicode_escape").decode("ascii").replace("\\r", "\\x0d")


def plain_secrets(tree: Any) -> list[str]:
    """Returns the keys whose secrets a recipe holds as plain text."""
    return [key for key, value in leaves(tree) if _is_plain_secret(key, value)]


def publishable(tree: Any, key: str = "") -> Any:
    """Removes secrets and the user's home folder from a recipe's values, or a part of them.

    Args:
        key: full key of the part.
    """
    if isinstance(tree, dict):
        return {name: publishable(value, f"{key}.{name}") for name, value in tree.items()}
    if isinstance(tree, list):
        return [publishable(value, key) for value in tree]
    if _is_plain_secret(key, tree):
        return "(not shown)"
    if not isinstance(tree, str):
        return tree
    text, home = masked(tree), str(Path.home())
    return re.sub(rf"{re.escape(home)}(?=/|$)", "~", text) if len(home) > 1 else text


def publishable_command(words: Iterable[str]) -> list[str]:
    """Removes secrets and the user's home folder from a command line."""
    out = []
    for word in words:
        key, is_assignment, value = word.partition("=")
        out.append(f"{key}={publishable(value, key)}" if is_assignment else publishable(word))
    return out


def _is_plain_secret(key: str, value: Any) -> bool:
    is_text = isinstance(value, str) and bool(value) and not _is_interpolation(value)
    return is_text and SECRET_KNOB.search(key.rpartition(".")[2]) is not None


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values below mappings and lists, by their full keys: `a.b`, `a.c[0]`."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from leaves(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(tree, list):
        for i, value in enumerate(tree):
            yield from leaves(value, f"{prefix}[{i}]")
    else:
        yield prefix, tree


def _is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value
