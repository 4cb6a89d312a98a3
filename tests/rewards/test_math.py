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
from grpo_cli.rewards._text import announced_answer, plain_characters, tagged_answer
from grpo_cli.rewards.math import _is_within_limits, math
from tests.rewards.test_rewards import as_chat, rows_of
from tests.tables import table

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


@table(
    ("text", "expected"),
    [
        ("(" * 8 + "1" + ")" * 8, True),
        ("(" * 9 + "1" + ")" * 9, False),
        ("{" * 9, False),
        ("(1) " * 200, True),
        ("$x = 5" + " and so" * 20 + "$", True),
        ("$x = 5" + " cats" * 8 + "$", True),
        ("$x = 5" + " cats" * 9 + "$", False),
        ("$x = 5$" + " cats" * 90, True),
        ("|x|" * 4, True),
        ("|x|" * 4 + "|", False),
        ("| a | b | c | d |\n" * 20, True),
        ("1/2 " * 10, True),
        ("1/2 " * 11, False),
        ("1/2, " * 11, True),
        ("http://a.org/" + "docs/" * 20, True),
        ("1<" * 20 + "2", True),
        ("1<" * 21 + "2", False),
        ("x_a_b_c_d_e", True),
        ("x_a_b_c_d_e_f", False),
        (r"\sin(\cos(\sin(x)))", True),
        (r"\sin(\cos(\sin{\log \left( x\right)}))", False),
        ("x^{x^x}", True),
        ("x^x^x^x^x", False),  # 2^2^2^2^2 has 19,729 digits
        ("(x+y)^{61}", True),  # comb(63, 2) = 1953 terms
        ("(x+y)^{62}", False),
        ("(x+1)^{100}", True),
        ("(x+1)^{101}", False),
        ("as said, (1 + r)^12 = a; we buy it all", True),
        ("10^{3999}", True),
        ("10^{4001}", False),
        ("x^{2010}", True),
        ("x^{20100}", False),
        ("2^{10000}", True),  # 3,010 digits
        ("9**9**9", False),
        ("(9^9)^9", True),
        ("9^{9^9}", False),
        ("((9^{99})^{99})^{99}", False),
        ("1000!", True),
        ("3000!", False),
        ("(9!)!", False),
        ("Great! We have 5000 apples! 7!", True),
        (r"\binom{100}{50}", True),
        (r"\binom{10^9}{10^8}", False),
        ("2^{100,000,000}", False),
        ("1 + " * 249 + "1", True),
        ("1" * 1001, True),
        ("1" * 1010, False),
        ("", True),
    ],
)
def test_what_math_verify_gets_to_read(text: str, expected: bool) -> None:
    assert _is_within_limits(text) is expected


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
        ("<answer>5</answer>", "5"),
        ("a <ANSWER>\n 5 \n</Answer> b", "5"),
        ("<answer>4</answer><answer>5</answer>", "5"),
        ("<answer>4<answer>5</answer>", "5"),
        ("<answer>4</answer> <answer>5", "4"),
        ("<answer>4</answer> 5</answer>", "4"),
        ("</answer>5<answer>", None),
        ("<answer>5", None),
        ("<answers>5</answers>", None),
        ("<answer></answer>", ""),
        ("", None),
    ],
)
def test_tagged_answer(text: str, expected: str | None) -> None:
    assert tagged_answer(text) == expected


@table(
    ("text", "expected"),
    [
        ("The answer is 3.5. Next.", "3.5"),
        ("the answers are 3 and 4", "3 and 4"),
        ("The final answer is therefore: **18**", "18"),
        ("The answer to the last question is 18", None),
        ("The answer, which is not even, is 7.", None),
        ("My friend says the answer is 7.", None),
        ("The answer is 18. No, it is 20.", None),
        ("The answer is not 5", None),
        ("It answers 5 questions", None),
        ("Answer = 18", "18"),
        ("**Answer**: 18 dollars", "18 dollars"),
        ("# Answer\n\n18", "18"),
        ("Answer:\n$$\nx\n$$\nand more", "$$\nx\n$$"),
        ("Answer: $$x = 3.\n$$", "$$x = 3.\n$$"),
        ("The answer is **18** eggs", "18 eggs"),
        ("The answer is 2**3", "2**3"),
        ("The answer is 2 ** 3", "2 ** 3"),
        ("Answer: 3\nAnswer: 4", "4"),
        ("Answer: 3\nThis answer is right.", "3"),
        ("The answer is Evelyn.\nThis answer is right.", "Evelyn"),
        ("答案应该是18个。还有", "18个"),
        ("【答案】18", "18"),
        ("回答:18", None),
        ("no", None),
        ("", None),
    ],
)
def test_announced_answer(text: str, expected: str | None) -> None:
    assert announced_answer(text) == expected


def test_plain_characters() -> None:
    assert plain_characters("答案：１，２３４．５％！") == "答案:1,234.5%。"
    assert plain_characters("\u200f5\ufeff−3") == "5-3"
    assert plain_characters("plain é") == "plain é"


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
CASES, ATTACK = rows_of("math_cases.jsonl"), rows_of("math_attack.jsonl")


@pytest.mark.smoke  # a large table
@table("row", [*CASES, *ATTACK])
def test_math(row: dict[str, Any]) -> None:
    assert math([row["completion"]], [row["answer"]], **row.get("args", {})) == [row["expected"]]


@table("row", CASES[::5])
def test_math_reads_the_last_message_of_a_chat(row: dict[str, Any]) -> None:
    found = math([as_chat(row["completion"])], [row["answer"]], **row.get("args", {}))
    assert found == [row["expected"]]


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
