"""Each rule that ends a run with a simulated run that it ends and one that it must not."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_cli.config.recipe import Recipe
from grpo_cli.training.run import State
from grpo_cli.training.settings import Stop
from tests.tables import table
from tests.training.test_train import trained

ONE: Any = SimpleNamespace(size=1, max=float)


def repeated(times: int, **values: float) -> list[dict[str, float]]:
    return [{key.replace("__", "/"): v for key, v in values.items()}] * times


SILENT, HEARD = repeated(3, frac_zero_advantage=1.0), repeated(1, frac_zero_advantage=0.9)


@table(
    "config, steps, expected",
    [
        ({"zero_gradient": 4}, SILENT + HEARD + SILENT, None),
        ({"hours": 0.25}, [{}] * 9, (3, "0.3 hours are spent (stop.hours = 0.25)")),
        (
            {"max_kl": 0.1},
            [{"kl": 0.2}, {"kl": 0.05}, *repeated(4, kl=0.1), {}, {"kl": 0.3}],
            (8, "the KL to the reference was too high in 5 measurements in a row "
             "(stop.max_kl = 0.1)"),
        ),
        ({"max_kl": 0.1}, [{"kl": 0.2}, {"kl": 0.05}] * 9, None),
    ],
)  # fmt: skip
def test_rules(
    config: dict[str, Any], steps: list[dict[str, float]], expected: tuple[int, str] | None
) -> None:
    """expected: the step at which the run ends, and the sentence; a step takes 6 minutes."""
    state, recipe = State(), Recipe(stop=Stop(**config))
    found = None
    for step, values in enumerate(steps, start=1):
        state.seconds = 360.0 * step
        state.follow_step(recipe, values, ONE)
        if (reason := state.stopped_by(recipe)) is not None:
            found = step, reason.sentence
            break
    assert found == expected


STOPPED: dict[str, Any] = {
    "steps": 8,
    "reward": {"same": {"function": "tests.training.test_stop_rules:same"}},
    "stop": {"zero_gradient": 3},
    "eval__every": 0,
}


def same(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """A reward that teaches nothing."""
    return [0.0] * len(completion_ids)


def alarms(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "alarms.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.runs
def test_stopped_run_and_its_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = trained(tmp_path, **STOPPED)
    sentence = "no completion had an advantage in the last 3 steps (stop.zero_gradient = 3)"
    summary = json.loads((live.folder / "summary.json").read_text())
    assert (summary["stopped_by"], summary["stopped_because"]) == ("stop.zero_gradient", sentence)
    assert summary["steps"] == summary["after_step"] == 3, "evaluated as after the last step"
    assert summary["last_checkpoint"].endswith("checkpoints/step-3")
    kinds = [(line["step"], line["kind"], line["name"]) for line in alarms(live.folder)]
    assert kinds == [(3, "alarm", "equal_rewards"), (3, "stop", "stop.zero_gradient")]
    assert f"ended after step 3: {sentence}" in " ".join(capsys.readouterr().out.split())

    again = trained(tmp_path, resume="auto", **STOPPED)
    assert again.state.step == 3, "the rule still holds"
    assert [line["kind"] for line in alarms(live.folder)] == ["alarm", "stop"], "told once"
    went_on = trained(tmp_path, resume="auto", **{**STOPPED, "stop": {"zero_gradient": 0}})
    assert went_on.state.step == 8
    assert json.loads((live.folder / "summary.json").read_text())["stopped_by"] is None
    assert [line["kind"] for line in alarms(live.folder)] == ["alarm"], "one episode"
