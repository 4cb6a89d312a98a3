"""The end of a run writes its report, and does not fail because of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_cli.reporting.report import page
from grpo_cli.training import ending


def ended(folder: Path) -> tuple[Any, list[str]]:
    said: list[str] = []
    return SimpleNamespace(folder=folder, reporter=SimpleNamespace(say=said.append)), said


def test_failed_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(page, "read", fails)
    run, said = ended(tmp_path)
    ending.write_report(run)
    (line,) = said
    assert f"not written (MemoryError: no room); grpo report {tmp_path} writes" in line
