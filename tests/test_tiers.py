"""The warning of a long test in the default tier, and tables of cases."""

from __future__ import annotations

import pytest

from tests import tiers
from tests.tables import table

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.smoke  # pytest in pytest

LONG = "def test_long():\n    for _ in range(3_000_000):\n        pass\n"
QUICK = "\ndef test_quick():\n    pass\n"


def test_a_warning_names_the_tiers_of_a_long_test_without_a_marker(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "SECONDS", 0.03)
    pytester.makepyfile(LONG + QUICK)
    found = pytester.runpytest_inprocess("-p", "no:cacheprovider", plugins=[tiers])
    found.assert_outcomes(passed=2, warnings=1)
    said = " ".join(found.stdout.str().split())
    for name in ("pytest.mark.runs", "pytest.mark.programs", "pytest.mark.slow"):
        assert name in said


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
