"""plan.json of a run: what was measured, and the prediction for it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.test_train import trained

pytestmark = pytest.mark.runs
KEYS = {
    "memory", "peak", "tokens_per_step", "tokens_per_micro_batch",
    "completion_tokens",
}  # fmt: skip


def test_plan_of_a_run(tmp_path: Path) -> None:
    path = trained(tmp_path).folder / "plan.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    predicted, measured = found["predicted"], found["measured"]
    assert {*measured} >= KEYS
    assert {*predicted} >= KEYS
    assert measured["peak"] == max(measured["memory"].values())
    assert measured["steps_measured"] == 3, "the first step does not count"
    assert {"generate", "forward_backward", "optimizer"} <= {*measured["memory"]}
    assert predicted["completion_tokens"] == measured["completion_tokens"]
    assert measured["tokens_per_step"] == pytest.approx(predicted["tokens_per_step"], rel=0.1)
