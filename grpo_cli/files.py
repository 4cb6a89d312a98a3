"""Reads text, JSON and YAML files; whatever is wrong with one is a sentence that names it.

For example, of a summary.json that is cut off:

    outputs/demo/summary.json: cannot be read: malformed JSON (Expecting value).
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import yaml

from grpo_cli.errors import UserError

LONGEST = 1_000_000  # bytes of a recipe or of command lines, whose parsers are slow


@contextlib.contextmanager
def reading(file: str | Path) -> Iterator[None]:
    """Turns any error of reading or of decoding a file into a UserError that names the file.

    Args:
        file: its path, or `key = path`.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each format has its own errors
        raise UserError(f"{file}: cannot be read: {reason(error)}.") from error


def reason(error: BaseException) -> str:
    """Describes why a file cannot be read, even if the error has no message."""
    if isinstance(error, json.JSONDecodeError):
        return f"malformed JSON ({error.msg})"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"it is not YAML: {error.problem}, line {error.problem_mark.line + 1}"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text ({error.reason})"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "it does not fit into memory"
    text = error.strerror if isinstance(error, OSError) else None
    return (text or str(error) or type(error).__name__).strip().splitlines()[0].rstrip(".")


def open_file(path: str | Path) -> IO[bytes]:
    """Opens a file of a disk; a pipe, which waits for a writer, is refused."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is not a plain file")
    return file


def read_text(path: str | Path, longest: float = math.inf) -> str:
    """Returns the text of a UTF-8 file of at most `longest` bytes, without a byte order mark."""
    with reading(path), open_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > longest:
            raise ValueError(f"it has {size:,} bytes, more than {longest:,}")
        return io.TextIOWrapper(file, "utf-8-sig").read()


def read_json(path: str | Path, *needed: str) -> dict[str, Any]:
    """Returns the object of a JSON file, which must have the needed keys."""
    return json_object(read_text(path), path, *needed)


def json_object(text: str, file: str | Path, *needed: str) -> dict[str, Any]:
    """Returns the object of a JSON text from `file`, which must have the needed keys."""
    with reading(file):
        found = _mapping(json.loads(text), "JSON object")
        if missing := [key for key in needed if key not in found]:
            raise ValueError(f"it has no {missing[0]!r}")
    return found


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Returns the mapping of a YAML file."""
    text = read_text(path, LONGEST)
    with reading(path):
        return _mapping(yaml.load(text, _NoAliases), "mapping (key: value)")


def _mapping(value: Any, kind: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"it holds no {kind}")
    return value


class _NoAliases(yaml.SafeLoader):
    """Refuses aliases: nine lines of them can stand for 9**9 values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="aliases (*name) are not read; write ${key}, or the value again",
                problem_mark=self.peek_event().start_mark,  # type: ignore[no-untyped-call]
            )
        return super().compose_node(parent, index)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yields a path to write, which then replaces a file: a reader sees the old one or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".tmp")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically."""
    with replaced(path) as partial:
        partial.write_text(text, encoding="utf-8")
