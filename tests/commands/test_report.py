"""`grpo report`: which file is written, two runs, and mistakes in one sentence."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from grpo_cli import cli
from grpo_cli.commands import report
from grpo_cli.data.stored_completions import write_parquet
from grpo_cli.reporting.run_folder import RunFolder
from tests.report_runs import write_json, write_run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "a")
    write_run(folder / "b", seed=3)
    return folder


@pytest.fixture
def runs(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def evaluate(folder: Path, right: list[bool]) -> None:
    """Writes an evaluation of ten held-out rows as `grpo eval` does."""
    path = folder / "eval" / "step-10"
    path.mkdir(parents=True)
    entry = {"n": len(right), "accuracy": sum(right) / len(right)}
    write_json(path / "eval.json", {"benchmarks": {"held_out": entry}})
    rows: list[dict[str, Any]] = [
        {"benchmark": "held_out", "mode": None, "row": i, "correct": value, "columns": "{}"}
        for i, value in enumerate(right)
    ]
    write_parquet(path / "completions.parquet", rows)


def test_the_report_is_written_into_the_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_command(["report", "a"]) == 0
    assert re.fullmatch(r"report: a/report\.html \(0\.[12] MB\)\n", capsys.readouterr().out)
    assert (runs / "a" / "report.html").stat().st_size > 50_000


def test_two_runs_on_the_same_problems(runs: Path) -> None:
    evaluate(runs / "a", [False] * 6 + [True] * 4)
    evaluate(runs / "b", [True] * 5 + [False] + [True] * 4)
    found = report.compare(RunFolder.open(runs / "a"), RunFolder.open(runs / "b"))
    numbers = found["paired"]["benchmarks"]["held_out"][None]
    assert (numbers["n"], numbers["flipped_to_right"]) == (10, [0, 1, 2, 3, 4])
    assert cli.run_command(["report", "a", "b", "--output=both.html"]) == 0
    assert (runs / "both.html").is_file()


def test_an_earlier_report_is_replaced(runs: Path) -> None:
    for _ in range(2):
        assert cli.run_command(["report", "a", "b", "--output=a/both.html"]) == 0
        assert not list((runs / "a").glob("*.tmp"))
    (runs / "a" / "report.html").write_text("<!doctype html><title>mine</title>")
    assert cli.run_command(["report", "a"]) == 2


def test_no_link_out_of_anothers_folder_is_followed(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "private").write_text("secret")
    for name in ("command.txt", "report.html.tmp"):
        (runs / "a" / name).unlink(missing_ok=True)
        (runs / "a" / name).symlink_to(runs / "private")
        for words in (["report", "a"], ["show", "a"], ["watch", "a", "--once"]):
            assert cli.run_command(words) == 2
            err = capsys.readouterr().err
            assert f"RUN = a: no run of yours has made it here, and its link {name} leads" in err
        (runs / "a" / name).unlink()
    assert (runs / "private").read_text() == "secret"
