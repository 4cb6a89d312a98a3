"""Files that grow, are cut back and are replaced while they are followed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.checkpoints.lock import Lock
from grpo_cli.reporting.live.following import Followed, LinesFollower
from grpo_cli.reporting.reporter import write_text
from grpo_cli.reporting.run_folder import RunFolder


def append(path: Path, *lines: dict[str, Any], partial: str = "") -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines) + partial)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text("steps: 30\n", encoding="utf-8")
    return tmp_path


def test_each_complete_line_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    follower = LinesFollower(path)
    assert follower.poll() == (False, [])
    append(path, {"step": 1}, partial='{"step": ')
    assert follower.poll() == (False, [{"step": 1}])
    assert follower.poll() == (False, [])
    append(path, partial="2}\nno JSON\n[1]\n")
    assert follower.poll() == (False, [{"step": 2}])
    path.unlink()
    assert follower.poll() == (True, [])
    assert follower.poll() == (False, [])


def test_another_file_of_the_same_name_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    follower = LinesFollower(path)
    append(path, {"step": 1}, {"step": 2})
    follower.poll()
    write_text(path, '{"step": 1}\n')  # as a resumed run cuts it back
    assert follower.poll() == (True, [{"step": 1}])
    size, inode = path.stat().st_size, path.stat().st_ino
    path.unlink()
    append(path, {"step": 8}, {"step": 9})  # longer; some file systems give it the same inode
    follower._inode = path.stat().st_ino
    assert path.stat().st_size > size, inode
    assert follower.poll() == (True, [{"step": 8}, {"step": 9}])


def test_a_run_that_begins_and_is_resumed(folder: Path) -> None:
    run = Followed(RunFolder(folder))
    run.poll()
    assert (run.step, run.steps, run.series["reward"].values) == (0, 30, [])
    metrics = folder / "metrics.jsonl"
    append(metrics, {"step": 1, "reward": 0.5, "entropy": 2.0}, {"step": 2, "reward": None})
    append(metrics, {"step": 3, "reward": 0.7, "eval/accuracy": 0.4})
    run.poll()
    assert (run.step, run.series["reward"].steps, run.series["entropy"].values) == (3, [1, 3], [2])
    assert run.series["evaluation"].values == [0.4]
    append(metrics, {"step": 2, "reward": 0.9})  # appended again, without a cut that was seen
    run.poll()
    assert (run.step, run.series["reward"].values) == (2, [0.5, 0.9])
    assert run.series["evaluation"].values == []
    write_text(metrics, '{"step": 1, "reward": 0.1}\n')
    run.poll()
    assert (run.step, run.series["reward"].values) == (1, [0.1])


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
    assert (run.series["reward"].values, run.samples) == ([], [])


def test_the_age_of_the_status_is_counted_by_this_clock_once_it_changes(folder: Path) -> None:
    """The other node's clock is an hour behind."""
    run = Followed(RunFolder(folder))
    behind = time.time() - 3600
    (folder / "status.json").write_text(json.dumps({"time": behind}), encoding="utf-8")
    run.poll(now=50.0)
    assert run.age == pytest.approx(3600, abs=5)
    (folder / "status.json").write_text(json.dumps({"time": behind + 1}), encoding="utf-8")
    run.poll(now=51.0)
    assert run.age == 0
    run.poll(now=58.5)
    assert run.age == 7.5
    (folder / "status.json").write_text("{", encoding="utf-8")
    run.poll(now=59.0)
    assert run.age == 8.0
    (folder / "status.json").unlink()
    run.poll(now=60.0)
    assert run.age is None


def test_the_lock_is_looked_at_each_time(folder: Path) -> None:
    run = Followed(RunFolder(folder))
    held = Lock(folder)
    run.poll()
    assert run.holds_lock is True
    held.release()
    run.poll()
    assert run.holds_lock is False


def test_a_poll_without_news_opens_no_large_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(folder / "metrics.jsonl", *({"step": s, "reward": 0.5} for s in range(1, 2001)))
    run = Followed(RunFolder(folder))
    run.poll()
    read = []
    monkeypatch.setattr(json, "loads", lambda text: read.append(text))
    monkeypatch.setattr(os, "listdir", lambda path: read.append(path))
    run.poll()
    assert (run.step, read) == (2000, [])
