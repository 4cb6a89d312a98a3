"""Programs that want a reward from `code`, and what each is worth.

The programs of `code_tricks.jsonl` solve nothing and get 0, except one honest program for each
test. Those of `code_attack.jsonl` were tried by an attacker who knew the design.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from grpo_cli.rewards.code import code
from tests.sandbox.test_api import IS_ROOT, both_levels
from tests.tables import rows_of

COLUMNS = ("tests", "entry_point", "prompts")
TRICKS = rows_of("rewards/code_tricks.jsonl")
ATTACK = rows_of("rewards/code_attack.jsonl")


def score(row: Mapping[str, Any], guards: str, **args: Any) -> float | None:
    """Returns what a row's program gets."""
    (value,) = code(
        [row["program"]],
        **{column: [row[column]] for column in COLUMNS if column in row},
        guards=guards,
        seconds=row.get("seconds", 20.0),
        site_packages=row.get("site_packages", False),
        **args,
    )
    return value


def score_trick(row: Mapping[str, Any], guards: str) -> float | None:
    if guards == "limits" and not IS_ROOT and "/proc'" in row["program"]:
        return 0.0  # it reaches every process of this user, see docs/sandbox.md
    return score(row, guards, continues_prompt="prompts" in row, partial=False)


def wrong(
    rows: Iterable[dict[str, Any]], value: Callable[[dict[str, Any]], float | None]
) -> list[str]:
    """Returns the rows that are not worth what they should be, two at a time."""
    given = list(rows)
    with ThreadPoolExecutor(2) as pool:
        values = list(pool.map(value, given))
    return [
        f"{row['name']}: {got}\n{row['program']}"
        for row, got in zip(given, values, strict=True)
        if got != row["worth"]
    ]


@both_levels
def test_quick_tricks_get_nothing(guards: str) -> None:
    rows = [row for row in TRICKS if row.get("quick")]
    assert wrong(rows, lambda row: score_trick(row, guards)) == []


@pytest.mark.programs
@both_levels
def test_tricks_get_nothing_and_honest_programs_everything(guards: str) -> None:
    rows = [row for row in TRICKS if not row.get("quick")]
    assert wrong(rows, lambda row: score_trick(row, guards)) == []


@pytest.mark.programs
@both_levels
def test_an_attack_is_paid_what_it_is_worth(guards: str) -> None:
    assert wrong(ATTACK, lambda row: score(row, guards)) == []
