"""Reads local data: a file, a folder of shards, a pattern of file names, a folder of save_to_disk.

Text stays text: JSON and CSV are checked, and where `datasets` would make something else of a
column, read here.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import glob
import gzip
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from grpo_cli.config.sources import FORMATS, file_format, is_pattern
from grpo_cli.errors import UserError, listed, nearest

# A file may begin with a byte order mark, as Excel and Windows write it, which is no part of it.
ENCODING = "utf-8-sig"
NESTED, TEXT, TRUTH = "a list or an object", "text", "true or false"
WHOLE, REAL = "a whole number", "a fraction"

Places = dict[
    str, dict[str, tuple[Path, int]]
]  # by column and kind of value, the first (file, row)


def load_local(path: Path, subset: str | None, split: str, key: str) -> Any:
    """Returns the rows of a file, of a folder or of all files of a pattern, as a `Dataset`.

    Args:
        subset: a configuration of a folder whose README.md names several.
        split: of a folder that has splits; a file or a pattern is one.
        key: what messages call the path by.

    Raises:
        UserError: nothing is there, no such split, a malformed line, files that do not go together.
    """
    if is_saved_to_disk(path):
        return _saved_to_disk(path, split, key)
    return load_files(find_files(path, subset, split, key), key, path)


def find_files(path: Path, subset: str | None, split: str, key: str) -> list[Path]:
    """Returns the file, or all files of a pattern or of a split in a folder, in their order.

    Raises:
        UserError: there is none.
    """
    if is_pattern(path):
        found = sorted(map(Path, glob.glob(str(path), recursive=True)))
        if files := [file for file in found if file.is_file()]:
            return files
        raise UserError(f"{key} = {path}: no file matches this pattern.")
    if path.is_dir():
        return _shards(path, subset, split, key)
    if not path.exists():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"{key} = {path}: there is no such file.{nearest(path.name, beside)}")
    return [path]


def is_saved_to_disk(path: Path) -> bool:
    """Returns whether `save_to_disk` of `datasets` has written a folder."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _saved_to_disk(path: Path, split: str, key: str) -> Any:
    import datasets

    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:  # torn files: each format has its own errors
        raise UserError(f"{key} = {path}: cannot be read: {reason(error)}") from error
    if not isinstance(found, datasets.DatasetDict):
        return found
    _check_split(split, list(found), path, key)
    return found[split]


