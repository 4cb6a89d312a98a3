import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.rewards import REGISTERED
from grpo_cli.rewards._text import boxed_answers, hashes_answer
from grpo_cli.rewards.boxed_format import boxed_format
from grpo_cli.rewards.exact_match import exact_match
from grpo_cli.rewards.length import length
from grpo_cli.rewards.math import math
from grpo_cli.rewards.soft_overlong import soft_overlong
from tests.tables import table

# Each with the arguments that it cannot do without.
REWARDS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (exact_match, {}),
    (math, {}),
    (boxed_format, {}),
    (length, {}),
    (soft_overlong, {"max_completion_tokens": 4, "cache": 3}),
]


def as_chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


@table(
    ("completion", "answer", "args", "expected"),
    [
        ("37", "37", {}, 1.0),
        ("38", "37", {}, 0.0),
        ("37 ", "37", {}, 1.0),
        ("37", " 37\n", {}, 1.0),
        ("37 ", "37", {"strip": False}, 0.0),
        ("3 7", "37", {}, 0.0),
        ("037", "37", {}, 0.0),
        ("", "37", {}, 0.0),
        ("", "", {}, 1.0),
        ("Paris", "paris", {}, 0.0),
        ("Paris", "paris", {"ignore_case": True}, 1.0),
        ("STRASSE", "straße", {"ignore_case": True}, 1.0),
        ("37", 37, {}, 1.0),
        ("0.5", 0.5, {}, 1.0),
        ("None", None, {}, None),
    ],
)
def test_exact_match(
    completion: str, answer: Any, args: dict[str, Any], expected: float | None
) -> None:
    assert exact_match([completion], [answer], **args) == [expected]
    assert exact_match([as_chat(completion)], [answer], **args) == [expected]


@table(
    ("text", "expected"),
    [
        (r"\boxed{\frac{1}{2}} and \fbox{a{b{c}}}", [r"\frac{1}{2}", "a{b{c}}"]),
        (r"\boxed{\{1, 2\}}", [r"\{1, 2\}"]),
        (r"\boxed{\left\{ x \right.}", [r"\left\{ x \right."]),
        (r"{ \boxed{1} } } \boxed{2}", ["1", "2"]),
        (r"\boxed{\boxed{1}}", [r"\boxed{1}", "1"]),
        (r"\boxed{1", []),
        (r"\boxed 5", []),
        (r"\unboxed{1}", []),
        ("", []),
    ],
)
def test_boxed_answers(text: str, expected: list[str]) -> None:
    assert boxed_answers(text) == expected


@table(
    ("text", "expected"),
    [
        ("a\n#### 42", "42"),
        ("#### 1\n#### 2\nmore", "2"),
        ("####42  \n\n", "42"),
        ("####", None),
        ("### 42", None),
        ("##### 42", None),
        ("#### Evelyn", "Evelyn"),
        ("#### Step 1\ntext", None),
    ],
)
def test_hashes_answer(text: str, expected: str | None) -> None:
    assert hashes_answer(text) == expected


@table(
    ("completion", "style", "expected"),
    [
        (r"The answer is \boxed{42}.", "boxed", 1.0),
        (r"\boxed{\frac{1}{2}}", "boxed", 1.0),
        (r"\boxed{wrong but boxed}", "boxed", 1.0),
        (r"\boxed{1} or \boxed{2}", "boxed", 0.0),
        (r"\boxed{\boxed{1}}", "boxed", 0.0),
        (r"\boxed{1} and \boxed{2", "boxed", 0.0),
        (r"\boxed{1", "boxed", 0.0),
        (r"\boxed{\frac{1}{2}", "boxed", 0.0),
        (r"\boxed{}", "boxed", 0.0),
        (r"\boxed{ }", "boxed", 0.0),
        (r"\boxed 5", "boxed", 0.0),
        ("#### 42", "boxed", 0.0),
        (r"<think>\boxed{42}", "boxed", 0.0),
        (r"<think>\boxed{42}</think>", "boxed", 0.0),
        (r"<think>\boxed{41}</think> so \boxed{42}", "boxed", 1.0),
        (r"\boxed{42}<think> hmm", "boxed", 0.0),
        ("<think>a\n#### 42", "hashes", 0.0),
        ("", "boxed", 0.0),
        ("6 * 7 = 42\n#### 42", "hashes", 1.0),
        ("6 * 7 = 42\n#### 42 \n\n", "hashes", 1.0),
        ("#### 42", "hashes", 1.0),
        ("#### 42\nThat is it.", "hashes", 0.0),
        ("#### 41\n#### 42", "hashes", 0.0),
        ("so #### 42", "hashes", 0.0),
        ("a\n####", "hashes", 0.0),
        ("##### 42", "hashes", 0.0),
        (r"\boxed{42}", "hashes", 0.0),
        ("", "hashes", 0.0),
    ],
)
def test_boxed_format(completion: str, style: str, expected: float) -> None:
    assert boxed_format([completion], style=style) == [expected]
    assert boxed_format([as_chat(completion)], style=style) == [expected]


@table(
    ("completion", "ids", "args", "expected"),
    [
        ("a" * 20, [], {}, 0.0),
        ("a" * 17, [], {}, -3.0),
        ("a" * 50, [], {}, -30.0),
        ("", [], {}, -20.0),
        ("äöü", [], {"target": 3}, 0.0),
        ("anything", [5, 6, 7], {"target": 5, "unit": "tokens"}, -2.0),
        ("anything", [], {"target": 0, "unit": "tokens"}, 0.0),
    ],
)
def test_length(completion: str, ids: list[int], args: dict[str, Any], expected: float) -> None:
    assert length([completion], completion_ids=[ids], **args) == [expected]
    assert length([as_chat(completion)], completion_ids=[ids], **args) == [expected]


