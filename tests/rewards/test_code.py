"""The reward `code`: which text is the program, which tests it gets, what they are worth."""

import logging
from typing import Any

import pytest

from grpo_cli import sandbox
from grpo_cli.rewards import traits_of
from grpo_cli.rewards.code import code, program
from tests.rewards.test_rewards import as_chat
from tests.tables import rows_of

GOOD = "def f(x):\n    return x + 1\n"
HALF = "def f(x):\n    return 2 * x\n"
TESTS = ["assert f(1) == 2", "assert f(2) == 3"]


def test_the_program_of_a_long_text() -> None:
    unclosed = "```" + "a" * 200_000 + "`"
    assert program(unclosed) == unclosed
    assert program("```\n" * 20_001) == ""


@pytest.mark.programs
@pytest.mark.parametrize("row", rows_of("rewards/code_cases.jsonl"))
def test_code(row: dict[str, Any]) -> None:
    given = {"seconds": 15.0, **row.get("args", {})}
    given |= {name: [cell] for name, cell in row["columns"].items()}
    assert code([row["completion"]], **given) == [row["expected"]]
    assert code([as_chat(row["completion"])], **given) == [row["expected"]]


@pytest.mark.parametrize("partial", [True, False])
def test_code_tries_no_more_tests_than_it_needs(
    monkeypatch: pytest.MonkeyPatch, partial: bool
) -> None:
    asked = []

    def grade(*_: Any, stop_at_failure: bool, **__: Any) -> sandbox.SandboxResult:
        asked.append(stop_at_failure)
        return sandbox.SandboxResult(0.0, 0, 2, "")

    monkeypatch.setattr(sandbox, "grade", grade)
    assert code([GOOD], [TESTS], partial=partial) == [0.0]
    assert asked == [not partial]


def test_code_scores_each_completion_by_its_own_row() -> None:
    values = code(
        [GOOD, HALF, GOOD, "    return x\n"],
        [TESTS, TESTS, None, "assert f(n) == 7"],
        [None, None, None, "n = 7"],
        [None] * 4,
        ["", "", "", "def f(x):\n"],
        continues_prompt=True,
    )
    assert values == [1.0, 0.5, None, 1.0]


def test_a_row_is_refused_for_what_its_prompt_imports() -> None:
    """The helpers of a prompt are part of the tests where completions continue it."""
    refuse = traits_of(code).refuse
    assert refuse is not None
    prompt = "import numpy\ndef f(x):\n    'Adds 1.'\n"
    row = {"tests": "assert f(1) == 2", "prompts": prompt}
    assert refuse(**row) == ""
    assert "import numpy, which needs site_packages" in refuse(**row, continues_prompt=True)


def test_the_log_says_which_guards_are_on() -> None:
    traits = traits_of(code)
    assert traits.describe is not None
    assert traits.describe(guards="limits", seconds=3, partial=False) == sandbox.describe("limits")
    assert traits.describe() == sandbox.describe("auto")


def test_it_runs_in_workers_that_outlive_its_sandbox() -> None:
    traits = traits_of(code)
    assert traits.cache
    assert traits.timeout is not None
    defaults = code.__kwdefaults__
    assert defaults["seconds"] < defaults["total_seconds"] < traits.timeout - 5


def test_a_program_writes_nothing_here(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        assert code([f"import sys; print(1); print(2, file=sys.stderr)\n{GOOD}"], [TESTS]) == [1.0]
    assert capfd.readouterr() == ("", "")
    assert caplog.text == ""
