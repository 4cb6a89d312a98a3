import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_cli.cli import run_command
from grpo_cli.config.recipe import Recipe
from grpo_cli.data.stored_completions import WRITTEN
from grpo_cli.data.stored_completions import load as stored_samples
from grpo_cli.errors import UserError
from grpo_cli.evaluation import benchmarks, stored_completions
from grpo_cli.evaluation.settings import Benchmark, Eval, Mode
from grpo_cli.evaluation.tasks import of_stored
from grpo_cli.records import Completion, Group, Prompt, regrouped
from grpo_cli.reporting import reporter
from grpo_cli.scoring.calls import RewardExecutor
from grpo_cli.scoring.scorer import Scorer
from tests.conftest import score
from tests.data.test_files import write
from tests.evaluation.modes import prompted
from tests.pictures import PNG, ROWS, image_groups, write_groups
from tests.tables import table

DATA = [
    {"id": "a", "question": "1+1?", "answer": "2"},
    {"id": "b", "question": "2+3?", "answer": "5"},
    {"id": "c", "question": "4+4?", "answer": "8"},
]

Line = dict[str, Any]


@pytest.fixture
def mine(tmp_path: Path) -> Benchmark:
    return Benchmark(data=str(write(tmp_path / "data.jsonl", *DATA)))


def load(path: Path, config: Benchmark, **options: Any) -> stored_completions.StoredGroups:
    columns = options.pop("columns", {})
    return stored_completions.load(path, columns, "mine", config, **options)


def read(path: Path, config: Benchmark, **options: Any) -> list[Group]:
    return load(path, config, **options).groups


def shape(groups: list[Group]) -> list[tuple[int, list[str]]]:
    return [(g.prompt_index, [r.text for r in g.rollouts]) for g in groups]


def values(
    groups: list[Group], config: Benchmark, executor: RewardExecutor
) -> list[list[float | None]]:
    """What the benchmark's reward gives each completion, as `grpo eval` scores it."""
    scorer = Scorer(benchmarks.rewards(config), [*groups[0].prompt.columns], "it", executor)
    rollouts, _ = score(scorer, [r for g in groups for r in g.rollouts])
    scored = regrouped(groups, rollouts)
    return [[next(iter(r.reward_parts.values())) for r in g.rollouts] for g in scored]


@pytest.mark.runs
def test_a_file_with_its_own_answers(tmp_path: Path, executor: RewardExecutor) -> None:
    lines = [{**row, "completion": f"It is {6 - i}."} for i, row in enumerate(DATA)]
    config = Benchmark(data="not/read")
    groups = read(write(tmp_path / "c.jsonl", *lines), config)
    assert shape(groups) == [(0, ["It is 6."]), (1, ["It is 5."]), (2, ["It is 4."])]
    (rollout,) = groups[1].rollouts
    assert rollout.prompt is groups[1].prompt
    assert rollout.prompt.columns == DATA[1]
    assert rollout.prompt.row == 1
    assert str(rollout.prompt.text).startswith("2+3?\nPlease reason")
    assert rollout.completion == Completion([], [], "stop")
    assert values(groups, config, executor) == [[0.0], [1.0], [0.0]]


def test_columns_are_renamed(tmp_path: Path, executor: RewardExecutor) -> None:
    lines = [{"q": "Q", "solution": "so 4", "gold": "4"}]
    config = Benchmark(data="not/read", columns={"question": "q", "answer": "solution"})
    path = write(tmp_path / "c.jsonl", *lines)
    groups = read(path, config, columns={"completion": "solution", "answer": "gold"})
    assert groups[0].prompt.columns == {"question": "Q", "answer": "4"}
    assert values(groups, config, executor) == [[1.0]]


def test_completions_of_a_row_are_a_group(tmp_path: Path, mine: Benchmark) -> None:
    lines = [
        {"row": 1, "sample": 1, "completion": "b1"},
        {"row": 0, "sample": 1, "completion": "a1"},
        {"row": 1, "sample": 0, "completion": "b0"},
        {"row": 0, "sample": 0, "completion": "a0"},
    ]
    groups = read(write(tmp_path / "c.jsonl", *lines), mine)
    assert shape(groups) == [(0, ["a0", "a1"]), (1, ["b0", "b1"])]
    for line in lines:
        del line["sample"]
    groups = read(write(tmp_path / "d.jsonl", *lines), mine)
    assert shape(groups) == [(0, ["a1", "a0"]), (1, ["b1", "b0"])]


@pytest.mark.parametrize("key", ["id", "question", "prompt"])
def test_or_of_an_id_or_a_text(key: str, tmp_path: Path) -> None:
    lines = [
        {key: "b", "answer": "1", "completion": "b0"},
        {key: "a", "answer": "2", "completion": "a0"},
        {key: "b", "answer": "1", "completion": "b1"},
        {key: "a", "answer": "2", "completion": "a1"},
    ]
    groups = read(write(tmp_path / "c.jsonl", *lines), Benchmark(data="not/read"))
    assert shape(groups) == [(0, ["b0", "b1"]), (1, ["a0", "a1"])]


