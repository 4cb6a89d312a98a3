"""A reader of a run's folder sees what is complete, and says what a folder is not."""

import json
from pathlib import Path

import pytest

from grpo_cli.checkpoints.lock import Lock
from grpo_cli.reporting.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text("steps: 3\n", encoding="utf-8")
    return tmp_path


def test_a_line_that_is_being_written_is_left_out(folder: Path) -> None:
    lines = json.dumps({"step": 1}) + "\n" + json.dumps({"step": 2}) + "\n"
    (folder / "metrics.jsonl").write_text(lines + '{"step": 3, "rew', encoding="utf-8")
    assert [line["step"] for line in RunFolder.open(folder).metrics()] == [1, 2]


def test_a_held_lock_is_a_running_run(folder: Path) -> None:
    held = Lock(folder)
    assert RunFolder.open(folder).is_running
    held.release()
    assert RunFolder.open(folder).is_running is False


def test_a_run_of_another_machine_is_not_known_to_run(folder: Path) -> None:
    (folder / ".lock").write_text("process 1 on elsewhere, since 2026-11-25 10:00:00\n")
    assert RunFolder.open(folder).is_running is None
