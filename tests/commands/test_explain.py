"""`grpo explain`: the value of a knob and where it comes from."""

import pytest

from tests.config.test_origins import line_of
from tests.conftest import Grpo


def explain(grpo: Grpo, *words: str) -> str:
    code, out, err = grpo("explain", *words)
    assert (code, err) == (0, "")
    return out


def test_a_knob(grpo: Grpo) -> None:
    place = line_of("recipes/loss/dapo.yaml", "epsilon_high")
    out = explain(grpo, "recipe=math_qwen", "loss.epsilon_high=0.3", "loss.epsilon_high")
    assert out == (
        "loss.epsilon_high = 0.3\n\n"
        "  Upper clip distance: the ratio is clipped above at 1 + epsilon_high; null: epsilon.\n"
        "  takes        a number, >= 0 or null\n\n"
        "  set by       command line: 0.3\n"
        f"  in place of  recipes/loss/dapo.yaml, line {place}: 0.28\n"
        "  in place of  default: null\n"
    )
    assert explain(grpo, "reward.math.weight").startswith("reward.math.weight = 1.0\n")
    assert explain(grpo, "benchmark").startswith("benchmark = {}\n")


def test_a_section_and_entries(grpo: Grpo) -> None:
    words = ("recipe=math_qwen", "optimizer", "+reward.near.function=mine:near", "reward.near")
    out = explain(grpo, *words)
    rows = [line.split(maxsplit=2) for line in out.splitlines() if line]
    assert rows[0] == ["key", "value", "set by"]
    by_key = {row[0]: row[1:] for row in rows}
    place = line_of("recipes/math_qwen.yaml", "  learning_rate")
    assert by_key["optimizer.learning_rate"] == ["1e-06", f"recipes/math_qwen.yaml, line {place}"]
    assert by_key["reward.near.function"][0] == "mine:near"
    assert by_key["reward.near.weight"] == ["1.0", "default"]


def test_interpolations_and_secrets(grpo: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "abcdefgh")
    word = "reward.judge.args.api_key=${oc.env:MY_API_KEY}"
    out = explain(grpo, "reward=[judge]", word, "reward.judge.args.api_key")
    assert "abcdefgh" not in out
    assert "${oc.env:MY_API_KEY}" in out
