"""`grpo show`: which completions are printed, and mistakes in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_cli import cli
from grpo_cli.reporting.reporter import completion_row, write_parquet
from tests.conftest import make_group, make_rollout
from tests.episodes import make_episode
from tests.tables import table

Grpo = Callable[..., tuple[int, str, str]]


@pytest.fixture
def grpo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Grpo:
    """Runs `grpo show ...` beside a run with completions of two steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for step in (1, 20):
        groups = []
        for row in (4, 7):
            rollouts = [make_episode((0.5, None)), make_rollout(text=f"plain {step}", row=row)]
            rollouts[0].prompt = rollouts[1].prompt
            groups.append(make_group(row, rollouts))
        rows = [completion_row(step, g, i) for g in groups for i in range(2)]
        write_parquet(Path("run/completions") / f"step-{step}.parquet", rows)
    Path("empty").mkdir()

    def run(*words: str) -> tuple[int, str, str]:
        code = cli.run_command(["show", *words])
        out, err = capfd.readouterr()
        return code, out, err

    return run


def test_the_newest_step(grpo: Grpo) -> None:
    code, out, err = grpo("run", "--number", "2")
    assert (code, err) == (0, "")
    assert out.count("· row 4 ·") == 2
    assert "reward of the turn: 0.5" in out
    assert "plain 20" in out
    assert out.endswith("2 of 4 completions in run/completions/step-20.parquet\n")


def test_a_step_a_row_and_a_file(grpo: Grpo) -> None:
    code, out, _ = grpo("run", "--step=1", "--row=7")
    assert code == 0
    assert "· row 7 ·" in out
    assert "· row 4 ·" not in out
    assert "plain 1\n" in out
    assert out.endswith("2 of 2 completions in run/completions/step-1.parquet\n")
    assert grpo("run/completions/step-1.parquet")[1].count("step 1 ·") == 3


@table(
    ("words", "said"),
    [
        (["run", "--step=3"], "--step = 3: run has no completions of this step; it has those of "
         "the steps 1, 20 (log.completions_every)."),
        (["run", "--row=5"], "--row = 5: run/completions/step-20.parquet holds no completions of "
         "this row."),
        (["run", "--step=x"], "--step = x: must be a whole number, >= 1."),
        (["empty"], "RUN = empty: holds no completions"),
        (["empty", "--step=1"], "--step = 1: empty is no run with stored completions."),
        (["nowhere"], "RUN = nowhere: there is no such folder or file."),
        (["--step=1"], "grpo show: give one run, such as outputs/NAME; got nothing."),
    ],
)  # fmt: skip
def test_mistakes(grpo: Grpo, words: list[str], said: str) -> None:
    code, out, err = grpo(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
