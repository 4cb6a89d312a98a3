"""Reads local data: a file, a folder of shards, a pattern of file names, a folder of save_to_disk.

JSON and CSV are read here, each row unchanged. `datasets` gives each column one type, which turns
strings into dates and adds the keys of other rows' objects.
"""

from __future__ import annotations

import csv
import glob
import gzip
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from grpo_cli.config.sources import FORMATS, file_format, is_pattern
from grpo_cli.errors import UserError, first_three, listed, nearest
from grpo_cli.files import reading, reason

# Skips the byte order mark that Excel and Windows write.
ENCODING = "utf-8-sig"
NESTED, TEXT, SCALAR = "a list or an object", "text", "a number or a boolean"


class Table(Sequence[dict[str, Any]]):
    """Rows as in their files, with the methods of `datasets.Dataset` that this package calls."""

    features: Mapping[str, Any] = MappingProxyType({})  # columns have no types

    def __init__(self, rows: Sequence[dict[str, Any]], column_names: Sequence[str]) -> None:
        self._rows, self.column_names = rows, list(column_names)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key: Any) -> Any:
        """Returns a row by number, as a new dict, or a column's values by name."""
        if isinstance(key, str):
            return [row.get(key) for row in self._rows]
        row = self._rows[key]
        return {name: row.get(name) for name in self.column_names}

    def select(self, rows: Iterable[int]) -> Table:
        """Returns a table of the given rows."""
        return Table([self._rows[row] for row in rows], self.column_names)

    def remove_columns(self, names: Sequence[str]) -> Table:
        """Returns a table without some columns."""
        return Table(self._rows, [name for name in self.column_names if name not in names])

    def rename_columns(self, names: Mapping[str, str]) -> Table:
        """Returns a table with columns renamed, given as old name -> new name."""
        new = [names.get(name, name) for name in self.column_names]
        rows = [{names.get(name, name): cell for name, cell in row.items()} for row in self]
        return Table(rows, new)


def load_local(path: Path, subset: str | None, split: str, key: str) -> Any:
    """Loads the rows of a file, a folder, or all files of a pattern.

    JSON and CSV are a `Table`, Parquet and folders of save_to_disk a `datasets.Dataset`.

    Args:
        subset: configuration, for a folder whose README.md names several.
        split: split of a folder; a file or a pattern is a single split.
        key: name of the path in error messages.

    Raises:
        UserError: no such path or split, a malformed line, files of different columns or formats.
    """
    if not is_saved_to_disk(path):
        return load_files(find_files(path, subset, split, key), key, path)
    import datasets

    with reading(f"{key} = {path}"):
        found = datasets.load_from_disk(str(path))
    if not isinstance(found, datasets.DatasetDict):
        return found
    _check_split(split, list(found), path, key)
    return found[split]


def find_files(path: Path, subset: str | None, split: str, key: str) -> list[Path]:
    """Returns the file, or all files of a pattern or of a split in a folder, in their order.

    Raises:
        UserError: no file matches.
    """
    if is_pattern(path):
        base = next(parent for parent in path.parents if parent.exists())  # may have brackets
        names = glob.glob(str(path.relative_to(base)), root_dir=base, recursive=True)
        found = sorted(base / name for name in names)
        if files := [file for file in found if file.is_file()]:
            return files
        raise UserError(f"{key} = {path}: no file matches this pattern.")
    if path.is_dir():
        return _shards(path, subset, split, key)
    if not path.exists():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"{key} = {path}: there is no such file.{nearest(path.name, beside)}")
    if not path.is_file():  # a pipe, which waits for a writer
        raise UserError(f"{key} = {path}: is not a plain file.")
    return [path]


