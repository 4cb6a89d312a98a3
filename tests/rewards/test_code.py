"""The reward `code`: which text is the program, which tests it gets, what they are worth."""

import logging
from typing import Any

import pytest

from grpo_cli import sandbox
from grpo_cli.rewards import traits_of
from grpo_cli.rewards.code import code, program
from tests.rewards.test_rewards import as_chat, rows_of

GOOD = "def f(x):\n    return x + 1\n"
HALF = "def f(x):\n    return 2 * x\n"
TESTS = ["assert f(1) == 2", "assert f(2) == 3"]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("x = 1", "x = 1"),
        ("", ""),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```py\nx = 1\n```", "x = 1\n"),
        ("```Python3\nx = 1\n```", "x = 1\n"),
        ("``` python title=a.py\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        # the last one, and one marked as Python before one without a mark
        ("```python\nx = 1\n```\n```python\nx = 2\n```", "x = 2\n"),
        ("```\nx = 1\n```\n```\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1\n```\nprints\n```\n1\n```", "x = 1\n"),
        ("```\n1\n```\n```python\nx = 1\n```\n```bash\nls\n```", "x = 1\n"),
        ("```bash\nls\n```", "```bash\nls\n```"),
        # not closed, not a fence, fences in fences
        ("```python\nx = 1", "x = 1"),
        ("```python\nx = 1\n```\n```python\nx = ", "x = "),
        ("```python", ""),
        ("```x = 1```", "```x = 1```"),
        ("```python\nx = '```'\n```", "x = '```'\n"),
        ("````python\n```\nx = 1\n```\n````", "```\nx = 1\n```\n"),
        ("```python\n```bash\n```", "```bash\n"),
        # in a list
        ("1. so:\n   ```python\n   x = 1\n     y = 2\n   ```", "x = 1\n  y = 2\n"),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1\r\n"),
        ("```python\n# é 漢字\u2028\n```", "# é 漢字\u2028\n"),
        ("```" + "a" * 200_000 + "`", "```" + "a" * 200_000 + "`"),
        ("```\n" * 20_001, ""),
    ],
)
def test_program(completion: str, expected: str) -> None:
    assert program(completion) == expected


@pytest.mark.programs
@pytest.mark.parametrize("row", rows_of("code_cases.jsonl"))
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
        return sandbox.SandboxResult(0.0, 0, 2, "", 0.0)

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


@pytest.mark.parametrize(
    ("columns", "args", "message"),
    [
        ({}, {"seconds": 0}, "code: seconds is 0; it must be a number above 0."),
        ({}, {"total_seconds": -1}, "code: total_seconds is -1; it must be above 0."),
        ({}, {"total_seconds": "9"}, "code: total_seconds is '9'"),
        ({}, {"memory_mb": 1.5}, "code: memory_mb is 1.5; it must be a whole number above 0."),
        ({}, {"guards": "none"}, "code: guards is 'none'; it must be one of auto, namespaces, li"),
        ({"tests": [3]}, {}, "code: tests is '3'; it must be a snippet, a list of snippets, a "),
        ({"tests": [[1]]}, {}, "code: tests is '.1.'; it must be"),
        ({"tests": [[{"input": "1"}]]}, {}, "code: tests is"),
        ({"tests": [[{"input": "1", "output": None}]]}, {}, "code: tests is"),
        ({"tests": ["[1, 2]"]}, {}, "code: tests is"),
        ({}, {"continues_prompt": True}, "code: continues_prompt is True; .* not missing."),
        (
            {"prompts": [[{"role": "user", "content": "def f(x):"}]]},
            {"continues_prompt": True},
            "code: continues_prompt is True; .* not a list of messages.",
        ),
    ],
)
def test_code_refuses(columns: dict[str, Any], args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        code(**{"completions": [GOOD], "tests": [TESTS], **columns}, **args)


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
