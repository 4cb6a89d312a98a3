"""Loads the rows of a dataset from local data or from the hub, and checks them.

Nothing here imports torch or transformers: a mistake in the data is reported before they load.
"""

from __future__ import annotations

import dataclasses
import random
import re
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_cli.config.sources import local_path
from grpo_cli.data import files
from grpo_cli.data.files import load_local
from grpo_cli.data.settings import PROMPT_COLUMNS, Dataset, MixturePart, NamedRows
from grpo_cli.errors import UserError, listed, nearest
from grpo_cli.files import reason

DATASET = "dataset"  # column with the data set's name in a mixture


@dataclass(frozen=True)
class Rows:
    """The rows of one split, and their source for error messages."""

    source: str
    columns: list[str]
    rows: Sequence[dict[str, Any]]
    lines: Sequence[int] | None = None  # line numbers, if only some rows of the source

    def line(self, row: int) -> int:
        """Returns a row's line number in the source, counted from 0."""
        return row if self.lines is None else self.lines[row]

    def column(self, name: str) -> Sequence[Any]:
        """Returns a column's values without reading other columns; None where it is missing."""
        if isinstance(self.rows, list):
            return [row.get(name) for row in self.rows]
        if name not in self.columns:
            return [None] * len(self.rows)
        return self.rows[name][:]  # type: ignore[call-overload, no-any-return]


def load_rows(config: Dataset, split: str, needed: Mapping[str, str] | None = None) -> Rows:
    """Returns the rows of `dataset.train` or `dataset.eval`, checked against the templates.

    Args:
        split: "train" or "eval".
        needed: further columns that must be there, each with the key that needs it.

    Raises:
        UserError: a missing file, a malformed line, a missing column, no rows.
    """
    key = f"dataset.{split}"
    source = config.train if split == "train" else config.eval
    if source is None:
        raise UserError(f"{key}: no data; give a file or a hub name.")
    name = config.train_split if split == "train" else config.eval_split
    table = load_table(source, config.subset, name, key)
    table = rename_columns(table, config.columns, source, "dataset.columns")
    limit = config.train_limit if split == "train" else config.eval_limit
    table = first_rows(table, limit, source, key)
    templates = {"dataset.prompt": prompt_template(config, table.column_names)}
    if config.solution is not None and split == "train":
        templates["dataset.solution"] = config.solution
    check_templates(templates, table, f"{key} = {source}", needed=needed)
    return Rows(source, table.column_names, table)


def load_named(part: NamedRows, whole: Dataset, key: str) -> tuple[Rows, Dataset]:
    """Loads one of several data sets: (its rows, its own dataset settings).

    Args:
        whole: settings that the data set inherits unless it sets them.
        key: the data set's key, for error messages.

    Raises:
        UserError: as `load_rows`.
    """
    solution = part.solution if isinstance(part, MixturePart) else None
    own = {"columns": part.columns, "prompt": part.prompt, "system": part.system}
    own["solution"] = solution
    config = dataclasses.replace(whole, **{k: v for k, v in own.items() if v is not None})  # type: ignore[arg-type]
    source = part.data
    table = load_table(source, part.subset, part.split, f"{key}.data")
    renaming = "dataset.columns" if part.columns is None else f"{key}.columns"
    table = rename_columns(table, config.columns, source, renaming)
    if isinstance(part, MixturePart) and DATASET in table.column_names:
        raise UserError(
            f"{key}.data = {source}: has a column {DATASET!r}, which in a mixture is the name of "
            f"the data set; rename it with {key}.columns.NAME={DATASET}."
        )
    table = first_rows(table, part.limit, source, f"{key}.data")
    template_key = f"{key}.prompt" if part.prompt is not None else "dataset.prompt"
    templates = {template_key: prompt_template(config, table.column_names)}
    if config.solution is not None and isinstance(part, MixturePart):
        solution_key = f"{key}.solution" if solution is not None else "dataset.solution"
        templates[solution_key] = config.solution
    check_templates(templates, table, f"{key}.data = {source}", renaming)
    return Rows(source, table.column_names, table), config


def hold_out(rows: Rows, config: Dataset) -> tuple[Rows, Rows]:
    """Splits rows at random into (training rows, held-out rows) by `dataset.test_split_size`.

    Raises:
        UserError: no training row would remain.
    """
    size, total = config.test_split_size, len(rows.rows)
    assert size is not None, "the recipe holds rows out"
    count = max(1, round(size * total)) if size < 1 else int(size)
    if count >= total:
        raise UserError(
            f"dataset.test_split_size = {size:g}: leaves no row to train on; {rows.source} has "
            f"{total:,}."
        )
    held = random.Random("test_split/0").sample(range(total), count)
    train = select_rows(rows, sorted({*range(total)} - {*held}))
    return train, select_rows(rows, sorted(held)[: config.eval_limit])