def test_messages_are_completions_and_prompts(
    tmp_path: Path, mine: Benchmark, executor: RewardExecutor
) -> None:
    prompt = [{"role": "user", "content": "1+1?"}]
    line = {"row": 0, "prompt": prompt, "completion": [{"role": "assistant", "content": "It is 2"}]}
    groups = read(write(tmp_path / "c.jsonl", line), mine)
    assert groups[0].prompt.text == prompt
    assert values(groups, mine, executor) == [[1.0]]


@pytest.mark.parametrize(
    "lines",
    [
        [{"row": 2, "completion": "8"}, {"row": 0, "completion": "2"}],
        [{"row": "2", "completion": "8"}, {"row": "0", "completion": "2"}],
    ],
)
def test_answers_are_found_by_row(
    lines: list[Line], tmp_path: Path, mine: Benchmark, executor: RewardExecutor
) -> None:
    groups = read(write(tmp_path / "c.jsonl", *lines), mine)
    assert shape(groups) == [(0, ["2"]), (2, ["8"])]
    assert groups[1].prompt.columns == DATA[2]
    assert values(groups, mine, executor) == [[1.0], [1.0]]


def test_a_limit_is_one_of_rows(tmp_path: Path, mine: Benchmark) -> None:
    path = write(tmp_path / "c.jsonl", *[{"row": r, "completion": str(r)} for r in (2, 0)])
    assert shape(read(path, mine, limit=2)) == [(0, ["0"])]
    for limit, counts in {None: (2, 3), 2: (1, 2), 1: (1, 1), 9: (2, 3)}.items():
        found = load(path, mine, limit=limit)
        assert (len(found.groups), found.rows) == counts, "and how many of them there are"
    with pytest.raises(UserError, match=r"none is of the first 1 rows of mine\."):
        read(write(tmp_path / "d.jsonl", {"row": 2, "completion": "8"}), mine, limit=1)


def test_published_results_of_own_problems(tmp_path: Path, mine: Benchmark) -> None:
    path = write(tmp_path / "c.jsonl", *[{**row, "completion": "x"} for row in DATA])
    mode = Mode(prompt="{question}", published={"Other 7B": 88.0})
    config = Benchmark(data="not/read", modes={"cot": mode})
    recipe = Recipe(benchmark={"mine": config}, eval=Eval(mode=["cot"]))
    scorer: Any = SimpleNamespace(rewards={"math": None})
    for file, published in ((path, {}), (path.with_name("own.jsonl"), {"Other 7B": 88.0})):
        if published:  # `grpo eval` writes the benchmark's name
            lines = [{**row, "completion": "x", "benchmark": "mine", "mode": "cot"} for row in DATA]
            write(file, *lines)
        found = load(file, config)
        assert found.is_benchmark is bool(published)
        task = of_stored("mine", recipe, found, scorer, 1)
        assert task.benchmark.modes["cot"].published == published
    assert load(write(tmp_path / "r.jsonl", {"row": 0, "completion": "x"}), mine).is_benchmark


@pytest.mark.parametrize(
    ("ends", "known"),
    [(("stop", "length"), True), ((None, "length"), False), ((None, None), False)],
)
def test_whether_the_file_says_how_completions_ended(
    ends: tuple[str | None, ...], known: bool, tmp_path: Path, mine: Benchmark
) -> None:
    lines = [{"row": i, "completion": "x", "finish_reason": end} for i, end in enumerate(ends)]
    assert load(write(tmp_path / "c.jsonl", *lines), mine).ends_known is known


def evaluated(tmp_path: Path, mine: Benchmark) -> list[Line]:
    """Rows as `grpo eval` writes them."""
    rows = []
    for mode, said in (("cot", "2"), ("tir", "7")):
        for number in (1, 0):
            rows.append(
                {
                    "benchmark": "mine", "mode": mode, "row": 0, "sample": number, "prompt": "P",
                    "completion": f"{said}, {number}", "correct": True, "reward": 1.0,
                    "rewards/math": 1.0, "extras/note": "n", "finish_reason": "length",
                    "tool_calls": 2, "tool_errors": 1, "columns": json.dumps(DATA[0]),
                    "prompt_ids": [3], "completion_ids": [4, 5],
                    "sampling_logprobs": [-0.5, 0.0], "sampled": [True, False],
                }
            )  # fmt: skip
    return [*rows, {**rows[0], "benchmark": "other", "mode": "cot", "row": 7}]


