"""The rewards on text: their values, what they refuse, and what holds for each of them.

A row of `cases.jsonl` is a completion with the columns and arguments that it is given (`given`)
and its value, or arguments with the error that they raise. `math` and `choice` have files of their
own. A row of `texts.jsonl` is a text and what a function reads of it.
"""

import asyncio
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.rewards import REGISTERED, _text, shipped, traits_of
from grpo_cli.rewards.choice import choice
from grpo_cli.rewards.code import program
from grpo_cli.rewards.cosine_length import cosine_length
from grpo_cli.rewards.exact_match import exact_match
from grpo_cli.rewards.json_schema import json_schema
from grpo_cli.rewards.language import language
from grpo_cli.rewards.length import length
from grpo_cli.rewards.math import _is_within_limits, final_answer, math
from grpo_cli.rewards.regex import regex
from grpo_cli.rewards.repetition import repetition
from grpo_cli.rewards.soft_overlong import soft_overlong
from grpo_cli.rewards.tag_count import tag_count
from grpo_cli.rewards.think_format import think_format
from grpo_cli.scoring import registry
from grpo_cli.scoring.bound_reward import Signature
from tests.tables import rows_of, table

RewardFunction = Callable[..., list[float | None]]

ANY = {"prompts": ["q"], "subject": ["Algebra"]}  # what the trainer may pass besides


def needed(reward: RewardFunction) -> list[str]:
    found = Signature.of(reward)
    names = (*found.required, *found.needed_standard, *found.needed)
    return [name for name in names if name != "completions"]


BY_NAME: dict[str, Callable[..., Any]] = {name: registry.resolve(name) for name in shipped()}
# Columns and arguments that a reward cannot do without, by name.
GIVEN = {"answer": ["7"], "completion_ids": [[5] * 3], "max_completion_tokens": 9, "pattern": "7"}
OWN = {"choice": {"answer": ["B"]}, "soft_overlong": {"max_completion_tokens": 4, "cache": 3}}
# All that need no program, model, server or episode.
REWARDS: list[tuple[RewardFunction, dict[str, Any]]] = [
    (reward, {key: GIVEN[key] for key in needed(reward)} | OWN.get(name, {}))
    for name, reward in BY_NAME.items()
    if name not in ("code", "environment", "judge", "reward_model")
]


CASES = rows_of("rewards/cases.jsonl")


def as_chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def called(name: str, **given: Any) -> Any:
    value = BY_NAME[name](**given)
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def check(reward: RewardFunction, completion: Any, expected: float | None, **given: Any) -> None:
    """As a text and as a chat; the value is a plain float, only `length` gives -0.0."""
    is_text = isinstance(completion, str)
    for one in (completion, as_chat(completion)) if is_text else (completion,):
        (value,) = reward(completions=[one], **ANY, **given)
        assert value == (None if expected is None else pytest.approx(expected, abs=1e-9))
        assert value is None or type(value) is float
        assert reward is length or str(value) != "-0.0"


@table("row", [row for row in CASES if "expected" in row])
def test_values(row: dict[str, Any], tmp_path: Path) -> None:
    given = dict(row.get("given", {}))
    if "tokens" in row:
        given["completion_ids"] = [[5] * row["tokens"]]
    check(BY_NAME[row["reward"]], row["completion"], row["expected"], **given)
    if isinstance(schema := given.get("schema"), dict):  # of each row, or in a file
        path = tmp_path / "schema.json"
        path.write_text(json.dumps(schema), "utf-8")
        for one in ([schema], [json.dumps(schema)], str(path)):
            check(json_schema, row["completion"], row["expected"], schema=one)


