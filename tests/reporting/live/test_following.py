"""A run that is followed while it grows, is cut back and is begun again."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.data.stored_completions import completion_row, write_parquet
from grpo_cli.files import write_text
from grpo_cli.reporting.live.following import Followed, best_and_worst
from grpo_cli.reporting.run_folder import RunFolder
from tests.conftest import make_group, make_rollout
from tests.tables import table

NAN = float("nan")


def append(path: Path, *lines: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text("steps: 30\n", encoding="utf-8")
    return tmp_path


def test_a_run_that_begins_and_is_resumed(folder: Path) -> None:
    run = Followed(RunFolder(folder))
    run.poll()
    assert (run.step, run.steps, run.values("reward")) == (0, 30, [])
    metrics = folder / "metrics.jsonl"
    append(metrics, {"step": 1, "reward": 0.5, "entropy": 2.0}, {"step": 2, "reward": None})
    append(metrics, {"step": 3, "reward": 0.7, "eval/accuracy": 0.4})
    run.poll()
    assert (run.step, run.values("reward"), run.values("entropy")) == (3, [0.5, 0.7], [2])
    write_text(metrics, '{"step": 1, "reward": 0.1}\n')
    run.poll()
    assert (run.step, run.values("reward")) == (1, [0.1])


def test_a_line_that_is_being_written_is_left_out(folder: Path) -> None:
    append(folder / "metrics.jsonl", {"step": 1}, {"step": 2})
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 3, "rew')
    assert [line["step"] for line in RunFolder.open(folder).metrics()] == [1, 2]


def test_a_run_that_is_begun_anew(folder: Path) -> None:
    run = Followed(RunFolder(folder))
    append(folder / "metrics.jsonl", {"step": 1, "reward": 0.5})
    append(folder / "alarms.jsonl", {"step": 1, "name": "entropy"})
    for step in (10, 20):
        (folder / "checkpoints" / f"step-{step}").mkdir(parents=True)
    (folder / "completions").mkdir()
    (folder / "completions" / "step-20.parquet").touch()
    (folder / "summary.json").write_text('{"steps": 1}', encoding="utf-8")
    run.poll()
    assert (len(run.alarms), run.checkpoints, run.samples) == (1, [10, 20], [])
    assert run.summary == {"steps": 1}
    for name in ("metrics.jsonl", "alarms.jsonl", "summary.json", "completions/step-20.parquet"):
        (folder / name).unlink()
    (folder / "recipe.yaml").write_text("steps: 7\nseed: 123\n", encoding="utf-8")
    run.poll()
    assert (run.step, run.alarms, run.summary, run.steps) == (0, [], None, 7)
    assert (run.values("reward"), run.samples) == ([], [])


@table(
    ("rewards", "expected"),
    [([0.5, 0.0, 1.0, NAN, 0.1], [2, 1]), ([1.0, 1.0], [0]), ([NAN, NAN], [0])],
)
def test_the_highest_and_the_lowest_reward(
    tmp_path: Path, rewards: list[float], expected: list[int]
) -> None:
    rollouts = [make_rollout(prompt="1+1=", text=f"{i}", reward=r) for i, r in enumerate(rewards)]
    group = make_group(0, rollouts)
    path = tmp_path / "a.parquet"
    write_parquet(path, [completion_row(3, group, i) for i in range(len(rewards))])
    found = best_and_worst(path)
    assert [sample.text for sample in found] == [str(i) for i in expected]
