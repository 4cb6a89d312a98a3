"""The warning of a long test in the default tier, and tables of cases."""

from __future__ import annotations

import pytest

from tests import tiers
from tests.tables import table

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.smoke  # pytest in pytest

BUSY = """
import os
import subprocess
import sys
import pytest

def busy():
    until = sum(os.times()[:2]) + 0.2
    while sum(os.times()[:2]) < until:
        pass
"""
QUICK = "def test_quick():\n    pass\n"


@pytest.fixture
def gated(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder of tests in which pytest knows the markers."""
    pytester.makeini(
        "[pytest]\nmarkers =\n" + "".join(f"  {n}: of a tier\n" for n in tiers.MARKERS)
    )
    return pytester


def run(pytester: pytest.Pytester, tests: str) -> pytest.RunResult:
    """Runs tests of which each may take 0.1 s."""
    pytester.makepyfile(BUSY + tests)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiers, "SECONDS", 0.1)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", plugins=[tiers])


def test_of_an_unmarked_test_that_takes_long_a_warning_names_the_tiers(
    gated: pytest.Pytester,
) -> None:
    found = run(gated, "def test_long():\n    busy()\n\n" + QUICK)
    found.assert_outcomes(passed=2, warnings=1)
    said = " ".join(found.stdout.str().split())
    for name in ("pytest.mark.runs", "pytest.mark.programs", "pytest.mark.slow", "0.1 s"):
        assert name in said


def test_the_time_of_programs_counts(gated: pytest.Pytester) -> None:
    program = "import time\\nwhile time.process_time() < 0.3: pass"
    tests = f"def test_long():\n    subprocess.run([sys.executable, '-c', '{program}'])\n"
    run(gated, tests).assert_outcomes(passed=1, warnings=1)


@pytest.mark.parametrize("name", tiers.MARKERS)
def test_a_marked_test_may_take_long(gated: pytest.Pytester, name: str) -> None:
    run(gated, f"@pytest.mark.{name}\ndef test_long():\n    busy()\n").assert_outcomes(
        passed=1, warnings=0
    )


def test_waiting_for_other_programs_of_the_machine_is_no_reason(gated: pytest.Pytester) -> None:
    run(gated, "import time\n\ndef test_waits():\n    time.sleep(0.2)\n").assert_outcomes(
        passed=1, warnings=0
    )


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


def test_a_table_shows_a_row_that_should_have_raised() -> None:
    @table("value", ["1", "x"])
    def check(value: str) -> None:
        with pytest.raises(ValueError, match="invalid"):
            int(value)

    with pytest.raises(AssertionError, match=r"1 of 2 rows fail:\s+value='1'\s+Failed: DID NOT"):
        check()


def test_tables_multiply() -> None:
    seen = []

    @table("a", [1, 2])
    @table(("b",), [3, 4])
    def check(a: int, b: int) -> None:
        seen.append((a, b))

    check()
    assert seen == [(1, 3), (1, 4), (2, 3), (2, 4)]


def test_a_table_names_the_parameters_of_its_test() -> None:
    with pytest.raises(AssertionError, match="no test that takes"):
        table("other", [1])(lambda value: None)
    with pytest.raises(AssertionError, match="has no rows"):
        table("value", [])
