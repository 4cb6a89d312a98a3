"""`grpo explain`: the value of a knob and where it comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_cli import cli
from tests.config.test_origins import line_of

EPSILON_HIGH = line_of("recipes/loss/dapo.yaml", "epsilon_high")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def explain(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert cli.run_command(["explain", *words]) == code
    printed = capsys.readouterr()
    return printed.err if code else printed.out


def test_a_knob(capsys: pytest.CaptureFixture[str]) -> None:
    out = explain(capsys, "recipe=math_qwen", "loss.epsilon_high=0.3", "loss.epsilon_high")
    assert out == (
        "loss.epsilon_high = 0.3\n\n"
        "  Upper clip distance: the ratio is clipped above at 1 + epsilon_high; null: epsilon.\n"
        "  takes        a number, >= 0 or null\n\n"
        "  set by       command line: 0.3\n"
        f"  in place of  recipes/loss/dapo.yaml, line {EPSILON_HIGH}: 0.28\n"
        "  in place of  default: null\n"
    )


def test_a_section_and_entries(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("recipe=math_qwen", "optimizer", "+reward.near.function=mine:near", "reward.near")
    out = explain(capsys, *words)
    rows = [line.split(maxsplit=2) for line in out.splitlines() if line]
    assert rows[0] == ["key", "value", "set by"]
    by_key = {row[0]: row[1:] for row in rows}
    place = line_of("recipes/math_qwen.yaml", "  learning_rate")
    assert by_key["optimizer.learning_rate"] == [
        "1e-06",
        f"recipes/math_qwen.yaml, line {place}",
    ]
    assert by_key["optimizer.max_grad_norm"][1] == "default"
    assert by_key["reward.near.function"][0] == "mine:near"
    assert by_key["reward.near.weight"] == ["1.0", "default"]
    assert by_key["optimizer.schedule"][1].startswith("recipes/optimizer/adamw_cosine.yaml, line ")


def test_interpolations_and_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "set by       default: outputs/${recipe}" in explain(
        capsys, "recipe=math_qwen", "output_dir"
    )
    monkeypatch.setenv("MY_API_KEY", "abcdefgh")
    word = "reward.judge.args.api_key=${oc.env:MY_API_KEY}"
    out = explain(capsys, "reward=[judge]", word, "reward.judge.args.api_key")
    assert "abcdefgh" not in out
    assert "${oc.env:MY_API_KEY}" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["loss.epsilon_hi"],
            "loss.epsilon_hi: there is no such key. Did you mean loss.epsilon_hig",
        ),
        (["recipe=math_qwen", "max_steps"], "It is called steps here: a step is"),
        (["recipe=nowhere", "steps"], "recipe = nowhere: there is no such recipe"),
        (["stepz=3", "steps"], "stepz: there is no such key"),
    ],
)
def test_mistakes(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in explain(capsys, *words, code=2)
