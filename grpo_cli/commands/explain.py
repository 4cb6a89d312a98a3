"""`grpo explain KEY`: prints the value of a knob in a recipe, and where it comes from."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from typing import Any

import yaml
from omegaconf import DictConfig

from grpo_cli.config import origins, parsing
from grpo_cli.config.command_line import split_options, split_recipe
from grpo_cli.config.compose import compose_and_call
from grpo_cli.config.interpolation import masked
from grpo_cli.config.keys import KNOBS, entry_field, flat
from grpo_cli.config.knob import as_written
from grpo_cli.config.origins import NOTHING, Composition
from grpo_cli.config.words import expected
from grpo_cli.errors import UserError

HELP = """\
grpo explain [recipe=NAME] [key=value ...] [KEY ...]

Prints the value of a knob, what it does, and the place that sets it: the
default, a file of a group, the recipe, or the command line; and below it the
places that it takes precedence over.

  KEY                      Knob or section; without one, every knob that
                           something sets.
"""


def main(argv: list[str]) -> None:
    """Checks the command line and prints the requested knobs."""
    options, rest = split_options(argv)
    keys = [w for w in rest if "=" not in w and not w.startswith("~")]
    words = [w for w in options + rest if w not in keys]
    folder, name, _ = split_recipe(words)

    def task(cfg: DictConfig) -> None:
        values = flat(dataclasses.asdict(parsing.parse(cfg, complete=False)))
        found = origins.composition(None if folder is None else folder / f"{name}.yaml")
        lines: list[str] = []
        if not keys:
            lines += table(values, found, [k for k in values if len(found.origins(k)) > 1])
        for key in keys:
            within = [k for k in values if k.startswith(f"{key}.")]
            lines += table(values, found, within) if within else one(values, found, key)
        print(masked("\n".join(lines)))

    compose_and_call(words, task)


def one(values: dict[str, Any], composition: Composition, key: str) -> Iterator[str]:
    """Yields the lines about one knob.

    Raises:
        UserError: there is no such key.
    """
    entry = entry_field(key)
    field = entry[0] if entry is not None and not entry[1] else KNOBS.get(key)
    if field is None and key not in values:
        raise UserError(parsing.no_such_key(key))
    last, *before = reversed(composition.origins(key))
    # `values` lacks the knobs of an entry that the recipe does not have.
    yield f"{key} = {written(values.get(key, {} if last.value is NOTHING else last.value))}\n"
    if field is not None:
        doc = textwrap.fill(field.metadata["doc"], 96, break_on_hyphens=False)
        yield textwrap.indent(doc, "  ")
        yield f"  takes        {expected(field)}{' or null' if 'None' in str(field.type) else ''}\n"
    yield f"  set by       {last.place}: {written(last.value)}"
    for origin in (o for o in before if o.value is not NOTHING):
        yield f"  in place of  {origin.place}: {written(origin.value)}"


def table(values: dict[str, Any], composition: Composition, keys: list[str]) -> Iterator[str]:
    """Yields a table of knobs: key, value, and the place that sets it."""
    rows = [("key", "value", "set by")]
    for key in keys:
        shown = textwrap.shorten(written(values[key]), 40, placeholder="…")
        rows.append((key, shown, composition.origins(key)[-1].place))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for key, value, by in rows:
        yield f"{key:{widths[0]}}  {value:{widths[1]}}  {by}"


def written(value: Any) -> str:
    """Returns a value as YAML writes it, on one line."""
    if value is NOTHING:
        return "none"
    if isinstance(value, (list, dict)):
        return yaml.safe_dump(value, default_flow_style=True, width=9999).strip()
    return as_written(value).replace("\n", "\\n") or "''"
