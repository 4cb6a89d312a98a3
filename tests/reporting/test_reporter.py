"""What a run writes besides its checkpoints, on a disk that is full for a while."""

import contextlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from rich.console import Console

from grpo_cli.errors import TrainingError
from grpo_cli.reporting.reporter import Reporter, closing_table, completions_table
from tests.training.test_train import recipe

STEP = {"reward": 0.5, "completions/mean_length": 4.0, "tokens_per_second": 9.0, "step_time": 1.0}
SUMMARY: dict[str, Any] = {
    "recipe": "test",
    "steps": 3,
    "before": None,
    "after": None,
    "best_checkpoint": None,
    "last_checkpoint": None,
    "seconds": 3.0,
}


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a disk that is full: what goes beyond so many bytes of a file cannot be written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(Reporter, "say", lambda self, text: lines.append(text))
    return lines


@pytest.fixture
def reporter(tmp_path: Path, said: list[str]) -> Reporter:
    made = Reporter(recipe(tmp_path, log__completions_every=1), tmp_path, True)
    made.step(1, STEP)
    made.console.quiet = True  # what it prints goes to a file, too
    return made


def steps(reporter: Reporter) -> list[int]:
    return [json.loads(line)["step"] for line in reporter.metrics.path.read_text().splitlines()]


def test_lines_that_cannot_be_written_are_kept_until_they_can(
    reporter: Reporter, said: list[str]
) -> None:
    whole = reporter.metrics.path.read_bytes()
    with files_of_at_most(len(whole) + 20):
        reporter.step(2, STEP)
        reporter.step(3, STEP)
        assert reporter.metrics.path.read_bytes() == whole, "and not half a line"
    (note,) = said
    assert "metrics.jsonl cannot be written (File too large): the lines from step 2 on are" in note
    reporter.step(4, STEP)
    assert steps(reporter) == [1, 2, 3, 4]
    assert len(said) == 1
    with files_of_at_most(10):
        reporter.step(5, STEP)
    assert len(said) == 2, "it is another time"
    reporter.close()
    assert steps(reporter) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("cut", [0.5, 0.75])
def test_a_step_whose_completions_are_cut_off(
    cut: float, reporter: Reporter, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter.console.quiet, reporter.progress.last_line = False, -9.0
    reporter.step(2, {**STEP, "completions/clipped_ratio": cut})
    reporter.close()
    said = "75% of completions cut off by generation.max_completion_tokens"
    assert (said in capsys.readouterr().out) == (cut > 0.5)


def test_the_last_evaluation_is_shown_without_one_before_training() -> None:
    after = {"accuracy": 0.5, "interval_95": [0.4, 0.6], "reward": 0.7}
    table = closing_table([], SUMMARY | {"before": None, "after": after})
    assert [*table.columns[1].cells] == ["", ""]
    assert [*table.columns[2].cells] == ["0.500 [0.400, 0.600]", "0.700"]


@pytest.mark.parametrize("file", ["metrics.jsonl", "summary.json"])
def test_a_run_that_is_done_has_its_files(file: str, reporter: Reporter, said: list[str]) -> None:
    with files_of_at_most(10):
        if file == "metrics.jsonl":
            reporter.step(2, STEP)
        with pytest.raises(TrainingError) as error:
            reporter.finish(SUMMARY)
    path = reporter.folder / file
    assert str(error.value) == f"the run is done, but {path} cannot be written: File too large"
    reporter.finish(SUMMARY)
    assert steps(reporter) == ([1, 2] if file == "metrics.jsonl" else [1])
    assert json.loads((reporter.folder / "summary.json").read_text())["steps"] == 3


def test_completions_that_cannot_be_written_are_left_out(
    reporter: Reporter, said: list[str]
) -> None:
    rows = ROWS[-1:]
    folder = reporter.folder / "completions"
    with files_of_at_most(100):
        reporter.completions(2, rows)
        reporter.completions(3, rows)
    assert not list(folder.iterdir()), "and not half a table"
    assert len(said) == 1
    assert said[0].startswith(f"{folder}/step-2.parquet cannot be written (")
    reporter.completions(4, rows)
    assert [path.name for path in folder.iterdir()] == ["step-4.parquet"]
    with files_of_at_most(100):
        reporter.completions(5, rows)
    assert len(said) == 2, "it is another time"


def completion(
    prompt: str, text: str, reward: float | None, **parts: float | None
) -> dict[str, Any]:
    named = {f"rewards/{name}": value for name, value in parts.items()}
    ids = {"completion_ids": [1, 2]}
    row = {"step": 2, "row": 0, "prompt": prompt, "completion": text, "reward": reward}
    return row | named | {"advantage": -0.5} | ids


CHAT = '[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One and one?"}]'
ROWS = [
    completion(CHAT, "2 [bold]", 1.5, math=1.0, brief=0.5),
    completion(CHAT, "3", None, math=None, brief=0.0),
    completion("2+2=", "4", 1.0, math=1.0, brief=0.0),
]


def test_completions_are_printed_and_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Reporter(recipe(tmp_path, log__completions_every=1), tmp_path, True)
    monkeypatch.setattr(made, "console", Console(width=100))
    with made.console.capture() as capture:
        made.completions(2, ROWS)
    text = capture.get()
    assert "2 [bold]" in text
    assert "2+2=" not in text
    stored = pyarrow.parquet.read_table(tmp_path / "completions" / "step-2.parquet").to_pylist()
    assert [row["completion"] for row in stored] == ["2 [bold]", "3", "4"]
    assert stored[0]["prompt"] == CHAT, "the whole conversation"


def test_a_secret_is_not_printed_with_a_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hf_secret_value")
    table = completions_table(1, [completion("hf_secret_value", "hf_secret_value", 1.0)])
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table)
    assert "hf_secret_value" not in capture.get()
