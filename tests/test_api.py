"""`grpo_cli.train` and `grpo_cli.evaluate`, from Python."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import grpo_cli
from grpo_cli.errors import UserError

SMALL: dict[str, Any] = {
    "model": {"build": {"hidden_size": 32, "warmup_steps": 0}}, "prompts_per_step": 2,
    "dataset.eval_limit": 4, "log.report": False, "device": "cpu",
}  # fmt: skip


@pytest.mark.runs
def test_a_function_of_the_caller_is_a_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before, seen = list(sys.argv), []

    def digits(completions: list[str], **_: Any) -> list[float]:
        seen.extend(completions)
        return [float(text.isdigit()) for text in completions]

    summary = grpo_cli.train("arithmetic_tiny", rewards={"digits": digits}, steps=2, **SMALL)
    assert (summary["steps"], summary["last_checkpoint"]) == (
        2, "outputs/arithmetic_tiny/checkpoints/step-2",
    )  # fmt: skip
    assert len(seen) >= 2 * 2 * 4
    found = grpo_cli.evaluate("outputs/arithmetic_tiny", **{"dataset.eval_limit": 3})
    assert found["benchmarks"]["arithmetic_test"]["n"] == 3
    assert sys.argv == before


def test_a_mistake_is_an_exception() -> None:
    with pytest.raises(UserError, match="stpes: there is no such key"):
        grpo_cli.train("arithmetic_tiny", stpes=2)
    with pytest.raises(UserError, match=r"^reward\.r\.timeout: .*function=my_module:my_function"):
        grpo_cli.train(
            "arithmetic_tiny",
            rewards={"r": lambda completions: completions},
            **SMALL,
            reward={"r": {"timeout": 5}},
        )