def _shards(path: Path, subset: str | None, split: str, key: str) -> list[Path]:
    """Returns the files of a split in a folder, found by `datasets`: by their names or README.md.

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
        raise UserError(f"{key} = {path}: cannot be read: {reason(error)}") from error
    splits = {str(name): [Path(file) for file in of] for name, of in (files or {}).items()}
    _check_split(split, list(splits), path, key)
    return splits[split]


def _check_split(split: str, there: Sequence[str], path: Path, key: str) -> None:
    if split not in there:
        raise UserError(
            f"{key} = {path}: has no split {split!r}; it has {listed(there)}."
            f"{nearest(split, there)}"
        )


def load_file(path: Path, key: str) -> Any:
    """Returns a file of rows as a `datasets.Dataset`.

    Args:
        key: what messages call the file by.

    Raises:
        UserError: a missing file, a malformed line, no rows.
    """
    if path.is_dir():
        return load_files([path], key, path)  # which says what it must be
    return load_files(find_files(path, None, "", key), key, path)


def stream_files(
    paths: Sequence[Path], key: str, source: Path, start: int
) -> Iterator[dict[str, Any]]:
    """Yields the rows of files from row `start` on, without holding them in memory.

    Text stays text; JSON's other values stay what they are in their row.

    Args:
        source: what the files were found by, for messages about all of them.
    """
    from pyarrow import parquet

    kind = _kind_of(paths, key, source)
    for path in paths:
        if kind == "parquet":
            try:
                file = parquet.ParquetFile(path)
            except Exception as error:  # pyarrow's errors have no common base
                raise UserError(f"{key} = {path}: cannot be read: {reason(error)}") from error
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
    try:
        for batch in file.iter_batches(batch_size=256):
            yield from batch.to_pylist()
    except Exception as error:  # pyarrow's errors have no common base
        raise UserError(f"{key} = {path}: cannot be read: {reason(error)}") from error


def load_files(paths: Sequence[Path], key: str, source: Path) -> Any:
    """Returns the rows of files of one kind with the same columns, one file after the other.

    Args:
        source: what the files were found by, for messages about all of them.
    """
    kind = _kind_of(paths, key, source)
    if kind == "csv":
        tables = {path: list(csv_rows(path, key)) for path in paths}
        _check_columns({path: [*rows[0]] for path, rows in tables.items()}, key, source)
        return _as_table([*chain.from_iterable(tables.values())], key, source)
    as_text = _check_json(paths, key, source) if kind == "json" else None
    if kind == "parquet" and len(paths) > 1:
        _check_parquet(paths, key, source)
    if as_text is None:
        table = _read_by_library(kind, paths, key, source)
        if kind == "parquet" or "Value('timestamp" not in str(table.features):
            return table
        as_text = []  # JSON has no dates: that is text, such as "2024-05-01"
    rows = [*chain.from_iterable(json_rows(path, key) for path in paths)]
    return _as_table(_with_text(rows, as_text), key, source)


def _as_table(rows: list[dict[str, Any]], key: str, source: Path) -> Any:
    import datasets

    try:
        return datasets.Dataset.from_list(rows)
    except Exception as error:  # pyarrow's errors have no common base
        raise UserError(f"{key} = {source}: cannot be read: {reason(error)}") from error


def _read_by_library(kind: str, paths: Sequence[Path], key: str, source: Path) -> Any:
    import datasets

    datasets.disable_progress_bars()
    # Only where there is a mark to skip: another encoding than utf-8 takes half as long again.
    marked = kind == "json" and any(map(_begins_with_a_mark, paths))
    options = {"encoding": ENCODING} if marked else {}
    try:
        with _without_loader_errors():
            names = [str(path) for path in paths]
            return datasets.load_dataset(kind, data_files=names, split="train", **options)
    except Exception as error:  # pyarrow's and datasets' errors have no common base
        cause = reason(error.__cause__ or error)
        if "corresponds to no data" in cause:
            raise UserError(f"{key} = {source}: the data set is empty.") from error
        raise UserError(f"{key} = {source}: cannot be read: {cause}") from error


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
    """Refuses files whose columns have other types: `datasets` would cast the text "007" to 7."""
    import datasets
    from pyarrow import parquet

    features: dict[Path, Any] = {}
    for path in paths:
        try:
            features[path] = datasets.Features.from_arrow_schema(parquet.read_schema(path))
        except Exception as error:  # pyarrow's errors have no common base
            raise UserError(f"{key} = {path}: cannot be read: {reason(error)}") from error
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


def reason(error: BaseException) -> str:
    """Returns why a file cannot be read, also where the error has no words."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "it does not fit into memory"
    return str(error).split("\n")[0] or type(error).__name__


def _begins_with_a_mark(path: Path) -> bool:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        return bool(file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8)


@contextlib.contextmanager
def _without_loader_errors() -> Iterator[None]:
    """Keeps the loaders of `datasets` from logging an error that they then raise as well."""
    logger = logging.getLogger("datasets.packaged_modules")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def _check_json(paths: Sequence[Path], key: str, source: Path) -> list[str] | None:
    """Finds what `datasets` reports without a place: the first malformed line of a JSON file.

    Returns:
        None where `datasets` reads the files as they are. Otherwise they have to be read here: a
        column has text in some rows and numbers or booleans in others, which `datasets` would read
        as JSON (the text "007" would become 7), or whole numbers in one file and fractions in
        another, or nothing but nulls in one. The columns with text beside something else are
        returned.

    Raises:
        UserError: a file is malformed or empty, or a column has text and lists or objects.
    """
    places: Places = {}
    columns: dict[Path, dict[str, bool]] = {
        path: {} for path in paths
    }  # whether any value is there
    for path in paths:
        for row, values in enumerate(json_rows(path, key)):
            if isinstance(values, dict):
                for name, value in values.items():
                    columns[path][name] = columns[path].get(name, False) or value is not None
                _note_kinds(places, path, row, values)
    _check_columns({path: list(names) for path, names in columns.items()}, key, source)
    mixed = {name: kinds for name, kinds in places.items() if TEXT in kinds and len(kinds) > 1}

    def place(at: tuple[Path, int]) -> str:
        return f"row {at[1]}" + (f" of {at[0].name}" if len(paths) > 1 else "")

    for name, kinds in mixed.items():
        if NESTED in kinds:
            raise UserError(
                f"{key} = {source}: the column {name!r} has text in {place(kinds[TEXT])} and "
                f"{NESTED} in {place(kinds[NESTED])}; it has to be one of them."
            )
    several = len(paths) > 1
    for name, kinds in places.items() if several else ():
        if TRUTH in kinds and TEXT not in kinds and len(kinds) > 1:  # which would be cast
            other = next(kind for kind in kinds if kind != TRUTH)
            raise UserError(
                f"{key} = {source}: the column {name!r} has {TRUTH} in {place(kinds[TRUTH])} and "
                f"{other} in {place(kinds[other])}; it has to be one of them."
            )
    is_cast = several and (
        any(WHOLE in kinds and REAL in kinds for kinds in places.values())
        or len({frozenset(there.items()) for there in columns.values()}) > 1
    )
    return list(mixed) if mixed or is_cast else None