def is_saved_to_disk(path: Path) -> bool:
    """Returns whether a folder was written by `save_to_disk` of `datasets`."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _shards(path: Path, subset: str | None, split: str, key: str) -> list[Path]:
    """Finds the files of a split in a folder with `datasets`: by file names or README.md.

    data/train-00000-of-00002.parquet and test.jsonl belong to the splits `train` and `test`; files
    without such a name are `train`.
    """
    import datasets

    try:
        names = datasets.get_dataset_config_names(str(path))
        subset = None if names == ["default"] else subset
        if subset not in (None, *names) or (subset is None and len(names) > 1):
            given = "several subsets" if subset is None else f"no subset {subset!r}"
            raise UserError(f"{key} = {path}: has {given}; there are {listed(names)}.")
        files = datasets.load_dataset_builder(str(path), subset).config.data_files
    except UserError:
        raise
    except Exception as error:  # datasets' errors have no common base
        if type(error).__name__ == "EmptyDatasetError":
            raise UserError(
                f"{key} = {path}: the folder holds no data; it needs {', '.join(FORMATS)} files."
            ) from error
        raise UserError(f"{key} = {path}: cannot be read: {reason(error)}.") from error
    splits = {str(name): [Path(file) for file in of] for name, of in (files or {}).items()}
    _check_split(split, list(splits), path, key)
    return splits[split]


def _check_split(split: str, there: Sequence[str], path: Path, key: str) -> None:
    if split not in there:
        raise UserError(
            f"{key} = {path}: has no split {split!r}; it has {listed(there)}."
            f"{nearest(split, there)}"
        )


def stream_files(
    paths: Sequence[Path], key: str, source: Path, start: int
) -> Iterator[dict[str, Any]]:
    """Yields the rows of files, starting at row `start`, without holding them in memory.

    Strings stay strings, and JSON's other values keep their types.

    Args:
        source: path or pattern of the files, for error messages about all of them.
    """
    from pyarrow import parquet

    kind = _kind_of(paths, key, source)
    for path in paths:
        if kind == "parquet":
            with reading(f"{key} = {path}"):
                file = parquet.ParquetFile(path)
            if start >= file.metadata.num_rows:
                start -= file.metadata.num_rows
                continue
            rows: Iterator[Any] = _parquet_rows(file, path, key)
        else:
            rows = csv_rows(path, key) if kind == "csv" else json_rows(path, key)
        for row in rows:
            if start > 0:
                start -= 1
            else:
                yield row


def _parquet_rows(file: Any, path: Path, key: str) -> Iterator[dict[str, Any]]:
    with reading(f"{key} = {path}"):
        for batch in file.iter_batches(batch_size=256):
            yield from batch.to_pylist()


def load_files(paths: Sequence[Path], key: str, source: Path) -> Any:
    """Concatenates the rows of files with the same format and columns.

    Args:
        source: path or pattern of the files, for error messages about all of them.
    """
    kind = _kind_of(paths, key, source)
    if kind == "parquet":
        return _parquet_table(paths, key, source)
    read = csv_rows if kind == "csv" else json_rows
    tables = {path: list(read(path, key)) for path in paths}
    columns = {path: dict.fromkeys(n for row in rows for n in row) for path, rows in tables.items()}
    if not any(columns.values()):
        raise UserError(f"{key} = {source}: the data set is empty.")
    _check_columns({path: list(names) for path, names in columns.items()}, key, source)
    names = list(columns[paths[0]])
    if kind == "json":
        for name in names:
            _keep_text(name, tables, key, source)
    return Table([row for rows in tables.values() for row in rows], names)


def _parquet_table(paths: Sequence[Path], key: str, source: Path) -> Any:
    import datasets
    from pyarrow import parquet

    _check_parquet(paths, key, source)
    # `datasets` cannot read a file without rows.
    if not (paths := [path for path in paths if parquet.read_metadata(path).num_rows]):
        raise UserError(f"{key} = {source}: the data set is empty.")
    datasets.disable_progress_bars()
    # The loaders log the errors that they also raise.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL + 1)
    try:
        names = [glob.escape(str(path)) for path in paths]
        return datasets.load_dataset("parquet", data_files=names, split="train")
    except Exception as error:  # pyarrow's and datasets' errors have no common base
        cause = reason(error.__cause__ or error)
        raise UserError(f"{key} = {source}: cannot be read: {cause}.") from error


def _kind_of(paths: Sequence[Path], key: str, source: Path) -> str:
    kinds = {file_format(path): path for path in paths}
    if None in kinds or any(path.is_dir() for path in paths):
        other = f"; {kinds[None]} is none" if source not in paths and None in kinds else ""
        raise UserError(
            f"{key} = {source}: must be a {', '.join(FORMATS)} file (or .gz of one){other}."
        )
    if len(kinds) > 1:
        shown = " and ".join(path.name for path in list(kinds.values())[:2])
        raise UserError(
            f"{key} = {source}: holds files of several kinds, {shown}; name one kind by a pattern, "
            "as in data/*.parquet."
        )
    return str(next(iter(kinds)))


def _check_columns(columns: Mapping[Path, Sequence[str]], key: str, source: Path) -> None:
    (first, expected), *others = columns.items()
    for path, found in others:
        if set(found) != set(expected):
            raise UserError(
                f"{key} = {source}: the files have different columns: {first.name} has "
                f"{listed(expected)}; {path.name} has {listed(found)}."
            )


def _check_parquet(paths: Sequence[Path], key: str, source: Path) -> None:
    """Refuses files whose column types differ: `datasets` would cast the text "007" to 7."""
    import datasets
    from pyarrow import parquet

    features: dict[Path, Any] = {}
    for path in paths:
        with reading(f"{key} = {path}"):
            features[path] = datasets.Features.from_arrow_schema(parquet.read_schema(path))
    _check_columns({path: list(found) for path, found in features.items()}, key, source)
    first = paths[0]
    for path, found in features.items():
        for name, feature in found.items():
            both = (features[first][name], feature)
            types = [str(getattr(f, "dtype", f)).replace("large_", "") for f in both]
            if types[0] != types[1]:
                raise UserError(
                    f"{key} = {source}: the column {name!r} is {types[0]} in {first.name} and "
                    f"{types[1]} in {path.name}; it has to be one of them."
                )


def _keep_text(
    name: str, tables: Mapping[Path, Sequence[dict[str, Any]]], key: str, source: Path
) -> None:
    """Converts a column's numbers and booleans to JSON text if its other rows hold text.

    Raises:
        UserError: its other rows hold lists or objects.
    """
    places: dict[str, str] = {}  # first row of each kind of value
    for path, rows in tables.items():
        for number, row in enumerate(rows):
            if (cell := row.get(name)) is not None:
                is_text, is_nested = isinstance(cell, str), isinstance(cell, list | dict)
                kind = TEXT if is_text else NESTED if is_nested else SCALAR
                of_file = f" of {path.name}" if len(tables) > 1 else ""
                places.setdefault(kind, f"row {number}{of_file}")
    if TEXT not in places or len(places) == 1:
        return
    if NESTED in places:
        raise UserError(
            f"{key} = {source}: the column {name!r} has text in {places[TEXT]} and {NESTED} in "
            f"{places[NESTED]}; it has to be one of them."
        )
    for row in (row for rows in tables.values() for row in rows):
        if not isinstance(row.get(name), str | None):
            row[name] = json.dumps(row[name])


def json_rows(path: Path, key: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of a JSON file, up to a wrong one: an array, or one object per line."""
    opener = gzip.open if path.suffix == ".gz" else open
    wrong: list[str] = []
    with reading(f"{key} = {path}"), opener(path, "rt", encoding=ENCODING) as file:
        try:
            while (start := file.read(1)).isspace():
                pass
            file.seek(0)
            if not start:
                raise UserError(f"{key} = {path}: the data set is empty.")
            is_array = start == "["
            items: Iterable[Any] = _parse(file.read()) if is_array else file
            for number, item in enumerate(items, 0 if is_array else 1):
                if not is_array and not item.strip():
                    continue
                try:
                    values = item if is_array else _parse(item)
                    if not isinstance(values, dict):
                        raise ValueError("must be a JSON object")
                except ValueError as error:
                    wrong.append(f"{'row' if is_array else 'line'} {number}: {reason(error)}")
                else:
                    if not wrong:
                        yield values
        except json.JSONDecodeError as error:
            wrong.append(f"line {error.lineno}: {reason(error)}")
    if wrong:
        raise UserError(f"{key} = {path}, {first_three(wrong)}.")


