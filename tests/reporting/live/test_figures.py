"""The figures of a live view: its arithmetic, with literal answers."""

import math
from pathlib import Path
from typing import Any

from grpo_cli.reporting.live.figures import duration, evaluations, health, seconds_left, sparkline
from grpo_cli.reporting.live.following import Followed
from grpo_cli.reporting.run_folder import RunFolder
from tests.tables import table


def followed(lines: list[dict[str, Any]] | None = None, **known: Any) -> Followed:
    """Returns a run of which some lines of metrics.jsonl and other files are known."""
    run = Followed(RunFolder(Path("run")), lines or [])
    for name, value in known.items():
        setattr(run, name, value)
    return run


def status(**values: Any) -> dict[str, Any]:
    base = {"state": "training", "step": 12, "stage": "generate", "since": 95.0, "time": 100.0}
    return {**base, "node": "n7", **values}


@table(
    ("age", "state", "said"),
    [
        (1.0, "training", "step 12, generate for 5 s"),
        (60.0, "training", "step 12, generate for 5 s; no news for 1 min 00 s"),
        (7200.0, "dead", "seems dead: no news from n7 for 2 h 00 min; last in step 12, generate "
         "for 5 s"),
    ],
)  # fmt: skip
def test_a_living_process_and_a_dead_one(age: float, state: str, said: str) -> None:
    assert health(followed(status=status(), age=age)) == (state, said)


@table(
    ("state", "message", "said"),
    [
        ("ended", None, "ended after step 3"),
        ("stopped", "saved in x", "stopped after step 3: saved in x"),
        ("failed", "the loss is nan", "failed after step 3: the loss is nan"),
    ],
)
def test_an_end_needs_no_news(state: str, message: str | None, said: str) -> None:
    written = status(state=state, message=message)
    run = followed([{"step": 3}], status=written, age=1e6)
    assert health(run) == (state, said)
    assert not health(run).is_live


@table(
    ("seconds", "said"),
    [
        (0.4, "0 s"), (59.4, "59 s"), (60, "1 min 00 s"), (3599, "59 min 59 s"),
        (3600, "1 h 00 min"), (86_399, "23 h 59 min"), (180_000, "2 d 2 h"),
    ],
)  # fmt: skip
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_the_time_that_is_left() -> None:
    """Four steps of 2 s, with 10 s of evaluations, saving and between steps: 4.5 s a step."""
    lines = [{"step": step, "step_time": 2.0} for step in (1, 2, 3, 4)]
    seconds = {"start": 50.0, "generate": 8.0, "optimizer": 2.0, "evaluate": 7.0, "checkpoint": 1.0}
    finished = {"step": 4, "time": 99.0, "seconds": seconds}
    run = followed(lines, recipe={"steps": 10})
    assert seconds_left(followed(recipe={"steps": 10})) is None
    assert seconds_left(run) == 6 * 2.0  # nothing but the steps is known
    run.status = status(first_step=0, finished=finished)
    assert seconds_left(run) == 6 * 4.5 - 1.0  # 1 s has passed since
    run.status["time"] = 500.0
    assert seconds_left(run) == 0.0


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 10) == "▁▂▃▄▅▆▇█  "
    assert sparkline([3, 3], 2) == "▄▄"
    assert sparkline([math.nan, 1, math.inf, 2], 4) == "▁█  "
    assert sparkline([], 3) == "   "
    assert sparkline([1, 2], 0) == ""


def test_the_evaluations() -> None:
    graded = {"step": 2, "eval/accuracy": 0.1, "eval/graded": 1.0, "eval/reward": 0.6}
    plain = {"step": 2, "eval/accuracy": 0.5, "eval/accuracy_low": 0.4, "eval/accuracy_high": 0.6}
    assert evaluations(followed([graded])) == [(0.6, None, None)]
    before = {"accuracy": 0.25, "interval_95": [0.2, 0.3]}
    run = followed([{"step": 1}, plain], status=status(before=before))
    assert evaluations(run) == [(0.25, 0.2, 0.3), (0.5, 0.4, 0.6)]
    assert evaluations(followed()) == []
