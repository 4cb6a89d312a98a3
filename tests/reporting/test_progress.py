"""The progress display: what it shows, and the time that is left."""

import io

import pytest
from rich.console import Console

from grpo_cli.distributed import heartbeat
from grpo_cli.reporting import progress


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: time[0])
    return time


def bar_of(total: int, terminal: bool = False) -> tuple[progress.Bar, io.StringIO]:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=120, highlight=False)
    return progress.Bar(console, "train", total), shown


def test_the_time_left_is_shown_from_a_tenth_on_and_leaves_the_slow_first_step_out(
    now: list[float],
) -> None:
    bar, shown = bar_of(20)
    bar.start_at(0)
    for step, seconds in ((1, 30.0), (2, 6.0), (3, 6.0), (4, 6.0)):
        now[0] += seconds
        bar.update(step, "x", always=True)
    assert shown.getvalue().splitlines() == [
        "train 1/20  x",
        "train 2/20  x  1:48 left",  # 18 · 6 s
        "train 3/20  x  1:42 left",
        "train 4/20  x  1:36 left",
    ]


def test_a_resumed_run_counts_from_where_it_began(now: list[float]) -> None:
    bar, shown = bar_of(100)
    bar.start_at(80)
    for step in (81, 82):
        now[0] += 10
        bar.update(step, "x", always=True)
    assert shown.getvalue().splitlines() == ["train 81/100  x", "train 82/100  x  3:00 left"]


def test_on_a_terminal_the_bar_shows_what_is_done_before_the_first_step() -> None:
    bar, shown = bar_of(20, terminal=True)
    bar.start_at(0)
    with heartbeat.inside("generate"):
        heartbeat.detail("12/64")
        assert bar.bar is not None
        bar.bar.refresh()
    bar.close()
    assert "0/20" in shown.getvalue()
    assert "generate 12/64" in shown.getvalue()
    heartbeat.at("generate")
    assert heartbeat.activity() == "generate", "the detail was of another stage"
