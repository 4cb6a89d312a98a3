"""The math reward. docs/math.md says why, with the argument that changes a decision."""

import importlib.resources
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_cli.rewards._answer import (
    Chain,
    Choice,
    Named,
    Ratio,
    Reals,
    Relation,
    Row,
    Several,
    Value,
    Words,
    read,
)
from grpo_cli.rewards.math import math
from tests.tables import rows_of, table

# Each is read as it stands, in a box and announced, and none needs the deadline.
HOSTILE = [
    "\x00",
    "\x00" * 50_000,
    "\ud800",
    "\u202e" * 50_000,
    "9**9**9**9",
    "9^{9^{9^9}}",
    "10^{10^{10}}",
    "(((9^{99})^{99})^{99})^{99}",
    "(10^9)!",
    "9!!!!",
    "99999999999999999999!",
    r"\binom{10^9}{10^8}",
    r"\sum_{k=1}^{10^{12}} k^k",
    "(x+y+z)^{100}",
    "1e999999999",
    "x_" * 450,
    "x^" * 450,
    "|x|" * 300,
    "x<" * 300,
    "(" * 300 + "1" + ")" * 300,
    "{" * 50_000 + "}" * 50_000,
    r"\frac{1}{" * 60 + "2" + "}" * 60,
    r"\boxed{" * 30_000,
    "}" * 50_000,
    "1" * 100_000,
    "#### " * 30_000,
    "#### a\n" * 30_000 + "x",
    "<answer>" * 30_000,
    "1 " * 20_000,
    "1%" * 20_000,
    "$" * 20_000,
    "answer " * 5_000,
    r"answer: \[ " * 5_000,
    "答：" * 20_000,
    "答：" + "1" * 30_000,
    r"\frac" * 5_000,
    r"\frac{1}{0}",
    r"\infty - \infty",
    r"\begin{pmatrix} 1 & 2 \\ 3",
    r"x \ge 1/0 \text{ and } x \le 4",
    r"\tan 90^\circ\frac{1}{0}\approx \sqrt{2}",
    "1.2.3^5",
]


def test_math_agrees_with_the_sample_solutions() -> None:
    sample = importlib.resources.files("grpo_cli") / "samples" / "gsm8k_test.jsonl"
    lines = sample.read_text("utf-8")
    rows = [json.loads(line) for line in lines.split("\n") if line]
    solutions, answers = ([row[key] for row in rows] for key in ("solution", "answer"))
    assert math(solutions, answers) == [1.0] * len(rows)
    other_answers = answers[1:] + answers[:1]
    expected = [float(one == other) for one, other in zip(answers, other_answers, strict=True)]
    assert math(solutions, other_answers) == expected


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_math_scores_hostile_text_zero(text: str) -> None:
    completions = [text, rf"\boxed{{{text}}}", f"The answer is ${text}$.", f"<answer>{text}"]
    assert math(completions, ["6"] * 4) == [0.0] * 4
    assert math([r"\boxed{6}"], [text]) in ([0.0], [None])  # a gold answer that nobody can read


def test_math_works_in_any_thread() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(math([r"\boxed{0.5}"], [r"\frac12"])))
    thread.start()
    thread.join()
    assert found == [[1.0]]


