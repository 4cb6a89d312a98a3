"""The seconds that a process has spent in each stage."""

from __future__ import annotations

import pytest

from grpo_cli.distributed import heartbeat


def test_seconds_add_up_over_nested_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    for name, value in (
        ("_now", lambda: now), ("_stage", "start"), ("_entered", now), ("_spent", {})
    ):  # fmt: skip
        monkeypatch.setattr(heartbeat, name, value)
    now = 103.0
    heartbeat.at("generate", 1)
    now = 104.0
    with heartbeat.inside("evaluate"):
        now = 109.0
        assert heartbeat.seconds() == {"start": 3, "generate": 1, "evaluate": 5}
    now = 111.0
    assert heartbeat.seconds() == {"start": 3, "generate": 3, "evaluate": 5}