def _parse(text: str) -> Any:
    """Parses a JSON text.

    Raises:
        ValueError: malformed JSON, a repeated key, a number beyond float range or with more than
            4,300 digits, or half of a surrogate pair, which tokenizers reject.
    """
    value = json.loads(text, object_pairs_hook=_object, parse_float=_real)
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])
            raise ValueError(f"{half} is half of a surrogate pair") from error
    return value


def _real(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise ValueError(f"Number too big: {digits:.40}")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key {twice!r} twice")
    return found


def csv_rows(path: Path, key: str) -> Iterator[dict[str, str]]:
    """Yields rows with cells as strings: 007 or NA may be an answer."""
    csv.field_size_limit(2**31 - 1)
    opener = gzip.open if path.suffix == ".gz" else open
    number, wrong = -1, list[str]()
    with reading(f"{key} = {path}"), opener(path, "rt", encoding=ENCODING, newline="") as file:
        reader = csv.DictReader(file, strict=True)
        names = reader.fieldnames or []
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(
                f"{key} = {path}: the header has the column {twice[0]!r} twice; rename one."
            )
        for number, row in enumerate(reader):
            if None in row or None in row.values():
                got = len(names) + len(row.get(None, ())) - [*row.values()].count(None)  # type: ignore[call-overload]
                wrong.append(f"row {number}: has {got} fields")
            elif not wrong:
                yield row
    if wrong:
        raise UserError(f"{key} = {path}, {first_three(wrong)}; the header has {len(names)}.")
    if number < 0:
        raise UserError(f"{key} = {path}: the data set is empty.")


def undecoded(table: Any) -> Any:
    """Returns a `datasets` table whose images stay encoded until they are needed."""
    import datasets

    for name, feature in (getattr(table, "features", None) or {}).items():  # a stream may have none
        inner = getattr(feature, "feature", None)  # element type of a list feature
        if isinstance(feature, datasets.Image):
            table = table.cast_column(name, datasets.Image(decode=False))
        elif isinstance(inner, datasets.Image):
            table = table.cast_column(name, type(feature)(datasets.Image(decode=False)))
    return table
