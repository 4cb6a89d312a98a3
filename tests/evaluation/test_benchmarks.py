import contextlib
import dataclasses
import functools
import io
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import datasets
import pytest
from transformers import PreTrainedTokenizerFast

from grpo_cli.config import parsing
from grpo_cli.config.recipe import Recipe
from grpo_cli.errors import UserError
from grpo_cli.evaluation import benchmarks
from grpo_cli.evaluation.settings import Benchmark
from grpo_cli.rewards import has_votes
from grpo_cli.rewards._text import boxed_answers
from grpo_cli.rewards.math import math
from tests.composed import composed
from tests.data.test_files import write
from tests.evaluation.modes import prompted
from tests.programs import ROOT
from tests.tables import rows_of, table

PROGRAMS = ("humaneval", "humaneval_chat", "mbpp")
FIGURES = ("geometry3k",)
ALL = sorted(path.stem for path in (ROOT / "recipes" / "benchmark").glob("*.yaml"))
MATHS = [name for name in ALL if name not in PROGRAMS + FIGURES]
SHIPPED = [name for name in ALL if not name.startswith("aime")]

BESIDES = {"model": {"path": "x"}, "dataset": {"train": "t.jsonl"}}  # what every recipe has


@functools.cache
def recipe_with_all() -> Recipe:
    return composed("benchmark=" + ",".join(ALL), parse=parsing.parse)


@pytest.fixture
def shipped() -> Callable[..., Benchmark]:
    """A shipped benchmark, with other values of its own knobs."""

    def one(name: str, **changes: Any) -> Benchmark:
        return prompted(recipe_with_all().benchmark[name], **changes)

    return one


def sample_of(name: str) -> str:
    kind = "parquet" if name in FIGURES else "jsonl"
    return f"pkg://grpo_cli/samples/benchmarks/{name.removesuffix('_chat')}.{kind}"


@pytest.mark.smoke  # the first one loads Hydra and a model library
@pytest.mark.parametrize("name", ALL)
def test_a_benchmark_composes(name: str, shipped: Callable[..., Benchmark]) -> None:
    found = shipped(name)
    assert re.fullmatch(r"[\w-]+/[\w-]+", found.data), "a hub name"
    assert list(found.prompts) == (["cot"] if name in PROGRAMS else ["cot", "tir"])
    assert len(found.examples) == (4 if name in MATHS else 0)
    if name in MATHS:
        assert all(template.startswith("{question}\n") for template in found.prompts.values())
        assert "```python" in found.prompts["tir"]
        assert [mode.tools for mode in found.modes.values()] == [False, True]


def test_problems_with_figures(shipped: Callable[..., Benchmark]) -> None:
    """Each has one figure, its place in the text, and an answer that the reward reads."""
    found = shipped("geometry3k", data=sample_of("geometry3k"))
    rows = benchmarks.load("geometry3k", found).rows
    assert len(rows) == 12
    for row in rows:
        assert row["question"].count("<image>") == len(row["images"]) == 1
        right, wrong = f"\\boxed{{{row['answer']}}}", "\\boxed{1}"
        assert math([right, wrong], [row["answer"]] * 2) == [1.0, 0.0]


@pytest.mark.parametrize("name", ["gsm8k", "math", "cmath"])
def test_worked_examples_are_right(name: str, shipped: Callable[..., Benchmark]) -> None:
    """Both solutions end with one answer, and each program prints what stands below it."""
    for example in shipped(name).examples:
        (cot,), (tir,) = boxed_answers(example["cot"]), boxed_answers(example["tir"])
        assert cot == tir
        program, output = re.findall(r"```\w+\n(.*?)```", example["tir"], re.DOTALL)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(program, {})
        assert printed.getvalue() == output


@pytest.mark.parametrize("name", SHIPPED)
def test_a_file_takes_the_place_of_the_hub(name: str, shipped: Callable[..., Benchmark]) -> None:
    found = shipped(name, data=sample_of(name))
    rows = benchmarks.load(name, found, limit=5)
    assert len(rows.rows) == 5
    assert "question" in rows.columns
    assert set(found.breakdown) <= set(rows.columns)
    assert set(benchmarks.gold_columns(name, found)) <= set(rows.columns)
    for row in rows.rows:
        prompt = benchmarks.problem_text(found, "cot", row)
        assert row["question"] in prompt


