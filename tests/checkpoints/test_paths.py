"""Names of the files and folders of a run."""

from pathlib import Path

import pytest

from grpo_cli.checkpoints import paths


def test_a_path_below_the_working_directory_is_shown_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert paths.shown(tmp_path / "outputs" / "run") == "outputs/run"
    assert paths.shown(tmp_path.parent / "other") == str(tmp_path.parent / "other")
    assert paths.shown("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
