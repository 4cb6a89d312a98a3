"""Stored completions with images are scored on a benchmark, and written with their images."""

import json
from pathlib import Path

import pytest

from grpo_cli.cli import run_command
from grpo_cli.data.stored_completions import load
from grpo_cli.reporting.reporter import write_parquet
from tests.pictures import PNG, ROWS, image_groups, write_groups

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
    before = load(folder / "step-1.parquet", {}, "input")
    after = load(folder / "out/completions.parquet", {}, "input")
    for one, other in zip(before, after, strict=True):
        assert one.images[0].open().tobytes() == other.images[0].open().tobytes()
        assert other.columns["image"] is other.images[0]


def test_images_come_from_the_benchmarks_data_where_the_file_has_none(folder: Path) -> None:
    rows = [{"problem": "How red?", "image": {"bytes": PNG, "path": None}, "answer": "1"}] * 2
    write_parquet(folder / "data.parquet", [{**rows[0]}, {**rows[1], "answer": "2"}])
    lines = [{"row": n, "completion": "1", "problem": "How red?"} for n in (0, 1)]
    (folder / "some.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = ("benchmark.gsm8k.data=data.parquet", "benchmark.gsm8k.columns={question: problem}")
    words = (*own, "completions=some.jsonl", "columns.question=problem")
    assert evaluate(*words) == 0
    after = load(folder / "out/completions.parquet", {}, "input")
    assert [s.columns["image"].size for s in after] == [(60, 40), (60, 40)]
