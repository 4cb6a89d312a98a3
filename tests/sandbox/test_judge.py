"""Which tests are refused, and numpy in them."""

# ruff: noqa: E501

from typing import Any

import pytest

from grpo_cli.sandbox import Limits, grade

CHECK = "def check(candidate):\n    assert candidate(1) == 2"


@pytest.mark.parametrize(
    ("test", "options", "message"),
    [
        ("pass", {}, "the test 'pass' tests nothing."),
        ("", {}, "tests nothing"),
        ("import math\nX = {'a': 1}\ndef helper(): pass\n'text'", {}, "tests nothing"),
        (CHECK, {}, "defines `check`, which nothing calls: the column entry_point"),
        ("import unittest\nclass T(unittest.TestCase):\n    async def test_a(self): f(1)", {}, "the test T is async"),
        ("if __name__ == '__main__': f(1)", {}, "tests nothing"),
        ("def test_a(capsys): f(1)", {}, "the test test_a takes capsys, which nothing passes"),
        ("assert f(1) ==", {}, "is no Python: invalid syntax"),
        ("return f(1)", {}, "is no Python: 'return' outside function"),
        ("import pytest\nassert f(1) == 2", {}, "import pytest, which needs site_packages: true."),
        ("import no_such_thing\nf(1)", {"site_packages": True}, "import no_such_thing, which is not"),
        ("f(1)", {"setup": "import numpy"}, "import numpy, which needs site_packages: true."),
    ],
)  # fmt: skip
def test_a_row_that_tests_nothing_is_refused(
    test: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        grade("def f(x): return x + 1", test, **options)


@pytest.mark.programs
def test_numpy() -> None:
    program = "import numpy as np\ndef f(x): return x * 2\ndef g(): return np.float64(1.5)"
    test = (
        "import numpy as np\nassert np.array_equal(f(np.array([[1, 2]])), [[2, 4]])\n"
        "assert g() == 1.5 and f(np.array([0.5])).dtype == float"
    )
    result = grade(program, test, limits=Limits(seconds=60), site_packages=True)
    assert result.reason == "passed"
