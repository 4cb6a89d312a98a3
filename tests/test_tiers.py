"""The warning of a long test in the default tier, and tables of cases."""

from __future__ import annotations

import pytest

from tests.tables import table

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.smoke  # pytest in pytest


def test_a_table_shows_every_row_that_fails() -> None:
    seen = []

    @table("text, number", [("one", 1), ("two", 3), ("three", 3), ("four", 5)])
    def check(text: str, number: int, factor: int) -> None:
        seen.append(text)
        assert {"one": 1, "two": 2, "three": 3, "four": 4}[text] * factor == number, "not equal"

    with pytest.raises(AssertionError, match=r"^2 of 4 rows fail:") as error:
        check(factor=1)
    assert seen == ["one", "two", "three", "four"]
    assert "text='two', number=3" in str(error.value)
    assert "text='four', number=5" in str(error.value)
    assert "not equal" in str(error.value)