def select_rows(rows: Rows, numbers: Sequence[int]) -> Rows:
    """Returns the rows with the given numbers."""
    if isinstance(rows.rows, list):
        some: Sequence[dict[str, Any]] = [rows.rows[number] for number in numbers]
    else:
        some = rows.rows.select(numbers)  # type: ignore[attr-defined]
    return Rows(rows.source, rows.columns, some, [rows.line(number) for number in numbers])


def load_table(source: str, subset: str | None, split: str, key: str) -> Any:
    """Loads local data, or one split of a hub data set, as a `Table` or a `datasets.Dataset`.

    Args:
        split: split of a hub data set or of a folder.
        key: name of the source in error messages.

    Raises:
        UserError: the data cannot be loaded.
    """
    try:
        path = local_path(source)
    except ModuleNotFoundError as error:
        raise UserError(f"{key} = {source}: there is no such package ({error}).") from error
    table = load_local(path, subset, split, key) if path else load_hub(source, subset, split, key)
    return files.undecoded(table)


def first_rows(table: Any, limit: int | None, source: str, key: str) -> Any:
    """Truncates a table to its first `limit` rows.

    Raises:
        UserError: the table is empty.
    """
    count = len(table) if limit is None else min(len(table), limit)
    if count == 0:
        raise UserError(f"{key} = {source}: the data set is empty.")
    return table.select(range(count)) if count < len(table) else table


def check_templates(
    templates: Mapping[str, str],
    table: Any,
    source: str,
    renaming: str = "dataset.columns",
    needed: Mapping[str, str] | None = None,
) -> None:
    """Checks templates, given by key, against a nonempty table.

    Args:
        source, renaming, needed: see `check_columns`.

    Raises:
        UserError: an invalid template, or missing columns.
    """
    named = {name: key for key, text in templates.items() for name in columns_named(text)}
    check_columns(named | dict(needed or {}), table.column_names, source, renaming)
    for key, template in templates.items():
        try:
            template.format_map(table[0])
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise UserError(
                f"{key} = {template!r}: is not a template for the first row ({error}); write a "
                "literal brace twice, as in \\boxed{{}}."
            ) from error


def columns_named(template: str) -> list[str]:
    """Returns the columns that a template names; none if it is not a template."""
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field]
    except ValueError:
        return []
    return list(dict.fromkeys(re.split(r"[.\[]", field)[0] for field in fields))


def check_columns(
    needed: Mapping[str, str], columns: Collection[str], source: str, renaming: str
) -> None:
    """Checks that the columns are there that prompts, solutions and rewards need.

    Args:
        needed: each column with the key that needs it.
        source: the data, for the message.
        renaming: the key that renames columns, for the message.

    Raises:
        UserError: columns are missing; the message names all of them.
    """
    if missing := [name for name in needed if name not in columns]:
        shown = ", ".join(f"{name!r} ({needed[name]})" for name in missing)
        prompt = "dataset.prompt"
        keys = (prompt if needed[name] == prompt else f"{renaming}.{name}" for name in missing)
        hints = "".join(nearest(name, columns) for name in missing)
        raise UserError(
            f"{source}: lacks the column{'s' if len(missing) > 1 else ''} {shown}; it has "
            f"{listed(columns)}.{hints} Set {'=COLUMN '.join(keys)}=COLUMN."
        )


def rename_columns(table: Any, names: Mapping[str, str], source: str, key: str) -> Any:
    """Renames columns, given as new name -> old name.

    Raises:
        UserError: a column is missing, or would get two names.
    """
    for new, old in names.items():
        if old not in table.column_names:
            hint = nearest(old, table.column_names)
            raise UserError(
                f"{key}.{new} = {old!r}: {source} has no such column; "
                f"it has {listed(table.column_names)}.{hint}"
            )
    twice = [old for old in names.values() if [*names.values()].count(old) > 1]
    if twice:
        raise UserError(f"{key}: {twice[0]!r} cannot be renamed to two names.")
    # Renamed together, so that columns may swap names.
    replaced = names.keys() - set(names.values())
    table = table.remove_columns([name for name in table.column_names if name in replaced])
    return table.rename_columns({old: new for new, old in names.items()})


def load_hub(
    source: str, subset: str | None, split: str, key: str, *, streaming: bool = False
) -> Any:
    """Loads one split of a hub data set."""
    import datasets

    try:
        return datasets.load_dataset(source, subset, split=split, streaming=streaming)
    except Exception as error:  # hub, network and builder errors have no common base
        raise UserError(
            f"{key} = {source}: no such file here, and as a hub data set (split {split}) it cannot "
            f"be loaded: {type(error).__name__}: {reason(error)}"
        ) from error


def prompt_template(config: Dataset, columns: Collection[str]) -> str:
    """Returns the template of the prompt, from a template, the name of a column or null."""
    given = config.prompt
    if given is not None and ("{" in given or "}" in given):
        return given
    names = PROMPT_COLUMNS if given is None else (given,)
    return f"{{{next((name for name in names if name in columns), names[0])}}}"


def only_field(template: str) -> str | None:
    """Returns the column of a template that consists of one field only, such as {prompt}."""
    found = re.fullmatch(r"\{([^{}.\[\]:!]+)\}", template)
    return found and found[1]
