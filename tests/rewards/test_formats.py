"""Rewards for how a completion is written: format, choice, length, repetition, language."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.rewards import traits_of
from grpo_cli.rewards.choice import choice
from grpo_cli.rewards.cosine_length import cosine_length
from grpo_cli.rewards.json_schema import json_schema
from grpo_cli.rewards.language import language
from grpo_cli.rewards.regex import regex
from grpo_cli.rewards.repetition import repetition
from grpo_cli.rewards.tag_count import tag_count
from grpo_cli.rewards.think_format import think_format
from tests.tables import table

Args = dict[str, Any]
RewardFunction = Callable[..., list[float | None]]

ANY = {"prompts": ["q"], "subject": ["Algebra"]}  # what the trainer may pass besides

# Each with the columns and arguments that it cannot do without.
REWARDS: list[tuple[RewardFunction, Args]] = [
    (choice, {"answer": ["B"]}),
    (think_format, {}),
    (tag_count, {}),
    (cosine_length, {"answer": ["7"], "completion_ids": [[5]], "max_completion_tokens": 9}),
    (repetition, {}),
    (regex, {"pattern": "7"}),
    (json_schema, {}),
    (language, {}),
]


def as_chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def check(reward: RewardFunction, completion: str, expected: float | None, **given: Any) -> None:
    """As a text and as a chat; the value is a plain float, and none a negative zero."""
    for one in (completion, as_chat(completion)):
        (value,) = reward(completions=[one], **ANY, **given)
        assert value == (None if expected is None else pytest.approx(expected, abs=1e-9))
        assert value is None or (type(value) is float and str(value) != "-0.0")


# choice

CHOSEN = [  # completions with the letter that they choose, if any
    json.loads(line)
    for line in (Path(__file__).parent / "choice_cases.jsonl").read_text("utf-8").splitlines()
]


@table(("letter", "completion"), [(row["letter"], row["completion"]) for row in CHOSEN])
def test_choice(letter: str | None, completion: str) -> None:
    for gold in "ABI":
        check(choice, completion, float(gold == letter), answer=[gold])


@table(
    ("completion", "gold", "args", "expected"),
    [
        ("<think>Answer: B", "B", {"unclosed_think": True}, 1.0),
        ("B", "b", {}, 1.0),
        ("B", "(B)", {}, 1.0),
        ("B", " B. ", {}, 1.0),
        ("B", "B) Paris", {}, 1.0),
        ("B", "（B）巴黎", {}, 1.0),
        ("B", "B：巴黎", {}, 1.0),
        ("B", r"\boxed{B}", {}, 1.0),
        ("B", "So the answer is B", {}, 1.0),
        ("B", "Ｂ", {}, 1.0),
        ("A", "B. A", {}, 0.0),
        ("B", None, {}, None),
        ("B", "", {}, None),
        ("B", " \n", {}, None),
        ("", None, {}, None),
        ("K", "K", {"letters": "JK"}, 1.0),
        ("Answer: E", "B", {"letters": "ABCD"}, 0.0),
        ("Answer: B. Answer: E", "B", {"letters": "ABCD"}, 1.0),
        ("Answer: B. Answer: E", "B", {}, 0.0),
        ("Answer: 3", 3, {"letters": "1234"}, 1.0),
        ("Answer: 3.5", 3, {"letters": "1234"}, 0.0),
        ("Answer: 34", 3, {"letters": "1234"}, 0.0),
        ("Answer: 3 apples", 3, {"letters": "1234"}, 0.0),
        ("答案：甲", "甲", {"letters": "甲乙丙丁"}, 1.0),
        ("答案：乙", "甲", {"letters": "甲乙丙丁"}, 0.0),
        ("the answer is b", "B", {"letters": "abcd"}, 1.0),
    ],
)
def test_choice_reads_gold_and_letters(
    completion: str, gold: Any, args: Args, expected: float | None
) -> None:
    check(choice, completion, expected, answer=[gold], **args)


# think_format

R1 = {"opening": False}
TAGGED = {"answer_tag": "answer"}


@table(
    ("completion", "args", "expected"),
    [
        ("<think>why</think>7", {}, 1.0),
        ("\n<think>\nwhy\n</think>\n\n7\n", {}, 1.0),
        ("<think>a < b </ think ></think><b>7</b>", {}, 1.0),
        ("<think>思考</think>答", {}, 1.0),
        ("<think>why</think><answer>7</answer>", {}, 1.0),
        ("", {}, 0.0),
        ("<think>\u200b</think>\u200b", {}, 0.0),
        ("<think>\u3164</think>7", {}, 0.0),
        ("<think>\0</think>\0", {}, 0.0),
        ("7", {}, 0.0),
        ("why</think>7", {}, 0.0),
        ("<think>why", {}, 0.0),
        ("<think>why 7", {}, 0.0),
        ("<think></think>7", {}, 0.0),
        ("<think> \n</think>7", {}, 0.0),
        ("<think>why</think>", {}, 0.0),
        ("<think>why</think>\n ", {}, 0.0),
        ("So: <think>why</think>7", {}, 0.0),
        ("<think><think>why</think></think>7", {}, 0.0),
        ("<think>a<think>why</think>7", {}, 0.0),
        ("<think>why</think>7</think>", {}, 0.0),
        ("<think>why</think>7<think>why</think>8", {}, 0.0),
        ("</think>why<think>7", {}, 0.0),
        ("<Think>why</Think>7", {}, 0.0),
        # the template has written the first tag
        ("why</think>7", R1, 1.0),
        ("\nwhy\n</think>\n7", R1, 1.0),
        ("<think>why</think>7", R1, 0.0),
        ("why</think><think>7", R1, 0.0),
        ("why</think>7</think>", R1, 0.0),
        ("</think>7", R1, 0.0),
        ("why</think>", R1, 0.0),
        ("7", R1, 0.0),
        # a tag for the answer
        ("<think>why</think><answer>7</answer>", TAGGED, 1.0),
        ("<think>why</think>\n<answer>\n7\n</answer>\n", TAGGED, 1.0),
        ("why</think><answer>7</answer>", R1 | TAGGED, 1.0),
        ("<think>why</think><out_1>7</out_1>", {"answer_tag": "out_1"}, 1.0),
        ("<think>why</think>7", TAGGED, 0.0),
        ("<think>why</think><answer>7", TAGGED, 0.0),
        ("<think>why</think>7</answer>", TAGGED, 0.0),
        ("<think>why</think><answer></answer>", TAGGED, 0.0),
        ("<think>why</think><answer> \n</answer>", TAGGED, 0.0),
        ("<think>why</think>So <answer>7</answer>", TAGGED, 0.0),
        ("<think>why</think><answer>7</answer>.", TAGGED, 0.0),
        ("<think>why</think><answer>7</answer><answer>7</answer>", TAGGED, 0.0),
        ("<think>why</think><answer><answer>7</answer>", TAGGED, 0.0),
        ("<think>why</think><answer>7</answer></answer>", TAGGED, 0.0),
        ("<think>no <answer> yet</think><answer>7</answer>", TAGGED, 0.0),
        ("<think>why<answer>7</answer></think>", TAGGED, 0.0),
        ("<think>why</think><Answer>7</Answer>", TAGGED, 0.0),
    ],
)
def test_think_format(completion: str, args: Args, expected: float) -> None:
    check(think_format, completion, expected, **args)


# tag_count


@table(
    ("completion", "args", "expected"),
    [
        ("<think>why</think><answer>7</answer>", {}, 1.0),
        ("</answer></think><answer><think>", {}, 1.0),
        ("<think>why</think>7", {}, 0.5),
        ("<think>why", {}, 0.25),
        ("<think><think>why</think><answer>7</answer>", {}, 0.75),
        ("<THINK>why</THINK>", {}, 0.0),
        ("", {}, 0.0),
        ("<plan>a</plan>", {"tags": ["<plan>", "</plan>", "#"]}, 2 / 3),
        ("<think>\nwhy", {"tags": ["<think>\n"]}, 1.0),
        ("<think> why", {"tags": ["<think>\n"]}, 0.0),
        ("结论：7", {"tags": ("结论：",)}, 1.0),
    ],
)
def test_tag_count(completion: str, args: Args, expected: float) -> None:
    check(tag_count, completion, expected, **args)


# cosine_length

PAPER = {"correct_max": 2, "correct_min": 1, "wrong_min": -10, "wrong_max": 0, "exceed": -10}


@table(
    ("completion", "tokens", "args", "expected"),
    [
        # (1 + cos(pi/4)) / 2 = 0.8535533906
        (r"\boxed{7}", 0, {}, 1.0),
        (r"\boxed{7}", 25, {}, 0.5 + 0.5 * 0.8535533906),
        (r"\boxed{7}", 50, {}, 0.75),
        (r"\boxed{7}", 75, {}, 1.0 - 0.5 * 0.8535533906),
        (r"\boxed{7}", 99, {}, 0.5 + 0.5 * 0.0002467198),
        (r"\boxed{7}", 100, {}, -1.0),
        (r"\boxed{7}", 999, {}, -1.0),
        (r"\boxed{8}", 0, {}, -1.0),
        (r"\boxed{8}", 25, {}, -0.5 - 0.5 * 0.8535533906),
        (r"\boxed{8}", 50, {}, -0.75),
        (r"\boxed{8}", 99, {}, -0.5 - 0.5 * 0.0002467198),
        (r"\boxed{8}", 100, {}, -1.0),
        ("", 0, {}, -1.0),
        (r"\boxed{7}", 0, PAPER, 2.0),
        (r"\boxed{7}", 50, PAPER, 1.5),
        (r"\boxed{8}", 0, PAPER, -10.0),
        (r"\boxed{8}", 50, PAPER, -5.0),
        (r"\boxed{8}", 100, PAPER, -10.0),
        (r"\boxed{7}", 100, PAPER, -10.0),
        (r"\boxed{7}", 100, {"exceed": 0.25}, 0.25),
        (r"\boxed{8}", 100, {"exceed": 0.25}, 0.25),
        (r"\boxed{7}", 100, {"max_completion_tokens": 200}, 0.75),
        (r"\boxed{7}", 1, {"max_completion_tokens": 1}, -1.0),
    ],
)
def test_cosine_length(completion: str, tokens: int, args: Args, expected: float) -> None:
    given = {"max_completion_tokens": 100} | args
    check(cosine_length, completion, expected, answer=["7"], completion_ids=[[5] * tokens], **given)


@table(("gold", "tokens"), [(None, 1), ("", 1), (None, 100)])
def test_cosine_length_does_not_apply_without_a_gold_answer(gold: str | None, tokens: int) -> None:
    ids = [[5] * tokens]
    check(cosine_length, "7", None, answer=[gold], completion_ids=ids, max_completion_tokens=100)


def test_cosine_length_measures_each_completion_by_its_own_tokens() -> None:
    found = cosine_length(
        completions=["7", "8", "7"],
        answer=["7", "7", None],
        completion_ids=[[5] * 50, [], [5]],
        max_completion_tokens=100,
    )
    assert found == [pytest.approx(0.75), -1.0, None]


# repetition


@table(
    ("completion", "args", "expected"),
    [
        ("", {}, 0.0),
        ("a b", {}, 0.0),
        ("a b c", {}, 0.0),
        ("a b c d e", {}, 0.0),
        # 4 trigrams, 3 of them different
        ("a b c a b c", {}, -1 / 4),
        ("a b c a b c", {"max_penalty": -2}, -2 / 4),
        ("a b c a b c", {"max_penalty": 0}, 0.0),
        ("a a a a a a", {}, -3 / 4),
        ("A b\nC  a B c", {}, -1 / 4),
        ("a b c, a b c", {}, 0.0),
        # 6 unigrams, 3 of them different
        ("a b c a b c", {"ngram": 1}, -1 / 2),
        ("a b a b c a", {"ngram": 2}, -1 / 5),
        # 8 windows of 5 words, 5 of them different; then 6 of 7 words, then 1 of 12
        ("a b c d e " * 2 + "a b", {"ngram": 5}, -3 / 8),
        ("a b c d e " * 2 + "a b", {"ngram": 7}, -1 / 6),
        ("a b c d e " * 2 + "a b", {"ngram": 12}, 0.0),
        ("a b c d e " * 2 + "a b", {"ngram": 13}, 0.0),
        ("的的的的", {}, 0.0),
        ("的的的的", {"unit": "characters"}, -1 / 2),
        ("我很好我很好", {"unit": "characters"}, -1 / 4),
        ("我很 好\n我很好", {"unit": "characters"}, -1 / 4),
        ("abcABC", {"unit": "characters"}, -1 / 4),
        ("", {"unit": "characters"}, 0.0),
    ],
)
def test_repetition(completion: str, args: Args, expected: float) -> None:
    check(repetition, completion, expected, **args)


@table(("ids", "expected"), [([1, 2, 3, 1, 2, 3], -0.25), ([1, 2, 3], 0.0), ([1], 0.0), ([], 0.0)])
def test_repetition_of_tokens(ids: list[int], expected: float) -> None:
    check(repetition, "a a a a a", expected, completion_ids=[ids], unit="tokens")


@table("ngram", range(1, 12))
def test_repetition_counts_what_windows_count(ngram: int) -> None:
    words = "abracadabra" * 3 + "cadabra"
    windows = [words[i : i + ngram] for i in range(len(words) - ngram + 1)]
    expected = len(set(windows)) / len(windows) - 1
    check(repetition, " ".join(words), expected, ngram=ngram)


# regex


@table(
    ("completion", "args", "expected"),
    [
        ("I have 7 apples", {"pattern": r"\d+ apples"}, 1.0),
        ("I have no apples", {"pattern": r"\d+ apples"}, 0.0),
        ("", {"pattern": "a"}, 0.0),
        ("", {"pattern": ""}, 1.0),
        ("xabc", {"pattern": "abc", "mode": "fullmatch"}, 0.0),
        ("abc\n", {"pattern": "abc", "mode": "fullmatch"}, 0.0),
        ("abc", {"pattern": "abc", "mode": "fullmatch"}, 1.0),
        ("ABC", {"pattern": "abc"}, 0.0),
        ("ABC", {"pattern": "abc", "ignore_case": True}, 1.0),
        ("a\nb", {"pattern": "a.b"}, 0.0),
        ("a\nb", {"pattern": "a.b", "dotall": True}, 1.0),
        ("a\nb", {"pattern": "^b"}, 0.0),
        ("a\nb", {"pattern": "^b", "multiline": True}, 1.0),
        ("A\nB", {"pattern": "^b", "multiline": True, "ignore_case": True}, 1.0),
        ("答案", {"pattern": "^.案$"}, 1.0),
        ("a\0b", {"pattern": "\\x00"}, 1.0),
    ],
)
def test_regex(completion: str, args: Args, expected: float) -> None:
    check(regex, completion, expected, **args)


@table(
    ("completion", "gold", "pattern", "expected"),
    [
        ("x = 7.", "7", r"x = (\d+)", 1.0),
        ("x = 8.", "7", r"x = (\d+)", 0.0),
        ("y = 7.", "7", r"x = (\d+)", 0.0),
        ("x = 7.", 7, r"x = (\d+)", 1.0),
        ("x =  7 ", " 7\n", "x =(.*)", 1.0),
        ("x = 8, x = 7", "7", r"x = (\d+)", 0.0),
        ("a7", "7", r"(a)(\d)", 0.0),
        ("7", "None", "(a)?7", 0.0),
        ("x = 7.", None, r"x = (\d+)", None),
        ("y", None, r"x = (\d+)", None),
        ("x =", "", "x =(.*)", 1.0),
    ],
)
def test_regex_compares(completion: str, gold: Any, pattern: str, expected: float | None) -> None:
    check(regex, completion, expected, answer=[gold], pattern=pattern, compare=True)


def test_regex_needs_no_gold_unless_it_compares() -> None:
    check(regex, "7", 1.0, answer=[None], pattern="7")


@table("pattern", ["a(b", "a[b", "*", r"(?P<n>a)(?P<n>b)", r"\1"])
def test_regex_names_a_bad_pattern_and_the_place(pattern: str) -> None:
    sentence = f"regex: pattern is {pattern!r}; it must be a regular expression of Python's re: "
    with pytest.raises(ValueError, match=re.escape(sentence) + r".* at position \d+\.$"):
        regex(completions=["a"], pattern=pattern)


@table("pattern", ["(" * 100_000, "a{99999999999999999999}"])
def test_regex_names_a_pattern_that_is_too_much(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"^regex: pattern is ") as error:
        regex(completions=["a"], pattern=pattern)
    assert len(str(error.value)) < 1000


# json_schema

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
FENCED = 'Here:\n```json\n{"x": 1}\n```\nThat is it.'
PATTERN = {"type": "string", "pattern": "^a+$"}


@pytest.mark.parametrize(
    ("completion", "schema", "expected"),
    [
        ('{"x": 1}', POINT, 1.0),
        ('\n\t{"x": 1, "y": -2}\r\n', POINT, 1.0),
        ('{"x": 1.5}', POINT, 0.0),
        ('{"x": "1"}', POINT, 0.0),
        ('{"x": true}', POINT, 0.0),
        ('{"y": 1}', POINT, 0.0),
        ('{"x": 1, "z": 1}', POINT, 0.0),
        ("[]", POINT, 0.0),
        ("", POINT, 0.0),
        ('{"x": 1', POINT, 0.0),
        ('{"x": 1} and so on', POINT, 0.0),
        ('So {"x": 1}', POINT, 0.0),
        ('{"x": 1}{"x": 1}', POINT, 0.0),
        ("{'x': 1}", POINT, 0.0),
        ('{"x": 1,}', POINT, 0.0),
        # in a fence
        (FENCED, POINT, 1.0),
        ('```JSON\n{"x": 1}\n```', POINT, 1.0),
        ('  ```json  \r\n{"x":\r\n1}\r\n  ```', POINT, 1.0),
        ('```json\n{"z": 1}\n```\n```json\n{"x": 1}\n```', POINT, 1.0),
        ('```json\n{"x": 1}\n```\n```json\n{"z": 1}\n```', POINT, 0.0),
        ('```json\n{"x": 1}\n```\n```json\n{"z": 1}', POINT, 1.0),
        ('```json\n{"x": 1}', POINT, 0.0),
        ('```\n{"x": 1}\n```', POINT, 0.0),
        ('```python\n{"x": 1}\n```', POINT, 0.0),
        ('```json\n{"x": 1} so\n```', POINT, 0.0),
        ("```json\n```", POINT, 0.0),
        ('```json\n["a\u2028b"]\n```', True, 1.0),
        ('{"x": 1, "y": "```json"}', POINT, 0.0),
        ('"```json"', {"type": "string"}, 1.0),
        # after the thoughts
        ('<think>{"z": 1}</think>\n{"x": 1}', POINT, 1.0),
        ('<think>```json\n{"x": 1}\n```</think>\n{"z": 1}', POINT, 0.0),
        ('<think>{"x": 1}</think>', POINT, 0.0),
        # what other readers let through
        ('{"x": 1, "x": 2}', POINT, 0.0),
        ('[{"a": {"b": 1, "b": 1}}]', True, 0.0),
        ("NaN", True, 0.0),
        ("[Infinity]", True, 0.0),
        ("-Infinity", True, 0.0),
        ("1e999", True, 0.0),
        ("[1e300]", True, 1.0),
        ("1" * 5000, True, 0.0),
        ("9" * 4000, {"multipleOf": 0.5}, 0.0),
        ("\ufeff{}", True, 0.0),
        ("\xa0{}", True, 0.0),
        ('"\0"', True, 0.0),
        ('"\\u0000"', True, 1.0),
        ("[" * 100_000, True, 0.0),
        ("[" * 100_000 + "]" * 100_000, True, 0.0),
        ('{"a":' * 100_000, True, 0.0),
        ("[[[]]]", {"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}}, 1.0),
        # every kind of JSON, and schemas of all kinds
        ("null", None, 1.0),
        ("7", None, 1.0),
        ('"a"', None, 1.0),
        ("a", None, 0.0),
        ("7", True, 1.0),
        ("7", False, 0.0),
        ("7", {}, 1.0),
        ('"aaa"', PATTERN, 1.0),
        ('"aab"', PATTERN, 0.0),
        ("7", {"$schema": "http://json-schema.org/draft-04/schema#", "maximum": 7}, 1.0),
        ("[1, 2]", {"$schema": "http://json-schema.org/draft-07/schema#", "items": [True]}, 1.0),
        ('{"type": "array"}', {"$ref": "https://json-schema.org/draft/2020-12/schema"}, 1.0),
        ('{"type": "arr"}', {"$ref": "https://json-schema.org/draft/2020-12/schema"}, 0.0),
        ('{"a": {"a": 1}}', {"type": "object", "properties": {"a": {"$ref": "#"}}}, 0.0),
        ("7", {"$defs": {"a": {"$id": "b", "$ref": "#/$defs/c", "$defs": {"c": True}}}}, 1.0),
        ("7", {"$id": "http://x.y/z", "$ref": "w", "$defs": {"w": {"$id": "w"}}}, 1.0),
    ],
)
def test_json_schema(completion: str, schema: Any, expected: float, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(schema), "utf-8")
    if schema is None:
        check(json_schema, completion, expected)
        check(json_schema, completion, expected, schema=None)
        return
    check(json_schema, completion, expected, schema=[schema])
    check(json_schema, completion, expected, schema=[json.dumps(schema)])
    check(json_schema, completion, expected, schema=str(path))
    if isinstance(schema, dict):
        check(json_schema, completion, expected, schema=schema)


def test_json_schema_of_each_row() -> None:
    schemas = [POINT, '{"type": "integer"}', None, " ", {"type": "integer"}]
    texts = ['{"x": 1}', "7", "7", "7", '{"x": 1}']
    assert json_schema(completions=texts, schema=schemas) == [1.0, 1.0, None, None, 0.0]


@table(
    ("schema", "sentence"),
    [
        ({"type": "int"}, "it must be a valid JSON schema: 'int' is not valid"),
        ({"pattern": "("}, "it must be a valid JSON schema: '(' is not a 'regex'"),
        (["{"], "schema is '{'; it must be JSON: Expecting property name"),
        (["7"], "schema is '7'; it must be an object."),
        (["[" * 100_000], "it must be JSON: maximum recursion depth"),
        ([7], "schema is '7'; it must be an object."),
        ('{"type": "object"}', "it must be a schema or the path of a JSON file"),
        ("no/such.json", "schema is 'no/such.json'; it must be a schema or the path of a"),
        (7, "schema is 7; it must be a schema or the path of a JSON file."),
        (True, "schema is True; it must be a schema or the path of a JSON file."),
    ],
)
def test_json_schema_refuses(schema: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match="^json_schema: .*" + re.escape(sentence)) as error:
        json_schema(completions=["7"], schema=schema)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"$ref": "http://localhost:9/a.json"}, "http://localhost:9/a.json"),
        ({"properties": {"a": {"$ref": "https://x.y/a#b"}}}, "https://x.y/a#b"),
        ({"$ref": "#/$defs/b", "$defs": {"a": True}}, "#/$defs/b"),
        ({"$ref": "#b"}, "#b"),
        ({"$dynamicRef": "https://x.y/a"}, "https://x.y/a"),
        ({"$ref": "file:///etc/passwd"}, "file:///etc/passwd"),
        # beyond the keywords that hold schemas
        ({"$ref": "#/x/a", "x": {"a": {"$ref": "https://x.y/a"}}}, "https://x.y/a"),
    ],
)
def test_json_schema_fetches_nothing(
    schema: Args, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("it asks the network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("urllib.request.urlopen", refuse)
    with pytest.raises(ValueError, match=re.escape(f"{place!r} is not in it, and nothing is")):
        json_schema(completions=['{"a": 1}'], schema=schema)


# language


@table(
    ("completion", "args", "expected"),
    [
        ("hello", {}, 1.0),
        ("你好", {}, 0.0),
        ("你好", {"script": "han"}, 1.0),
        ("ab你好", {}, 0.5),
        ("ab你好", {"script": "han"}, 0.5),
        ("abc你", {"script": "han"}, 0.25),
        ("àéßøŁ", {}, 1.0),
        ("a\u0301你", {}, 0.5),
        ("Ａｂ", {}, 1.0),
        ("привет", {"script": "cyrillic"}, 1.0),
        ("αβγ ab", {"script": "greek"}, 0.6),
        ("שלום", {"script": "hebrew"}, 1.0),
        ("مرحبا", {"script": "arabic"}, 1.0),
        ("नमस्ते", {"script": "devanagari"}, 1.0),
        ("สวัสดี", {"script": "thai"}, 1.0),
        ("안녕", {"script": "hangul"}, 1.0),
        ("안녕漢字", {"script": "hangul"}, 0.5),
        ("안녕漢字", {"script": "korean"}, 1.0),
        ("カレーを食べる", {"script": "japanese"}, 1.0),
        (
            "カレーを食べる",
            {"script": "kana"},
            5 / 6,
        ),  # ー belongs to no one script
        ("カレーを食べる", {"script": "hiragana"}, 3 / 6),
        ("カレーを食べる", {"script": "han"}, 1 / 6),
        ("カレーを食べる", {"script": "latin"}, 0.0),
        # no letters
        ("", {}, None),
        ("1 + 1 = 2。！", {}, None),
        ("𝑥𝑦 ℝ µ", {}, None),
        ("\0", {}, None),
        ("\ud800", {}, None),
        ("12 你 34", {"script": "han"}, 1.0),
        # what is no prose
        (r"\frac{1}{2} 你", {"script": "han"}, 1.0),
        (r"\begin{align*} 你 \end{align*}", {"script": "han"}, 1.0),
        (r"\boxed{你}", {"script": "han"}, 1.0),
        (r"\boxed{ab}", {"script": "han"}, 0.0),
        ("因 $x + y$ 果", {"script": "han"}, 1.0),
        ("因 $x$$y$ 果", {"script": "han"}, 1.0),
        ("因 $$x\n+ y$$ 果", {"script": "han"}, 1.0),
        (r"因 \(x + y\) 果 \[x\]", {"script": "han"}, 1.0),
        (r"\(ab\) 因", {"script": "han"}, 1.0),
        (r"因 \[ ab", {"script": "han"}, 1 / 3),
        (r"\) 因 \( x \) ab", {"script": "han"}, 1 / 3),
        ("$5 ab $6 因", {"script": "han"}, 1 / 3),
        ("$ab 因", {"script": "han"}, 1 / 3),
        ("$5 ab $ 因", {"script": "han"}, 1 / 3),
        ("5$ ab$ 因", {"script": "han"}, 1 / 3),
        ("$5 or NT$6 因", {"script": "han"}, 1 / 5),
        ("$a\nb$ 因", {"script": "han"}, 1 / 3),
        ("```python\nprint()\n```\n因", {"script": "han"}, 1.0),
        ("  ```\nab\n  ```  \n因", {"script": "han"}, 1.0),
        ("~~~\nab\n```\nab\n~~~\n因", {"script": "han"}, 1.0),
        ("因\n```\nab", {"script": "han"}, 1.0),
        ("````\n```\nab\n````\n因", {"script": "han"}, 1.0),
        ("```\nab\n````\n因", {"script": "han"}, 1.0),
        ("```\nab\n```ab\n因", {"script": "latin"}, None),
        ("```\n因\n~~~\n因\n```\nab", {"script": "han"}, 0.0),
        ("因\n```ab``` ab", {"script": "han"}, 1 / 3),
        ("用 `ab` 吧 `", {"script": "han"}, 1.0),
        ("用 `ab\nab`", {"script": "han"}, 1 / 5),
        ("<think>因</think><answer>ab</answer>", {"script": "han"}, 1 / 3),
        ("因 a < b > c", {"script": "han"}, 1 / 4),
        ("```\nab\n```", {}, None),
        # a threshold
        ("ab你好", {"threshold": 0.5}, 1.0),
        ("ab你好", {"threshold": 0.51}, 0.0),
        ("ab", {"threshold": 1}, 1.0),
        ("12", {"threshold": 0.5}, None),
    ],
)
def test_language(completion: str, args: Args, expected: float | None) -> None:
    check(language, completion, expected, **args)


# all of them


@table(
    ("reward", "given", "sentence"),
    [
        (choice, {"letters": ""}, "letters is ''; it must be letters or digits, none of them twi"),
        (choice, {"letters": "ABa"}, "letters is 'ABa'; it must be letters or digits, none of th"),
        (choice, {"letters": "A-C"}, "letters is 'A-C'; it must be letters or digits, none of th"),
        (choice, {"letters": ["A"]}, "letters is ['A']; it must be letters or digits, none of th"),
        (choice, {"answer": ["Paris"]}, "answer is 'Paris'; it must be one of the letters ABCDEF"),
        (choice, {"answer": ["K"]}, "answer is 'K'; it must be one of the letters ABCDEFGHIJ."),
        (choice, {"answer": [1]}, "answer is '1'; it must be one of the letters ABCDEFGHIJ."),
        (choice, {"answer": ["A, B"]}, "answer is 'A, B'; it must be one of the letters"),
        (think_format, {"opening": "no"}, "opening is 'no'; it must be true or false."),
        (think_format, {"answer_tag": "<answer>"}, "answer_tag is '<answer>'; it must be a tag's"),
        (think_format, {"answer_tag": "answer>"}, "answer_tag is 'answer>'; it must be a tag's"),
        (think_format, {"answer_tag": ""}, "answer_tag is ''; it must be a tag's name"),
        (think_format, {"answer_tag": "think"}, "answer_tag is 'think'; it must be a tag's name"),
        (think_format, {"answer_tag": 7}, "answer_tag is 7; it must be a tag's name"),
        (tag_count, {"tags": []}, "tags is []; it must be a list of texts, none empty, none twi"),
        (tag_count, {"tags": "<a>"}, "tags is '<a>'; it must be a list of texts"),
        (tag_count, {"tags": ["a", ""]}, "tags is ['a', '']; it must be a list of texts"),
        (tag_count, {"tags": ["a", "a"]}, "tags is ['a', 'a']; it must be a list of texts"),
        (tag_count, {"tags": ["a", 7]}, "tags is ['a', 7]; it must be a list of texts"),
        (tag_count, {"tags": 7}, "tags is 7; it must be a list of texts"),
        (
            cosine_length,
            {"max_completion_tokens": 0},
            "max_completion_tokens is 0; it must be a",
        ),
        (cosine_length, {"max_completion_tokens": 9.5}, "max_completion_tokens is 9.5; it must be"),
        (cosine_length, {"max_completion_tokens": True}, "max_completion_tokens is True; it must "),
        *(
            (cosine_length, {name: value}, f"{name} is {value!r}; it must be a number.")
            for name in PAPER
            for value in ("1", None, True, float("nan"), float("-inf"))
        ),
        (repetition, {"unit": "lines"}, "unit is 'lines'; it must be one of words, characters, t"),
        (repetition, {"unit": "tokens"}, 'unit "tokens" needs completion_ids, and none were pass'),
        (repetition, {"ngram": 0}, "ngram is 0; it must be a whole number, 1 or more."),
        (repetition, {"ngram": 2.5}, "ngram is 2.5; it must be a whole number, 1 or more."),
        (repetition, {"ngram": True}, "ngram is True; it must be a whole number, 1 or more."),
        (repetition, {"max_penalty": 1}, "max_penalty is 1; it must be a number, 0 or less."),
        (repetition, {"max_penalty": "-1"}, "max_penalty is '-1'; it must be a number, 0 or les"),
        (repetition, {"max_penalty": float("nan")}, "max_penalty is nan; it must be a number, 0"),
        (repetition, {"max_penalty": float("-inf")}, "max_penalty is -inf; it must be a number,"),
        (regex, {"pattern": 7}, "pattern is 7; it must be a text, in quotes."),
        (regex, {"pattern": ["a"]}, "pattern is ['a']; it must be a text, in quotes."),
        (regex, {"mode": "match"}, "mode is 'match'; it must be one of search, fullmatch."),
        *(
            (regex, {name: 1}, f"{name} is 1; it must be true or false.")
            for name in ("ignore_case", "dotall", "multiline", "compare")
        ),
        (regex, {"compare": True, "answer": ["7"]}, "pattern is '7'; with compare it must have a"),
        (regex, {"compare": True, "pattern": "(7)"}, "compare is true, and there is no column ans"),
        (
            language,
            {"script": "klingon"},
            "script is 'klingon'; it must be one of arabic, arm",
        ),
        (language, {"script": "Latin"}, "script is 'Latin'; it must be one of arabic"),
        (language, {"threshold": 0}, "threshold is 0; it must be above 0 and at most 1, or null."),
        (language, {"threshold": 1.1}, "threshold is 1.1; it must be above 0 and at most 1"),
        (language, {"threshold": True}, "threshold is True; it must be above 0 and at most 1"),
        (language, {"threshold": "0.5"}, "threshold is '0.5'; it must be above 0 and at most 1"),
    ],
)
def test_bad_arguments(reward: RewardFunction, given: Args, sentence: str) -> None:
    needed = dict(REWARDS)[reward]
    with pytest.raises(ValueError, match="^" + re.escape(f"{reward.__name__}: {sentence}")):
        reward(completions=["7"], **ANY, **(needed | given))


N = 200_000
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


# cosine_length reads the text as math does, whose own tests do this.
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.smoke  # a large table
@table(
    ("reward", "given"), [(reward, given) for reward, given in REWARDS if reward != cosine_length]
)
def test_hostile_text_is_worth_no_more_than_nothing(
    reward: RewardFunction, given: Args, name: str
) -> None:
    completion = HOSTILE[name]
    (value,) = reward(completions=[completion], **given)
    if reward is language:
        assert value in (None, 0.0, 1.0)
    elif reward is repetition:
        assert value is not None
        assert -1.0 <= value <= 0.0
    else:
        assert value == 0.0


@table(("reward", "given"), REWARDS)
def test_called_as_the_trainer_calls_them(reward: RewardFunction, given: Args) -> None:
    """By keyword, with columns it does not know; one value each; the same when repeated."""
    texts = ["<think>B</think>7", "7 7 7 7 7", "B", "选B，选B，选B，选B", "a", '{"a": 7}', "这 7 a"]
    texts[4] = "a a a a\n`7`"
    count = len(texts)
    columns = {k: v * count for k, v in given.items() if isinstance(v, list)}
    columns |= {"prompts": ["q"] * count, "subject": ["Algebra"] * count}
    args = {k: v for k, v in given.items() if not isinstance(v, list)}
    values = reward(completions=texts, **columns, **args)
    assert len(values) == count
    assert all(value is None or type(value) is float for value in values)
    assert len(set(values)) > 1, "a function that tells these apart"
    assert reward(completions=texts, **columns, **args) == values
    assert reward(completions=[as_chat(text) for text in texts], **columns, **args) == values
    assert reward(completions=texts[::-1], **columns, **args) == values[::-1]
    empty: Args = {column: [] for column in columns}
    assert reward(completions=[], **empty, **args) == []


@table(
    ("reward", "columns"),
    [
        (choice, {"answer": ["B"]}),
        (cosine_length, {"answer": ["7", "7"], "completion_ids": [[5]]}),
        (regex, {"answer": ["7"], "pattern": "(7)", "compare": True}),
        (json_schema, {"schema": [{}]}),
    ],
)
def test_columns_of_another_length_are_a_bug(reward: RewardFunction, columns: Args) -> None:
    given = dict(REWARDS)[reward] | columns
    with pytest.raises(ValueError, match="zip"):
        reward(completions=["5", "6"], **given)


def test_those_that_may_not_end_have_a_deadline() -> None:
    """The user's patterns may backtrack without end, a schema's too, and math's parser may."""
    traits = {reward.__name__: traits_of(reward) for reward, _ in REWARDS}
    assert {name: t.timeout for name, t in traits.items() if t.timeout is not None} == {
        "cosine_length": 5,
        "regex": 2,
        "json_schema": 5,
    }
    assert traits["cosine_length"].preload == ("math_verify",)
    assert traits["json_schema"].preload == ("jsonschema",)