@table("row", [row for row in CASES if "error" in row])
def test_errors_name_the_argument_and_the_remedy(
    row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("it asks the network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    sentence = re.escape(row["error"]).replace(re.escape("... "), ".*")
    with pytest.raises(ValueError, match=f"^{row['reward']}: {sentence}") as error:
        called(row["reward"], **{"completions": ["7"], **ANY, **row["given"]})
    assert len(str(error.value)) < 600


@table("row", rows_of("rewards/choice_cases.jsonl"))
def test_choice(row: dict[str, Any]) -> None:
    for gold in "ABI":
        check(choice, row["completion"], float(gold == row["letter"]), answer=[gold])


def test_each_completion_is_scored_by_its_own_row() -> None:
    ids = [[5] * 50, [], [5]]
    given: dict[str, Any] = {"completion_ids": ids, "max_completion_tokens": 100}
    found = cosine_length(completions=["7", "8", "7"], answer=["7", "7", None], **given)
    assert found == [pytest.approx(0.75), -1.0, None]
    schemas = [{"type": "object"}, '{"type": "integer"}', None, " ", {"type": "integer"}]
    texts = ['{"x": 1}', "7", "7", "7", '{"x": 1}']
    assert json_schema(completions=texts, schema=schemas) == [1.0, 1.0, None, None, 0.0]


@table("ngram", range(1, 12))
def test_repetition_counts_what_windows_count(ngram: int) -> None:
    words = "abracadabra" * 3 + "cadabra"
    windows = [words[i : i + ngram] for i in range(len(words) - ngram + 1)]
    expected = len(set(windows)) / len(windows) - 1
    check(repetition, " ".join(words), expected, ngram=ngram)


@table("pattern", ["(" * 100_000, "a{99999999999999999999}"])
def test_regex_names_a_pattern_that_is_too_much(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"^regex: pattern is ") as error:
        regex(completions=["a"], pattern=pattern)
    assert len(str(error.value)) < 1000


@table(
    ("completion", "schema"),
    [
        ("1" * 5000, True),
        ("9" * 4000, {"multipleOf": 0.5}),
        ("[" * 100_000, True),
        ("[" * 100_000 + "]" * 100_000, True),
        ('{"a":' * 100_000, True),
    ],
)
def test_json_that_cannot_be_computed_with_is_worth_nothing(completion: str, schema: Any) -> None:
    check(json_schema, completion, 0.0, schema=[schema])


# What of a text is an answer, a program, or short enough for math_verify.
READERS: dict[str, Callable[[str], Any]] = {
    "tagged_answer": _text.tagged_answer,
    "announced_answer": _text.announced_answer,
    "boxed_answers": _text.boxed_answers,
    "hashes_answer": _text.hashes_answer,
    "plain_characters": _text.plain_characters,
    "final_answer": final_answer,
    "is_within_limits": _is_within_limits,
    "program": program,
}


@table("row", rows_of("rewards/texts.jsonl"))
def test_what_is_read_of_a_text(row: dict[str, Any]) -> None:
    found = READERS[row["function"]](row["text"])
    assert found == row["expected"]
    if row["function"] == "final_answer" and found is not None:
        assert math([row["text"]], answer=[found]) == [1.0], "right where it is the gold answer"


N = 100_000
HOSTILE = {
    "empty": "",
    "blank": " \n" * N,
    "null bytes": "\0" * N,
    "surrogates": "\ud800" * N,
    "one letter": "A" * N,
    "words": "A B " * N,
    "braces": "{" * N + "}" * N,
    "boxes": r"\boxed{" * N,
    "nested boxes": r"\boxed{" * N + "B" + "}" * N,
    "many boxes": r"\boxed{{{}}" * N,
    "leads": "the answer is " * N,
    "answers to": "answer to a " * N,
    "lead and space": "answer is" + " " * N + "B B",
    "Chinese leads": "选" * N,
    "commas": "Answer: A" + ", " * N,
    "openings": "<think>" * N,
    "closings": "</think>" * N,
    "answers": "<answer>" * N + "</answer>" * N,
    "less-than": "<a" * N,
    "dollars": "$" * N,
    "dollars and letters": "$a $" * N,
    "backticks": "`" * N,
    "fences": "```json\n" * N,
    "formulas": r"\[" * N + r"\(" * N,
    "commands": r"\begin{a" * N,
    "brackets": "[" * N,
    "objects": '{"a":' * N,
    "digits": "1" * N,
}


NEVER_RIGHT = (choice, think_format, tag_count, repetition, regex, json_schema, language)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.smoke  # a large table
@table(("reward", "given"), [one for one in REWARDS if one[0] in NEVER_RIGHT])
def test_hostile_text_is_worth_no_more_than_nothing(
    reward: RewardFunction, given: dict[str, Any], name: str
) -> None:
    (value,) = reward(completions=[HOSTILE[name]], **given)
    if reward is language:
        assert value in (None, 0.0, 1.0)
    elif reward is repetition:
        assert value is not None
        assert -1.0 <= value <= 0.0
    else:
        assert value == 0.0


@table(("reward", "given"), REWARDS)
def test_called_as_the_trainer_calls_them(reward: RewardFunction, given: dict[str, Any]) -> None:
    """By keyword, with columns it does not know; one value each; the same when repeated."""
    texts = ["<think>B</think>7", "7 7 7 7 7", "B", r"\boxed{7}", "a a a a\n`7`", '{"a": 7}']
    texts += ["这 7 a", "7"]
    columns = {k: v * len(texts) for k, v in given.items() if isinstance(v, list)}
    if reward is soft_overlong:
        columns["completion_ids"] = [[5] * n for n in range(len(texts))]
    columns |= {"prompts": ["q"] * len(texts), "subject": ["Algebra"] * len(texts)}
    args = {k: v for k, v in given.items() if not isinstance(v, list)}
    values = reward(completions=texts, **columns, **args)
    assert len(values) == len(texts)
    assert all(value is None or type(value) is float for value in values)
    assert len(set(values)) > 1, "a function that tells these apart"
    assert reward(completions=texts, **columns, **args) == values
    assert reward(completions=[as_chat(text) for text in texts], **columns, **args) == values
    backwards = {column: cells[::-1] for column, cells in columns.items()}
    assert reward(completions=texts[::-1], **backwards, **args) == values[::-1]
    empty: dict[str, Any] = {column: [] for column in columns}
    assert reward(completions=[], **empty, **args) == []


@table(
    ("reward", "columns"),
    [
        (exact_match, {"answer": ["5"]}),
        (math, {"answer": ["5"]}),
        (choice, {"answer": ["B"]}),
        (cosine_length, {"answer": ["7", "7"], "completion_ids": [[5]]}),
        (regex, {"answer": ["7"], "pattern": "(7)", "compare": True}),
        (json_schema, {"schema": [{}]}),
    ],
)
def test_columns_of_another_length_are_a_bug(
    reward: RewardFunction, columns: dict[str, Any]
) -> None:
    given = dict(REWARDS)[reward] | columns
    with pytest.raises(ValueError, match="zip"):
        reward(completions=["5", "6"], **given)


def test_those_that_may_not_end_have_a_deadline() -> None:
    """The user's patterns may backtrack without end, a schema's too, and math's parser may."""
    traits = {reward.__name__: traits_of(reward) for reward, _ in REWARDS}
    found = {name: (t.timeout, t.timeout_value) for name, t in traits.items() if t.timeout}
    assert found == {
        "math": (5, 0.0),
        "cosine_length": (5, None),
        "regex": (2, 0.0),
        "json_schema": (5, 0.0),
    }
    assert traits["math"].preload == traits["cosine_length"].preload == ("math_verify",)
    assert traits["json_schema"].preload == ("jsonschema",)


@table("name", [*shipped()])
def test_each_file_holds_one_documented_reward_of_its_name(name: str) -> None:
    function = getattr(importlib.import_module(f"grpo_cli.rewards.{name}"), name)
    assert REGISTERED[name] == f"grpo_cli.rewards.{name}:{name}"
    summary = (function.__doc__ or "").splitlines()[0]
    assert summary.endswith(".")
    assert len(summary) < 100


def test_listing_the_rewards_loads_nothing_heavy() -> None:
    code = (
        f"import importlib, sys\nfor name in {[*shipped()]}:\n"
        "    importlib.import_module(f'grpo_cli.rewards.{name}')\n"
        "heavy = ('sympy', 'math_verify', 'torch', 'transformers', 'jsonschema', 'numpy',\n"
        "         'referencing', 'regex', 'openai')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
