"""Where the values of a recipe come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_cli.config import origins
from grpo_cli.config.compose import compose_and_call
from grpo_cli.config.origins import NOTHING, Composition, default_of
from tests.programs import ROOT
from tests.tables import table


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def composed(*words: str, file: Path | None = None) -> Composition:
    found: list[Composition] = []
    compose_and_call([*words], lambda cfg: found.append(origins.composition(file)))
    return found[0]


def line_of(file: str, text: str) -> int:
    lines = (ROOT / file).read_text("utf-8").splitlines()
    return next(n for n, line in enumerate(lines, start=1) if line.startswith(text))


def places(composition: Composition, key: str) -> list[tuple[str, Any]]:
    return [(o.place, o.value) for o in composition.origins(key)]


def test_a_value_of_each_kind_of_place() -> None:
    found = composed("recipe=math_qwen_qlora", "loss.beta=0.1", "loss=dapo")
    dapo = f"recipes/loss/dapo.yaml, line {line_of('recipes/loss/dapo.yaml', 'epsilon_high')}"
    assert places(found, "loss.epsilon_high") == [("default", None), (dapo, 0.28)]
    assert places(found, "loss.beta") == [("default", 0.0), ("command line", 0.1)]
    lines = {
        name: line_of(f"recipes/{name}.yaml", "prompts_per_step")
        for name in ("math_qwen", "math_qwen_qlora")
    }
    assert places(found, "prompts_per_step") == [
        ("default", 32),
        (f"recipes/math_qwen.yaml, line {lines['math_qwen']}", 128),
        (f"recipes/math_qwen_qlora.yaml, line {lines['math_qwen_qlora']}", 32),
    ]
    # A group that sets what is outside of it.
    place, value = places(found, "model.quantization")[-1]
    assert (value, place.partition(",")[0]) == ("nf4", "recipes/adapter/qlora.yaml")
    assert places(found, "reward.math.args.timeout") == [("default", NOTHING)]


def test_a_recipe_outside(tmp_path: Path) -> None:
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss" / "own.yaml").write_text("# mine\nbeta: 0.5\n")
    (tmp_path / "my.yaml").write_text(
        "defaults:\n  - math_qwen\n  - override loss: own\n  - _self_\n\n"
        "reward:\n  my.own: {weight: 2}\nsteps: ${oc.env:N,7}\n"
    )
    found = composed("recipe=./my.yaml", "generation.logit_bias={3: 1}")
    assert places(found, "loss.beta") == [("default", 0.0), ("loss/own.yaml, line 2", 0.5)]
    assert places(found, "reward.my.own.weight")[-1] == ("my.yaml, line 7", 2)
    assert places(found, "steps")[-1] == ("my.yaml, line 8", "${oc.env:N,7}")
    assert places(found, "generation.logit_bias")[-1] == ("command line", {3: 1})


def test_rewards_of_the_command_line_replace_those_of_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(
        "defaults: [math_qwen, _self_]\nreward:\n  math:\n    weight: 2\n"
    )
    assert places(composed("recipe=./my.yaml"), "reward.math.weight")[-1] == ("my.yaml, line 4", 2)
    chosen = composed("recipe=./my.yaml", "reward=[math]")
    assert places(chosen, "reward.math.weight") == [("default", 1.0)]


def test_a_choice_over_stored_values_begins_from_the_defaults(tmp_path: Path) -> None:
    stored = tmp_path / "recipe.yaml"
    stored.write_text(
        "defaults:\n- schema\n- _self_\n- loss: null\nrecipe: x\nmodel:\n  path: m\n"
        "loss:\n  beta: 0.3\n  epsilon_high: 0.5\n"
    )
    as_stored = composed(f"recipe={stored}", file=stored)
    assert places(as_stored, "loss.beta")[-1] == ("recipe.yaml, line 9", 0.3)
    found = composed(f"recipe={stored}", "loss=dapo", file=stored)
    assert places(found, "loss.beta")[-2:] == [("recipe.yaml, line 9", 0.3), ("default", 0.0)]
    assert places(found, "loss.epsilon_high")[-1][1] == 0.28


@table(
    ("key", "expected"),
    [
        ("steps", 100),
        ("loss.epsilon_high", None),
        ("model.build", None),
        ("reward.mine.weight", 1.0),
        ("reward.mine.args.scale", NOTHING),
        ("dataset.held_out.gsm8k.split", "test"),
        ("nowhere.at_all", NOTHING),
    ],
)
def test_defaults(key: str, expected: Any) -> None:
    assert default_of(key) == expected
