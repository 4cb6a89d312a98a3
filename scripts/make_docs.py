"""Writes the tables of knobs in docs/recipes.md from grpo_cli/config.py.

python scripts/make_docs.py            write it anew
python scripts/make_docs.py --check    only say whether it is up to date (exit code 1: it is not)
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from grpo_cli import config  # noqa: E402

PAGE = ROOT / "docs" / "recipes.md"
BEGIN, END = "<!-- knobs: made by scripts/make_docs.py -->", "<!-- end of knobs -->"
KINDS = {
    "bool": "true, false",
    "int": "whole number",
    "float": "number",
    "str": "text",
    "list[float]": "numbers",
    "list[str]": "texts",
    "dict[str, str]": "mapping of names to names",
    "dict[str, Any]": "mapping",
}
# Mappings whose names are the user's own, or a knob's.
MAPPINGS = {
    "reward": ("reward.NAME", config.Reward),
    "schedules": ("schedules.KEY", config.Schedule),
}

Field = dataclasses.Field[Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the tables of knobs in docs/recipes.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when stale")
    check: bool = parser.parse_args().check
    old = PAGE.read_text(encoding="utf-8")
    new = renewed(old)
    if check and new != old:
        sys.exit(f"{PAGE.relative_to(ROOT)} is not up to date; run make docs")
    if not check:
        PAGE.write_text(new, encoding="utf-8")


def renewed(page: str) -> str:
    """The page with what stands between its two marks written anew."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"the page must hold {BEGIN}"
    assert end, f"the page must hold {END}"
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def tables() -> str:
    """One table for each section of a recipe, the recipe's own knobs first."""
    parts = []
    for name, kind in sections():
        prefix = f"{name}." if name else ""
        rows = [row(prefix + f.name, f) for f in dataclasses.fields(kind) if is_knob(f)]
        heading = f"### {name or 'The run'}\n\n{(kind.__doc__ or '').splitlines()[0]}\n\n"
        header = "| key | default | allowed | what |\n| --- | --- | --- | --- |\n"
        parts.append(heading + header + "".join(rows))
    return "\n".join(parts)


def sections() -> Iterator[tuple[str, Any]]:
    """(key, dataclass) of each section; of a mapping, one key that stands for every entry."""
    yield "", config.Recipe
    for key, field in config.knobs():
        if section_of(field) is not None:
            yield key, section_of(field)
        elif key in MAPPINGS:
            yield MAPPINGS[key]


def section_of(field: Field) -> Any:
    """The dataclass that a field holds, or None."""
    kind = getattr(config, str(field.type).removesuffix(" | None"), None)
    return kind if dataclasses.is_dataclass(kind) else None


def is_knob(field: Field) -> bool:
    """Whether it has a value of its own: a section that may be null has."""
    return section_of(field) is None or field.default is None


def row(key: str, field: Field) -> str:
    what = " ".join(part for part in (field.metadata["doc"], read_if(field)) if part)
    cells = f"`{key}`", default(field), allowed(field), what
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def read_if(field: Field) -> str:
    """When a knob is read, as a sentence; "" if it always is."""
    if not field.metadata["read_if"]:
        return ""
    other, *values = field.metadata["read_if"]
    is_flag = dict(config.knobs())[other].type == "bool"
    if is_flag or values:
        return f"Only with `{other}` = {listed(values) if values else 'true'}."
    return f"Only when `{other}` is set."


def listed(values: Sequence[str]) -> str:
    """`a, b or c`."""
    *most, last = values
    return f"{', '.join(most)} or {last}" if most else last


def default(field: Field) -> str:
    """A knob's default as YAML writes it."""
    value = field.default
    if value is dataclasses.MISSING:
        assert field.default_factory is not dataclasses.MISSING
        value = field.default_factory()
    if value == "":
        return "empty"
    text = "null" if value is None else str(value)
    return f"`{text.lower() if isinstance(value, bool) else text}`"


def allowed(field: Field) -> str:
    """What a knob accepts: its range where it has one, after the kind of value."""
    kind = str(field.type)
    null = " or null" if kind.endswith(" | None") else ""
    kind = KINDS.get(kind.removesuffix(" | None"), "mapping")
    limits = config.allowed(field)
    if field.metadata.get("choices"):
        return limits.removeprefix("one of ") + null
    return " ".join(part for part in (kind, limits) if part) + null


if __name__ == "__main__":
    main()
