"""Metrics become columns; a long run is drawn by means."""

from typing import Any

from grpo_cli.reporting.report.curves import columns


def test_missing_values_stay_missing() -> None:
    metrics: list[dict[str, Any]] = [{"step": 1, "a": 0.5}, {"step": 2, "a": None, "b": 3.0}]
    assert columns(metrics) == {
        "steps": [1, 2], "every": 1, "columns": {"a": [0.5, None], "b": [None, 3]},
    }  # fmt: skip


def test_a_long_run_is_drawn_by_the_means_of_steps() -> None:
    metrics = [{"step": s, "a": float(s), "rare": 7.0 if s == 2 else None} for s in range(1, 8)]
    assert columns(metrics, most=3) == {
        "steps": [3, 6, 7], "every": 3, "columns": {"a": [2, 5, 7], "rare": [7, None, None]},
    }  # fmt: skip