def test_math_says_nothing(
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("parser", "grader"):  # each warns once a process that there is no time limit
        monkeypatch.setattr(f"math_verify.{module}.TIMEOUT_WARNING_SHOWN", False)
    logging.getLogger("math_verify").setLevel(logging.NOTSET)
    texts = [r"\boxed{\frac{1}{}}", "$@#$ 5", "1 2 (3) 4(5)", r"\boxed{\foo}", "x^2+", "0.5"]
    with caplog.at_level(logging.DEBUG):
        math(texts, ["1/2"] * len(texts))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert capfd.readouterr() == ("", "")


def test_math_lets_a_bug_surface(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> bool:
        raise TypeError("a bug of ours")

    monkeypatch.setattr("grpo_cli.rewards.math._same_values", broken)
    with pytest.raises(TypeError, match="a bug of ours"):
        math([r"\boxed{5}"], ["6"])


@table(
    ("text", "expected"),
    [
        ("18", Value("18")),
        (r"\$1,234.50", Value("1234.5", "$")),
        ("-$5", Value("-5", "$")),
        ("$5$", Value("5")),
        ("18 dollars", Value("18", "$")),
        ("3 million people", Value("3", "person", 6)),
        ("5 hundred thousand", Value("5", "", 5)),
        ("3万千米", Value("3", "km", 4)),
        (r"5\text{ cm}^2", Value("5", "cm^2")),
        (r"9.8 \mathrm{~m} / \mathrm{s}^{2}", Value("9.8", "m/s^2")),
        ("18%", Value("18", percent=True)),
        (r"60^\circ", Value("60", "°")),
        (r"\sin 30^\circ", Value(r"\sin 30^\circ")),
        (r"5+3\mathrm{i}", Value("5+3i")),
        (r"0.1\overline{6}", Value(r"\frac{1}{6}")),
        ("1 1/2", Value(r"1\frac{1}{2}")),
        ("100, 200", Several(",", (Value("100"), Value("200")))),
        ("100,200", Value("100200")),
        ("(100,200)", Row("()", (Value("100"), Value("200")))),
        (r"1 \text{ or } 2", Several("or", (Value("1"), Value("2")))),
        (r"\pm 2", Several(",", (Value("2"), Value("-2")))),
        (r"x = 5", Named("x", Value("5"))),
        (r"3+4=7", Chain((Value("3+4"), Value("7")), (False, False))),
        (r"2 < x \le 5", Reals((("2", False, "5", True),), name="x")),
        (r"2x+4y=3", Relation("2x+4y", "=", "3")),
        ("3:4", Ratio((Value("3"), Value("4")))),
        ("(B) 5", Choice("B", Value("5"))),
        ("Not Prime", Words("not prime")),
        (r"5\text{ plus }3", Words("5 plus 3")),
        ("7 is wrong", Words("7 is wrong")),
        ("2024-01-02", Words("2024-01-02")),
    ],
)
def test_an_answer_is_read_to_its_last_character(text: str, expected: Any) -> None:
    assert read(text) == expected


# Right answers of all shapes, and what must not be paid for; three attacks: wrong answers that were
# built to pass, and right ones.
CASES, ATTACK = rows_of("rewards/math_cases.jsonl"), rows_of("rewards/math_attack.jsonl")


@pytest.mark.smoke  # a large table
@table("row", [*CASES, *ATTACK])
def test_math(row: dict[str, Any]) -> None:
    assert math([row["completion"]], [row["answer"]], **row.get("args", {})) == [row["expected"]]


@table("gold", ["???", "\x00\x01", "--", "{", r"\ ", "1" * 1001])
def test_a_gold_answer_that_cannot_be_read_is_left_out_and_counted(gold: str) -> None:
    logged: list[tuple[str, float]] = []
    values = math(["???", "7"], [gold, "7"], lambda name, value: logged.append((name, value)))
    assert values == [None, 1.0]
    assert logged == [("unreadable_gold", 1.0), ("unreadable_gold", 0.0)]


def documented() -> list[tuple[str, str, float, dict[str, Any]]]:
    """Returns (completion, gold, value, arguments that change it) of the tables in docs/math.md."""
    rows = []
    for line in (Path(__file__).parents[2] / "docs" / "math.md").read_text("utf-8").split("\n"):
        if line.startswith("| `"):
            completion, gold, value, switch = (cell.strip() for cell in line[1:-1].split("|"))
            args = yaml.safe_load("{" + switch.strip("`") + "}")
            rows.append((completion.strip("`"), gold.strip("`"), float(value), args))
    return rows


@table(("completion", "gold", "value", "args"), documented())
def test_the_documented_decisions(
    completion: str, gold: str, value: float, args: dict[str, Any]
) -> None:
    assert math([completion], [gold]) == [value]
    if args:
        assert math([completion], [gold], **args) == [1 - value]
