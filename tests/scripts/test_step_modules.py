"""A default step enters no more modules than the budget in pyproject.toml allows."""

import tomllib

import pytest

from tests import programs


@pytest.mark.runs
def test_a_step_enters_no_more_modules_than_the_budget_allows() -> None:
    done = programs.run(programs.alone("scripts/step_modules.py", "--count"))
    assert done.returncode == 0, done.stderr
    budget = tomllib.loads((programs.ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["budget"]
    assert int(done.stdout.split()[0]) <= budget["modules in a step"]
