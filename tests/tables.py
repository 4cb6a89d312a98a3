"""Tables of literal cases, each checked in one test."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest


def rows_of(name: str) -> list[dict[str, Any]]:
    """Returns the rows of a table in JSON lines, given by its path in tests/."""
    lines = (Path(__file__).parent / name).read_text("utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:140]} ... {text[-50:]}"


def table(
    names: str | Sequence[str], rows: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Calls a test with every row and fails with the values and the error of each row that fails.

    Takes the place of `pytest.mark.parametrize` where a row takes microseconds and pytest's own
    work for a case takes more. Rows share the fixtures of the test: use it where no row changes
    one.
    """
    keys = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
    values = [tuple(row) if len(keys) > 1 else (row,) for row in rows]
    assert values, f"the table of {', '.join(keys)} has no rows"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def check_rows(**fixtures: Any) -> None:
            failed: list[tuple[str, BaseException]] = []
            for row in values:
                arguments = dict(zip(keys, row, strict=True))
                try:
                    test(**fixtures, **arguments)
                except (Exception, pytest.fail.Exception) as error:
                    shown = ", ".join(f"{k}={short(v)}" for k, v in arguments.items())
                    failed.append((f"{shown}\n{type(error).__name__}: {error}", error))
            if failed:
                text = "\n\n".join(message for message, _ in failed)
                raise AssertionError(
                    f"{len(failed)} of {len(values)} rows fail:\n\n{text}"
                ) from failed[0][1]

        signature = inspect.signature(test)
        left = [p for name, p in signature.parameters.items() if name not in keys]
        assert len(left) + len(keys) == len(signature.parameters), f"no test that takes {keys}"
        check_rows.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return check_rows

    return decorate
