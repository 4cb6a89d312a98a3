"""status.json: what a run does, until its end, and which end it was."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_cli.distributed import heartbeat
from grpo_cli.distributed.stop_signal import StoppedWhileStarting
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.reporting import status
from grpo_cli.reporting.run_folder import RunFolder
from grpo_cli.reporting.status import Status


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Status]:
    made = Status(tmp_path, main=True)
    yield made
    made.end("stopped")


def written(folder: Path, **expected: object) -> dict[str, object]:
    """Returns the file once it says what is expected; fails if it never does."""
    for _ in range(500):
        found = RunFolder(folder).status()
        if found is not None and expected.items() <= found.items():
            return found
        time.sleep(0.01)
    raise AssertionError(f"{found} lacks {expected}")


def test_what_the_main_thread_does(
    writer: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "SECONDS", 0.01)
    monkeypatch.setattr(heartbeat, "_stage", heartbeat.START)
    monkeypatch.setattr(heartbeat, "_step", None)
    writer.start(processes=2)
    found = written(tmp_path, state="starting", step=None, processes=2)
    assert (found["node"], found["pid"]) == (heartbeat.node(), os.getpid())
    assert found["memory"]["rss"] > 1e6  # type: ignore[index]
    writer.add(steps=40)
    writer.add(before={"accuracy": 0.25})
    heartbeat.at("generate", 7)
    written(tmp_path, state="training", stage="generate", step=7, steps=40)
    with heartbeat.inside("evaluate"):
        found = written(tmp_path, state="evaluating", step=7, before={"accuracy": 0.25})
    with heartbeat.inside("checkpoint"):
        later = written(tmp_path, state="saving")
    assert later["time"] > found["time"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("error", "state", "message"),
    [
        (TrainingError("the loss is nan"), "failed", "the loss is nan"),
        (UserError("model.path = x: there is none."), "failed", "model.path = x: there is none."),
        (ValueError("7"), "failed", "ValueError: 7"),
        (KeyboardInterrupt(), "stopped", None),
        (StoppedWhileStarting(15), "stopped", str(StoppedWhileStarting(15))),
    ],
)
def test_the_first_end_counts(
    writer: Status, tmp_path: Path, error: BaseException, state: str, message: str | None
) -> None:
    writer.start()
    writer.end_with(error)
    writer.end("ended")
    found = RunFolder(tmp_path).status()
    assert found is not None
    assert (found["state"], found["message"]) == (state, message)
