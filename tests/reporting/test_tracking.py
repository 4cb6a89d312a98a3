"""Trackers get every step's metrics; one that fails ends no run, one that is missing is told."""

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import UserError
from grpo_cli.reporting import tracking
from grpo_cli.reporting.settings import Tracking
from grpo_cli.reporting.tracking import Trackers
from tests.training.test_train import metrics, trained

Calls = list[tuple[Any, ...]]


class FakeRun:
    """What `init` of wandb and trackio returns."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def log(self, values: dict[str, Any], step: int) -> None:
        self.calls.append(("log", step, *sorted(values)))

    def finish(self) -> None:
        self.calls.append(("finish",))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Calls]:
    """Installs a fake wandb or trackio, and returns what it is asked for."""

    def install(name: str) -> Calls:
        PartialState(cpu=True)  # which a run has before its trackers
        calls: Calls = []
        module: Any = types.ModuleType(name)
        known = ("project", "name", "id", "resume")

        def init(**given: Any) -> FakeRun:
            calls.append(("init", {k: given[k] for k in known if k in given}))
            return FakeRun(calls)

        module.init = init
        module.Table = lambda columns=None, data=None, dataframe=None: calls.append(
            ("table", len(dataframe), *dataframe.columns)
        )
        monkeypatch.setitem(sys.modules, name, module)
        return calls

    return install


def tracked(lines: list[str], *backend: str) -> Trackers:
    return Trackers(Tracking(backend=[*backend], project="mine"), Workers("cpu"), lines.append)


@pytest.mark.runs
def test_a_run_has_several_trackers_and_a_resumed_one_continues_their_runs(
    tmp_path: Path, fake: Callable[[str], Calls]
) -> None:
    wandb, trackio = fake("wandb"), fake("trackio")
    common: dict[str, Any] = {"tracking__project": "mine", "log__completions_every": 2}
    common["tracking__backend"] = ["wandb", "trackio", "tensorboard"]
    live = trained(tmp_path, steps=2, **common)
    identity = wandb[0][1]["id"]
    trained(tmp_path, resume="auto", **common)
    for calls in (wandb, trackio):
        assert [call[1] for call in calls if call[:1] == ("log",) and "reward" in call] == [
            1, 2, 3, 4,
        ]  # fmt: skip
        assert sum(call == ("finish",) for call in calls) == 2
        tables = [call for call in calls if call[0] == "table"]
        assert [call[1] for call in tables] == [24, 24, 24], "all completions of steps 1, 2 and 4"
        assert {"step", "prompt", "completion", "reward", "rewards/evens"} < {*tables[0]}
    inits = [call[1] for call in wandb if call[0] == "init"]
    assert inits == [{"project": "mine", "name": "run", "id": identity, "resume": "allow"}] * 2
    inits = [call[1] for call in trackio if call[0] == "init"]
    assert inits == [{"project": "mine", "name": "run", "resume": "allow"}] * 2
    events = EventAccumulator(str(live.folder / "tensorboard")).Reload()
    rewards = [(event.step, event.value) for event in events.Scalars("reward")]
    assert rewards == [(m["step"], pytest.approx(m["reward"])) for m in metrics(live)]


def test_a_tracker_that_fails_is_a_note_once_and_the_others_go_on(
    tmp_path: Path, fake: Callable[[str], Calls], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("wandb")
    trackio = fake("trackio")
    live = tracked(lines, "wandb", "trackio")
    live.start(tmp_path, {})
    failing = True

    def log(self: FakeRun, values: dict[str, Any], step: int) -> None:
        if failing and self.calls is not trackio:
            raise ConnectionError("the server is gone\nand more")
        self.calls.append(("log", step))

    monkeypatch.setattr(FakeRun, "log", log)
    for step in (1, 2):
        live.log({"reward": 1.0}, step)
    note = "note: wandb has not taken the run's metrics (ConnectionError: the server is gone); the "
    assert lines == [f"{note}run continues"]
    failing = False
    live.log({"reward": 1.0}, 3)
    failing = True
    live.log({"reward": 1.0}, 4)
    assert lines == [f"{note}run continues"] * 2, "it is another time"
    assert [call[1] for call in trackio if call[0] == "log"] == [1, 2, 3, 4]
    live.close()
    live.close()
    assert trackio[-1] == ("finish",)
    assert trackio.count(("finish",)) == 1


def test_a_tracker_that_does_not_start_ends_a_new_run_only(
    tmp_path: Path, fake: Callable[[str], Calls], lines: list[str]
) -> None:
    fake("wandb")

    def init(**_: Any) -> None:
        raise ValueError("no key configured")

    sys.modules["wandb"].init = init  # type: ignore[attr-defined]
    said = r"tracking.backend = wandb: cannot be started: ValueError: no key configured"
    with pytest.raises(UserError, match=said):
        tracked(lines, "wandb").start(tmp_path, {})
    live = tracked(lines, "wandb")
    live.load_state_dict({"wandb": "abc"})
    live.start(tmp_path, {})
    assert live.state_dict() == {"wandb": "abc"}
    live.log({"reward": 1.0}, 1)
    (note,) = lines
    assert note.endswith("ValueError: no key configured; the run continues without it")
    without_id = tracked(lines, "tensorboard")
    without_id.start(tmp_path, {})
    live = tracked(lines, "tensorboard")
    live.load_state_dict(without_id.state_dict())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "tensorboard").touch()
    live.start(tmp_path / "full", {})
    assert lines[-1].endswith("the run continues without it")


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UserError, match=r"tracking.backend = trackio: .*; pip install trackio"):
        tracking.require(["tensorboard", "trackio"])
    tracking.require(["none"])
