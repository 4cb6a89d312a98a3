"""`grpo score`: files in, a reward a line and a summary out."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.commands.score import CHUNK, score_samples
from grpo_cli.data.sample import Sample
from grpo_cli.scoring.calls import RewardExecutor
from grpo_cli.scoring.scorer import Scorer
from grpo_cli.scoring.settings import Reward, Scoring
from tests.conftest import Grpo
from tests.data.test_files import write

ROWS: list[dict[str, Any]] = [
    {"text": "4", "answer": "4", "right": True},
    {"text": "5", "answer": "4", "right": False},
    {"text": " 7 ", "answer": "7", "right": True},
    {"text": "seven", "answer": "7", "right": True},
    {"text": "8", "answer": "8", "right": False},
]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", ["c.jsonl.gz", "c.parquet"])
def test_every_kind_of_file_gives_a_reward_a_line(grpo: Grpo, name: str, tmp_path: Path) -> None:
    write(tmp_path / name, *ROWS)
    code, out, err = grpo("score", "reward=exact_match", f"input={name}", "columns.completion=text")
    assert (code, err) == (0, "")
    found = lines_of(tmp_path / "outputs/score/c.jsonl")
    assert [line["reward"] for line in found] == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert [line["row"] for line in found] == [0, 1, 2, 3, 4]
    assert "5 completions" in out
    summary = json.loads((tmp_path / "outputs/score/c.summary.json").read_text())
    assert summary["rewards"]["exact_match"]["mean"] == pytest.approx(0.6)


def sometimes(completions: list[str]) -> list[float]:
    if any(c == "5" for c in completions):
        raise RuntimeError("no fives")
    return [1.0] * len(completions)


def test_a_reward_that_fails_is_told_after_all_were_scored(grpo: Grpo, tmp_path: Path) -> None:
    write(tmp_path / "c.jsonl", *ROWS)
    words = ["reward.r.function=tests.commands.test_score:sometimes", "input=c.jsonl"]
    words.append("columns.completion=text")
    code, out, err = grpo("score", *words)
    assert code == 1
    assert "'r' failed on 1 of 5 completions; the first, row 1: it raised RuntimeError: no" in err
    found = lines_of(tmp_path / "outputs/score/c.jsonl")
    assert [line["reward"] for line in found] == [1.0, None, 1.0, 1.0, 1.0]
    assert [list(line.get("errors", {})) for line in found] == [[], ["r"], [], [], []]
    assert "5 completions" in out
    code, _, err = grpo("score", *words, "reward.r.on_error=count")
    assert (code, err) == (0, "")


@pytest.mark.programs
def test_time_outs_and_latencies(grpo: Grpo, tmp_path: Path) -> None:
    rows = [{"completion": text, "answer": "x"} for text in ("a", "hang", "b")]
    write(tmp_path / "c.jsonl", *rows)
    words = ["reward.r.function=tests.pool_rewards:does", "reward.r.timeout=1", "input=c.jsonl"]
    code, _, _ = grpo("score", *words)
    assert code == 0, "a time-out is no failure"
    one = json.loads((tmp_path / "outputs/score/c.summary.json").read_text())["rewards"]["r"]
    assert (one["timeouts"], one["errors"], one["none"]) == (1, 0, 1)
    assert one["seconds_p99"] == 1.0
    assert one["seconds_p50"] < 1.0


@pytest.mark.smoke  # composes a recipe, in two seconds
def test_one_completion_of_a_recipes_row(grpo: Grpo, tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", *[{"question": "1+1=", "answer": "2"}] * 3)
    words = ["recipe=arithmetic_tiny", "dataset.train=rows.jsonl", "dataset.eval=null"]
    words += ["dataset.prompt='{question}'", "dataset.solution='{answer}'", "eval.every=0"]
    code, out, err = grpo("score", *words, "row=2", "completion=2")
    assert (code, err) == (0, "")
    assert "prompt: 1+1=" in out
    assert "answer: 2" in out
    assert "exact_match │ 1" in out
    code, out, _ = grpo("score", *words, "row=2", "completion=3=3, {x}")
    assert "exact_match │ 0" in out
    code, _, err = grpo("score", *words, "row=3", "completion=2")
    assert (code, err) == (2, "grpo: row = 3: rows.jsonl has 3 rows, counted from 0.\n")


def test_a_runs_stored_completions(grpo: Grpo, tmp_path: Path) -> None:
    stored = {
        "row": 3,
        "prompt": "1+1=",
        "completion": "22",
        "reward": 0.5,
        "columns": {"answer": "22", "row": "the data's own"},
        "completion_ids": [5, 5, 2],
    }
    run = tmp_path / "run"
    (run / "checkpoints" / "step-20").mkdir(parents=True)
    for step in (9, 20):
        write(run / "completions" / f"step-{step}.parquet", stored)
    for given in ("run", "run/checkpoints/step-20", "run/completions/step-20.parquet"):
        shutil.rmtree(tmp_path / "outputs", ignore_errors=True)
        length = ["reward.length.args.unit=tokens", "reward.length.args.target=0"]
        code, _, err = grpo("score", "reward=[exact_match,length]", *length, f"input={given}")
        assert (code, err) == (0, "")
        (found,) = lines_of(tmp_path / "outputs/score/run-step-20.jsonl")
        assert found["rewards"] == {"exact_match": 1.0, "length": -3.0}


@pytest.mark.programs
def test_chunks_come_in_order_and_none_is_lost() -> None:
    executor = RewardExecutor(Scoring(workers=2))
    specs = {
        "size": Reward("tests.pool_rewards:size", timeout=60),
        "all": Reward("tests.pool_rewards:size", weight=2.0),
    }
    number = CHUNK * 7 + 3
    samples = [Sample(i, "", "x" * (i % 300), None, {}) for i in range(number)]
    scorer = Scorer(specs, [], "here", executor)
    chunks = list(score_samples(scorer, samples))
    executor.close()
    scored = [one for chunk in chunks for one in chunk]
    assert [one.sample for one in scored] == samples
    assert [one.reward for one in scored] == [3.0 * (i % 300) for i in range(number)]
    assert max(map(len, chunks)) == CHUNK