# A row of each benchmark with the columns of its data set on the hub.
ON_THE_HUB = {line["name"]: line["row"] for line in rows_of("evaluation/hub_rows.jsonl")}


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_the_hubs_columns_get_the_names_that_are_read(
    name: str, shipped: Callable[..., Benchmark], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def load_dataset(source: str, subset: str | None, split: str, **_: bool) -> datasets.Dataset:
        asked.append((source, subset, split))
        return datasets.Dataset.from_list([ON_THE_HUB[name]])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = shipped(name)
    (row,) = benchmarks.load(name, found).rows
    assert asked == [(found.data, found.subset, found.split)]
    assert row["question"] == "Q"
    if name in PROGRAMS:
        assert "T" in row["tests"]
    else:
        assert math(["The answer is 18."], [row["answer"]]) == [1.0]
    assert set(found.breakdown) <= row.keys()


def test_a_shipped_renaming_gives_way_and_the_users_own_does_not(
    tmp_path: Path, shipped: Callable[..., Benchmark]
) -> None:
    path = write(
        tmp_path / "m.jsonl", {"question": "Q", "answer": "1", "solution": "2", "mine": "3"}
    )
    (row,) = benchmarks.load("math", shipped("math", data=str(path))).rows
    assert row["answer"] == "1"
    own = shipped("math", data=str(path), columns={"question": "problem", "answer": "mine"})
    (row,) = benchmarks.load("math", own).rows
    assert row == {"question": "Q", "answer": "3", "solution": "2"}


@table(
    ("row", "change", "said"),
    [
        ({"question": "Q", "gold": "1"}, {}, "lacks the column 'answer' (benchmark.mine.reward)"),
        ({"problem": "Q", "answer": "1"}, {}, "Set benchmark.mine.columns.question=C"),
        ({"question": "Q", "answer": None}, {}, "row 1: the column 'answer' is null."),
        ({"question": "Q", "answer": " "}, {}, "is empty."),
        ({"question": None, "answer": "1"}, {}, "the column 'question' is null."),
        ({}, {"cot": "{question"}, "benchmark.mine.modes.cot.prompt = '{question': is not a temp"),
        ({}, {"cot": "Solve \\boxed{{it}}."}, "names no column of the data; write one in braces"),
        ({}, {"reward": "maths"}, "benchmark.mine.reward: there is no reward 'maths'"),
        ({}, {"breakdown": ["level"]}, "Set benchmark.mine.columns.level=COLUMN."),
        ({}, {"columns": {"a": "answer", "b": "answer"}}, "'answer' cannot be renamed to two"),
        ({}, {"data": "pkg://no_such_package/x.jsonl"}, "there is no such package"),
        ({}, {"data": "./no_such_file.jsonl"}, "there is no such file."),
    ],
)
def test_what_is_wrong_with_the_data_is_said(
    row: dict[str, Any], change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    if "answer" not in row and "gold" not in row:
        row = {"question": "Q", "answer": "1", **row}
    first = {name: cell if cell and cell != " " else "x" for name, cell in row.items()}
    path = write(tmp_path / "rows.jsonl", first, row)
    with pytest.raises(UserError) as error:
        benchmarks.load("mine", prompted(**{"data": str(path), **change}))
    assert said in str(error.value)
    assert str(error.value).startswith("benchmark.mine")
    assert "\n" not in str(error.value)


def test_columns_that_a_file_may_lack(tmp_path: Path, shipped: Callable[..., Benchmark]) -> None:
    path = write(tmp_path / "rows.jsonl", {"question": "Q", "answer": "1"})
    found = shipped("math", data=str(path))
    assert found.breakdown == ["level", "subject"]
    assert len(benchmarks.load("math", found).rows) == 1
    with pytest.raises(UserError, match="lacks the column 'grade'"):
        benchmarks.load("math", dataclasses.replace(found, breakdown=["level", "grade"]))


EXAMPLES = [
    {"question": "A", "cot": "a", "tir": "t"},
    {"question": "B", "cot": "b"},
    {"question": "C", "cot": "c", "tir": "u"},
]
MINE = prompted(data="x", cot="{question}!", tir="{question}?", examples=EXAMPLES)


def mine(**changes: Any) -> Benchmark:
    return prompted(MINE, **changes)


def test_a_plain_prompt() -> None:
    assert benchmarks.problem_text(mine(), "cot", {"question": "Q"}) == "Q!"
    found = benchmarks.problem_text(mine(shots=2), "tir", {"question": "Q"})
    assert found == "A?\nt\n\nC?\nu\n\nQ?", "those that have a solution in that mode"


def test_prompts_with_a_chat_template(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    given = [{"question": "1+1?", "answer": "2"}, {"question": "2+3?", "answer": "5"}]
    found = mine(data=str(write(tmp_path / "two.jsonl", *given)), shots=1)
    rows = benchmarks.load("mine", found)
    prompts = benchmarks.make_prompts("mine", found, "cot", rows, tokenizer)
    assert [p.row for p in prompts] == [0, 1]
    assert prompts[1].columns == {"question": "2+3?", "answer": "5"}
    messages = [
        {"role": "user", "content": "A!"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "2+3?!"},
    ]
    assert prompts[1].text == messages
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(prompts[1].ids) == rendered
    plain = dataclasses.replace(found, chat=False)
    prompts = benchmarks.make_prompts("mine", plain, "tir", rows, tokenizer)
    assert prompts[1].text == "A?\nt\n\n2+3??"
    assert tokenizer.decode(prompts[1].ids) == prompts[1].text


class Plain:
    """A tokenizer without a chat template; it begins a plain text with 1."""

    chat_template = None
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}
    all_special_tokens = ()

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[1] * add_special_tokens + [*text.encode()] for text in texts]}


