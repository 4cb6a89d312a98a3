"""What was run, how it stands, and which knobs were changed."""

from pathlib import Path
from typing import Any

import pytest

from grpo_cli.config.compose import compose_and_call, shipped
from grpo_cli.config.saved_recipe import changes
from grpo_cli.reporting.report import facts
from grpo_cli.reporting.run_folder import RunFolder
from tests.report_runs import write_json, write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path, stored=())
    (tmp_path / "summary.json").unlink()
    return tmp_path


@pytest.mark.parametrize(
    ("noted", "expected"), [("stopped", "stopped"), ("failed", "failed"), ("training", "ended")]
)
def test_a_run_that_has_ended_early(folder: Path, noted: str, expected: str) -> None:
    status = {"state": noted, "message": "why", "before": {"accuracy": 0.5}, "device": "cuda"}
    write_json(folder / "status.json", status)
    found = facts.of_run(RunFolder.open(folder), [])
    assert (found["state"], found["message"]) == (expected, "why")
    assert (found["before"], found["device"]) == ({"accuracy": 0.5}, "cuda")


def test_evaluations_of_checkpoints(folder: Path) -> None:
    numbers = {"n": 4, "accuracy": 0.5, "interval_95": [0.2, 0.8], "reward": 0.5}
    by_mode = {**numbers, "mode": "cot", "by_mode": {"cot": numbers, "tir": numbers}}
    for name, entry in (("", numbers), ("_1", numbers), ("/modes", by_mode), ("/modes_1", by_mode)):
        path = folder / "eval" / f"step-3{name}"
        path.mkdir(parents=True)
        write_json(path / "eval.json", {"benchmarks": {"modes" if "m" in name else "plain": entry}})
    found = facts.of_run(RunFolder.open(folder), [])["evaluations"]
    assert [e["name"] for e in found] == ["plain", "modes (cot)", "modes (tir)"]
    assert found[0] == {
        "step": 3, "name": "plain", "n": 4, "accuracy": 0.5, "interval": [0.2, 0.8], "reward": 0.5,
    }  # fmt: skip


def test_the_recipe_beside_the_shipped_one(tmp_path: Path) -> None:
    base = shipped("arithmetic_tiny")
    assert base is not None
    (tmp_path / "stored.yaml").write_text("defaults: [arithmetic_tiny, _self_]\n")
    inside: list[Any] = []
    words = [f"recipe={tmp_path}/stored.yaml"]
    compose_and_call(words, lambda _: inside.append(shipped("arithmetic_tiny")))
    assert inside == [base]
    assert shipped("of_a_user") is None
    own = {**base, "steps": 7, "reward": {**base["reward"], "mine": {"weight": 0.5}}}
    assert changes(base, own) == {"reward.mine.weight": (1.0, 0.5), "steps": (240, 7)}
    knob = facts.listed(base, own)[1]
    assert (knob["key"], knob["old"], knob["new"]) == ("steps", "240", "7")
    assert knob["doc"].startswith("Number of training steps")
