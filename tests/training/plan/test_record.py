"""plan.json of a run: predicted at the start, measured with checkpoints and at the end."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from grpo_cli import train
from grpo_cli.training import build, prepare
from grpo_cli.training.plan import record
from tests.training.test_train import recipe

pytestmark = pytest.mark.runs
KEYS = {
    "memory", "peak", "peak_stage", "time", "step_seconds", "run_seconds", "tokens_per_step",
    "flops_per_step", "tokens_per_micro_batch", "device",
}  # fmt: skip


def stored(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run" / "plan.json").read_text(encoding="utf-8"))
    return found


def test_a_run_writes_its_plan_and_what_it_measures(tmp_path: Path) -> None:
    live = build.build(prepare.for_training(recipe(tmp_path)), ["grpo"])
    at_start = stored(tmp_path)
    assert at_start["measured"] is None
    assert {*at_start["predicted"]} >= KEYS
    try:
        train.train(live)
    finally:
        live.close()
    found = stored(tmp_path)
    assert found["predicted"] == at_start["predicted"]
    predicted, measured = found["predicted_at_mean"], found["measured"]
    assert {*measured} >= KEYS
    assert measured["peak"] == max(measured["memory"].values())
    assert measured["steps_measured"] == 3, "the first step does not count"
    for stage in ("generate", "forward_backward", "optimizer"):
        assert measured["time"][stage] > 0
        assert predicted["time"][stage] > 0
    lengths = measured["completion_tokens"]
    assert predicted["completion_tokens"] == pytest.approx(lengths, rel=0.1)
    assert measured["tokens_per_step"] == pytest.approx(predicted["tokens_per_step"], rel=0.1)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["plan"]["measured"]["peak"] == measured["peak"]
    assert summary["plan"]["predicted"]["step_seconds"] == found["predicted"]["step_seconds"]


def test_a_family_that_is_not_described_has_no_prediction(tmp_path: Path) -> None:
    plain = recipe(tmp_path, steps=1)
    live = build.build(prepare.for_training(plain), ["grpo"])
    folder = tmp_path / "gpt2"
    config = transformers.GPT2Config(
        n_embd=16, n_layer=1, n_head=2, n_positions=64, vocab_size=len(live.tokenizer)
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    live.tokenizer.save_pretrained(folder)
    live.close()
    other = recipe(tmp_path, steps=1, overwrite=True, model={"path": str(folder), "build": None})
    live = build.build(prepare.for_training(other), ["grpo"])
    live.close()
    found = stored(tmp_path)
    assert found["predicted"] is None
    assert found["why_not_predicted"].startswith("model_type = gpt2: its parameters are not")


def test_no_run_ends_for_a_fault_of_its_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def divide(config: object) -> None:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr(record.Shape, "of", divide)
    build.build(prepare.for_training(recipe(tmp_path)), ["grpo"]).close()
    assert stored(tmp_path)["why_not_predicted"] == "ZeroDivisionError: float division by zero"