@table(
    ("message", "text"),
    [
        ([], ""),
        ([{"role": "assistant", "content": None}], ""),
        ([{"role": "assistant", "tool_calls": []}], ""),
        ([{"role": "tool", "content": "4"}, {"role": "assistant", "content": "37"}], "37"),
        ([{"role": "assistant", "content": [{"type": "text", "text": "37"}]}], "37"),
    ],
)
def test_chat_completions_are_read_by_their_last_message(
    message: list[dict[str, Any]], text: str
) -> None:
    assert exact_match([message], [text]) == [1.0]


@table(
    ("tokens", "expected"),
    [
        # free up to 20 − 4 = 16 tokens, then a quarter less a token, and never below −1
        (1, 0.0),
        (15, 0.0),
        (16, 0.0),
        (17, -0.25),
        (18, -0.5),
        (19, -0.75),
        (20, -1.0),
        (21, -1.0),
        (500, -1.0),
    ],
)
def test_soft_overlong(tokens: int, expected: float) -> None:
    found = soft_overlong([[7] * tokens], max_completion_tokens=20, cache=4, completions=[""])
    assert found == [expected]


def test_soft_overlong_whose_cache_is_the_whole_limit_grows_from_the_first_token() -> None:
    ids = [[7] * n for n in range(6)]
    found = soft_overlong(ids, max_completion_tokens=5, cache=5)
    assert found == pytest.approx([0.0, -0.2, -0.4, -0.6, -0.8, -1.0])


@table("cache", [0, -1, 21])
def test_soft_overlong_refuses_a_cache_outside_the_limit(cache: int) -> None:
    expected = (
        f"soft_overlong: cache is {cache}; it must be above 0 and at most the limit, 20 tokens."
    )
    with pytest.raises(ValueError, match=f"^{expected}$"):
        soft_overlong([[7]], max_completion_tokens=20, cache=cache)


@table(("reward", "args"), REWARDS)
def test_called_as_the_trainer_calls_them(
    reward: Callable[..., list[float | None]], args: dict[str, Any]
) -> None:
    """By keyword, with columns it does not know; one value each; the same when repeated."""
    texts = [r"\boxed{7}", "#### 8", "nine", ""]
    batch: dict[str, list[Any]] = {
        "prompts": ["q"] * 4,
        "completion_ids": [[1, 2], [3], [4], []],
        "answer": ["7", "7", "nine", "7"],
        "subject": ["Algebra"] * 4,
    }
    values = reward(completions=texts, **batch, **args)
    assert len(values) == 4
    assert all(type(value) is float for value in values)
    assert len(set(values)) > 1, "a function that tells these apart"
    assert reward(completions=texts, **batch, **args) == values
    assert reward(completions=[as_chat(text) for text in texts], **batch, **args) == values
    backwards = {column: entries[::-1] for column, entries in batch.items()}
    assert reward(completions=texts[::-1], **backwards, **args) == values[::-1]
    assert reward(completions=[], **{column: [] for column in batch}, **args) == []


@table(
    ("reward", "args", "sentence"),
    [
        (boxed_format, {"style": "latex"}, "style is 'latex'; it must be one of boxed, hashes"),
        (length, {"unit": "words"}, "unit is 'words'; it must be one of characters, tokens"),
        (length, {"target": -1}, "target is -1; it must be a whole number, 0 or more"),
        (length, {"target": "20"}, "target is '20'; it must be a whole number, 0 or more"),
        (length, {"unit": "tokens"}, 'unit "tokens" needs completion_ids'),
    ],
)
def test_bad_arguments(
    reward: Callable[..., list[float | None]], args: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        reward(completions=["5"], answer=["5"], **args)


@table("reward", [exact_match, math])
def test_columns_of_another_length_are_a_bug(reward: Callable[..., list[float | None]]) -> None:
    with pytest.raises(ValueError, match="zip"):
        reward(completions=["5", "6"], answer=["5"])


def shipped() -> list[str]:
    return sorted(path.stem for path in Path(inspect.getfile(math)).parent.glob("[!_]*.py"))


@table("name", shipped())
def test_each_file_holds_one_documented_reward_of_its_name(name: str) -> None:
    function = getattr(importlib.import_module(f"grpo_cli.rewards.{name}"), name)
    assert REGISTERED[name] == f"grpo_cli.rewards.{name}:{name}"
    summary = (function.__doc__ or "").splitlines()[0]
    assert summary.endswith(".")
    assert len(summary) < 100


def test_the_rewards_tested_here_are_shipped() -> None:
    assert {reward.__name__ for reward, _ in REWARDS} <= set(shipped())


def test_listing_the_rewards_loads_nothing_heavy() -> None:
    code = (
        f"import importlib, sys\nfor name in {shipped()}:\n"
        "    importlib.import_module(f'grpo_cli.rewards.{name}')\n"
        "heavy = ('sympy', 'math_verify', 'torch', 'transformers', 'jsonschema', 'numpy',\n"
        "         'referencing', 'regex', 'openai')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_soft_overlong_grows_in_the_last_fifth_unless_told() -> None:
    ids = [[7] * n for n in (16, 17, 18, 20)]
    assert soft_overlong(ids, max_completion_tokens=20) == [0.0, -0.25, -0.5, -1.0]
    assert soft_overlong([[7] * 3, [7] * 4], max_completion_tokens=4) == [0.0, -1.0]