@pytest.mark.parametrize("name", WRITTEN)
def test_what_an_evaluation_has_written(name: str, tmp_path: Path, mine: Benchmark) -> None:
    rows = evaluated(tmp_path, mine)
    if name.endswith(".parquet"):
        reporter.write_parquet(tmp_path / name, rows)
    else:
        write(tmp_path / name, *rows)
    (group,) = read(tmp_path, Benchmark(data="not/read"), mode="tir")
    assert group.prompt == Prompt(0, [3], "P", DATA[0])
    assert [r.text for r in group.rollouts] == ["7, 0", "7, 1"]
    assert group.rollouts[0].completion == Completion(
        [4, 5], [-0.5, 0.0], "length", is_sampled=[True, False], tool_calls=2, tool_errors=1
    )
    with pytest.raises(UserError, match=r"mine are of the modes cot, tir; say of which, as eval"):
        read(tmp_path, mine)
    with pytest.raises(UserError, match=r"are of mine, other, not of gsm8k\."):
        stored_completions.load(tmp_path, {}, "gsm8k", mine)
    with pytest.raises(UserError, match=r"those of other are of mode cot, not tir\."):
        stored_completions.load(tmp_path, {}, "other", mine, mode="tir")


def test_programs_that_go_on_with_the_prompt(tmp_path: Path, executor: RewardExecutor) -> None:
    lines = [
        {
            "prompt": "def twice(n):\n", "entry_point": "twice",
            "completion": f"    return {said}\n", "test": "def check(f):\n    assert f(3) == 6\n",
        }
        for said in ("2 * n", "n")
    ]  # fmt: skip
    config = prompted(
        data="not/read", columns={"question": "prompt", "tests": "test"}, cot="{question}",
        reward="code", args={"continues_prompt": True},
    )  # fmt: skip
    groups = read(write(tmp_path / "c.jsonl", *lines), config)
    assert len(groups) == 1, "two completions of one prompt"
    assert values(groups, config, executor) == [[1.0, 0.0]]
    for line in lines:
        del line["prompt"]
    with pytest.raises(UserError, match=r"continues_prompt = true: .* has no column `prompt`"):
        read(write(tmp_path / "d.jsonl", *lines), config)


@table(
    ("lines", "said"),
    [
        ([{"row": 0, "completion": None}], "row 0: the completion is None; it must be text."),
        ([{"completion": "x"}], "Name one with columns.answer=NAME or columns.row=NAME."),
        ([{"row": 3, "completion": "x"}], "row 0: row is 3; {data} has no such row."),
        ([{"row": 0, "completion": "x"}, {"row": 1.5, "completion": "x"}], "row 1: row is 1.5; it"),
        (
            [{"row": row, "completion": "x"} for row in (1, 0, 1, 0, 1)],
            "there are 2 of the problem of line 1 and 3 of that of line 0 (counted from 0)",
        ),
        (
            [{"row": 0, "question": "2+3?", "completion": "x"}],
            "row 0: the question is not that of row 0 of {data}.",
        ),
        (
            [{"answer": "1", "completion": "x"}, {"answer": None, "completion": "x"}],
            "row 1: the column 'answer', which the reward math needs, is null or empty.",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(
    lines: list[Line], said: str, tmp_path: Path, mine: Benchmark
) -> None:
    path = write(tmp_path / "c.jsonl", *lines)
    with pytest.raises(UserError) as error:
        read(path, mine)
    assert str(error.value).startswith(f"completions = {path}")
    assert said.replace("{data}", mine.data) in str(error.value)


# With images

REWARD = """
def wide(completions, answer, image):
    return [float(i is not None and i.size == (30, 20)) for i in image]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sizes.py").write_text(REWARD)
    return tmp_path


def evaluate(*words: str) -> int:
    own = ("benchmark=gsm8k", "benchmark.gsm8k.reward=sizes:wide", "output_dir=out")
    return run_command(["eval", *own, *words])


def test_completions_of_a_run_are_scored_with_their_images(folder: Path) -> None:
    write_groups(folder / "step-1.parquet", image_groups([ROWS[0], ROWS[2]]))
    assert evaluate("completions=step-1.parquet") == 0
    found = json.loads((folder / "out/eval.json").read_text())["benchmarks"]["gsm8k"]
    assert (found["n"], found["accuracy"]) == (2, 0.5)
    before = stored_samples(folder / "step-1.parquet", {}, "input")
    after = stored_samples(folder / "out/completions.parquet", {}, "input")
    for one, other in zip(before, after, strict=True):
        assert one.images[0].open().tobytes() == other.images[0].open().tobytes()
        assert other.columns["image"] is other.images[0]


def test_images_come_from_the_benchmarks_data_where_the_file_has_none(folder: Path) -> None:
    rows = [{"problem": "How red?", "image": {"bytes": PNG, "path": None}, "answer": "1"}] * 2
    reporter.write_parquet(folder / "data.parquet", [{**rows[0]}, {**rows[1], "answer": "2"}])
    lines = [{"row": n, "completion": "1", "problem": "How red?"} for n in (0, 1)]
    (folder / "some.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = ("benchmark.gsm8k.data=data.parquet", "benchmark.gsm8k.columns={question: problem}")
    words = (*own, "completions=some.jsonl", "columns.question=problem")
    assert evaluate(*words) == 0
    after = stored_samples(folder / "out/completions.parquet", {}, "input")
    assert [s.columns["image"].size for s in after] == [(60, 40), (60, 40)]
