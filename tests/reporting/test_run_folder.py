"""A reader of a run's folder sees what is complete, and says what a folder is not."""

import json
from pathlib import Path

import pytest

from grpo_cli.reporting.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text("steps: 3\n", encoding="utf-8")
    return tmp_path


def test_a_line_that_is_being_written_is_left_out(folder: Path) -> None:
    lines = json.dumps({"step": 1}) + "\n" + json.dumps({"step": 2}) + "\n"
    (folder / "metrics.jsonl").write_text(lines + '{"step": 3, "rew', encoding="utf-8")
    assert [line["step"] for line in RunFolder.open(folder).metrics()] == [1, 2]