@pytest.mark.parametrize(
    ("change", "mode", "expected"),
    [
        ({"chat": True}, "cot", "benchmark.mine.chat = true: the tokenizer has no chat template"),
        ({"system": "S"}, "cot", "benchmark.mine.system: is only read where the prompt is a chat,"),
        ({"shots": 3}, "tir", "benchmark.mine.shots = 3: 2 of benchmark.mine.examples have tir"),
        ({"shots": 1, "cot": "{question}{answer}"}, "cot", "benchmark.mine.modes.cot.prompt: row "),
        ({"cot": "{answer[1]}"}, "cot", "benchmark.mine.modes.cot.prompt: row 1 of "),
    ],
)
def test_what_is_wrong_with_the_prompts_is_said(
    change: dict[str, Any], mode: str, expected: str, tmp_path: Path
) -> None:
    there = [{"question": "Q", "answer": "22"}, {"question": "R", "answer": "5"}]
    found = mine(data=str(write(tmp_path / "r.jsonl", *there)), **change)
    rows = benchmarks.load("mine", found)
    with pytest.raises(UserError) as error:
        benchmarks.make_prompts("mine", found, mode, rows, Plain())  # type: ignore[arg-type]
    assert str(error.value).startswith(expected)


@pytest.mark.parametrize("name", MATHS)
@pytest.mark.parametrize("mode", ["cot", "tir"])
def test_shipped_examples_make_a_prompt(
    name: str, mode: str, shipped: Callable[..., Benchmark], tmp_path: Path
) -> None:
    path = write(tmp_path / "q.jsonl", {"question": "THE PROBLEM", "answer": "1"})
    found = shipped(name, data=str(path), shots=4)
    rows = benchmarks.load(name, found)
    (prompt,) = benchmarks.make_prompts(name, found, mode, rows, Plain())  # type: ignore[arg-type]
    assert prompt.text.count(found.stop[mode == "tir"]) == 5
    assert len(boxed_answers(prompt.text)) == 9, "one a solution, and an empty one a problem"


@pytest.mark.parametrize("name", SHIPPED)
def test_stop_texts_behind_a_problem(name: str, shipped: Callable[..., Benchmark]) -> None:
    found = shipped(name)
    expected = () if name == "humaneval" else tuple(found.stop)
    assert benchmarks.asking(found) == expected
    before = prompted(found, stop=["Q"], cot="Q {question}", tir=None)
    assert benchmarks.asking(before) == ()


def test_what_can_be_voted_on() -> None:
    assert all(map(has_votes, ["math", "exact_match", "choice", "grpo_cli.rewards.math:math"]))
    assert not any(map(has_votes, ["code", "my_package.my_module:math"]))


@pytest.mark.programs
def test_nothing_here_needs_torch() -> None:
    code = "import sys, grpo_cli.evaluation.benchmarks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_mode_of_ones_own_is_a_key_of_the_benchmark() -> None:
    agent = {"prompt": "Run code: {question}", "tools": True, "published": {"Other 7B": 50}}
    cfg = {
        **BESIDES,
        "benchmark": {"own": {"data": "a.jsonl", "modes": {"agent": agent}}},
        "eval": {"mode": ["agent"]},
        "generation": {"tools": {"max_calls": 2}},
    }
    recipe = parsing.parse(cfg)
    assert recipe.runs_programs
    assert recipe.benchmark["own"].modes["agent"].published == {"Other 7B": 50.0}
    cfg["eval"] = {"mode": ["agend"]}
    with pytest.raises(UserError, match=r"it has .*agent.*\. Set .*modes\.agend\.prompt\. Did you"):
        parsing.parse(cfg)