def json_rows(path: Path, key: str) -> Iterator[Any]:
    """Yields the rows of a JSON file, an array or one object a line."""
    opener = gzip.open if path.suffix == ".gz" else open
    number, start = 0, ""
    with opener(path, "rt", encoding=ENCODING) as file:
        try:
            start = file.read(1)
            file.seek(0)
            if not start:
                raise UserError(f"{key} = {path}: the data set is empty.")
            if start == "[":  # one JSON array
                yield from json.load(file)
                return
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                values = json.loads(line)
                if not isinstance(values, dict):
                    raise UserError(f"{key} = {path}, line {number}: must be a JSON object.")
                yield values
        except json.JSONDecodeError as error:
            at = number if start != "[" else error.lineno
            raise UserError(f"{key} = {path}, line {at}: malformed JSON ({error.msg}).") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{key} = {path}: is not UTF-8 text ({error.reason}).") from error
        except (OSError, EOFError, MemoryError, RecursionError) as error:  # gzip cut, depth
            raise UserError(f"{key} = {path}: cannot be read: {reason(error)}") from error


def _note_kinds(places: Places, path: Path, row: int, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if value is not None:
            kind = REAL if isinstance(value, float) else WHOLE
            if isinstance(value, str):
                kind = TEXT
            elif isinstance(value, bool):
                kind = TRUTH
            elif isinstance(value, list | dict):
                kind = NESTED
            places.setdefault(name, {}).setdefault(kind, (path, row))


def _with_text(rows: list[dict[str, Any]], columns: Sequence[str]) -> list[dict[str, Any]]:
    """Writes numbers and booleans as JSON text where other rows of the column have text."""

    def cell(name: str, value: Any) -> Any:
        is_text = value is None or isinstance(value, str) or name not in columns
        return value if is_text else json.dumps(value)

    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: cell(name, row.get(name)) for name in names} for row in rows]


def csv_rows(path: Path, key: str) -> Iterator[dict[str, str]]:
    """Yields rows as text: a cell such as 007 or NA may be an answer."""
    csv.field_size_limit(2**31 - 1)
    opener = gzip.open if path.suffix == ".gz" else open
    number = -1
    try:
        with opener(path, "rt", encoding=ENCODING, newline="") as file:
            reader = csv.DictReader(file, strict=True)
            names = reader.fieldnames or []
            for number, row in enumerate(reader):
                if None in row or None in row.values():
                    got = len(names) + len(row.get(None, ())) - [*row.values()].count(None)  # type: ignore[call-overload]
                    raise UserError(
                        f"{key} = {path}, row {number}: has {got} fields; the header has "
                        f"{len(names)}."
                    )
                yield row
    except UnicodeDecodeError as error:
        raise UserError(f"{key} = {path}: is not UTF-8 text ({error.reason}).") from error
    except (OSError, EOFError, MemoryError, csv.Error) as error:
        raise UserError(f"{key} = {path}: cannot be read: {reason(error)}") from error
    if number < 0:
        raise UserError(f"{key} = {path}: the data set is empty.")


def undecoded(table: Any) -> Any:
    """Returns a table of `datasets` whose images stay encoded: they are decoded when needed."""
    import datasets

    for name, feature in table.features.items():
        inner = getattr(feature, "feature", None)  # of a list
        if isinstance(feature, datasets.Image):
            table = table.cast_column(name, datasets.Image(decode=False))
        elif isinstance(inner, datasets.Image):
            table = table.cast_column(name, type(feature)(datasets.Image(decode=False)))
    return table
