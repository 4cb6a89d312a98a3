"""Values of environment variables in a recipe: read, and never written down."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from rich.console import Console

from grpo_cli import cli
from grpo_cli.config import interpolation, parsing
from grpo_cli.config.compose import register_schema
from grpo_cli.config.recipe import Recipe
from grpo_cli.config.saved_recipe import as_yaml, differences
from grpo_cli.errors import UserError
from grpo_cli.evaluation.knobs import settings
from grpo_cli.reporting.reporter import Reporter

SECRET = "hunter3-env-secret"


@pytest.fixture(autouse=True)
def _canary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", SECRET)
    monkeypatch.setenv("NUMBER", "7")


def parsed(*words: str) -> Recipe:
    register_schema()
    with initialize_config_module("grpo_cli.recipes", version_base="1.3"):
        return parsing.parse(compose("arithmetic_tiny", list(words)))


ARGS = "{url: 'http://a/${oc.env:CANARY}', list: [1, '${oc.env:CANARY}'], ref: '${description}'}"
WORDS = (
    "description='${oc.env:CANARY}'", "seed='${oc.decode:${oc.env:NUMBER}}'",
    "+reward.own.function=length", f"+reward.own.args={ARGS}",
)  # fmt: skip


def test_a_recipe_is_stored_with_its_interpolations() -> None:
    recipe = parsed(*WORDS)
    args = {"url": f"http://a/{SECRET}", "list": [1, SECRET], "ref": SECRET}
    assert (recipe.description, recipe.seed, recipe.reward["own"].args) == (SECRET, 7, args)
    text = as_yaml(recipe)
    assert SECRET not in text
    stored: dict[str, Any] = yaml.safe_load(text)
    assert stored["description"] == "${oc.env:CANARY}"
    assert stored["seed"] == "${oc.decode:${oc.env:NUMBER}}"
    assert stored["reward"]["own"]["args"] == {
        "url": "http://a/${oc.env:CANARY}", "list": [1, "${oc.env:CANARY}"],
        "ref": "${description}",
    }  # fmt: skip
    assert differences(stored, recipe) == []
    assert SECRET not in str(differences({**stored, "description": "x"}, recipe))
    assert SECRET not in str(interpolation.as_text(dataclasses.asdict(recipe)))  # for trackers
    assert SECRET not in str(settings(recipe))  # of eval.json


def test_a_resumed_run_reads_the_environment_again(monkeypatch: pytest.MonkeyPatch) -> None:
    text = as_yaml(parsed(*WORDS))
    monkeypatch.setenv("CANARY", "another secret")
    stored = yaml.safe_load(text)
    del stored["defaults"]
    recipe = parsing.parse(stored)
    assert recipe.reward["own"].args["ref"] == "another secret"
    assert as_yaml(recipe) == text
    monkeypatch.delenv("CANARY")
    with pytest.raises(UserError, match="Environment variable 'CANARY' not found"):
        parsing.parse(stored)


def test_the_next_recipe_has_its_own_values() -> None:
    interpolation.note(OmegaConf.create({"description": "${oc.env:CANARY}"}))
    recipe = parsed("description=plain")
    assert yaml.safe_load(as_yaml(recipe))["description"] == "plain"


def test_a_mistake_shows_the_name(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "recipe=arithmetic_tiny", "tracking.name='${oc.env:CANARY}'"]
    assert cli.run_command(words) == 2
    err = capsys.readouterr().err
    assert "tracking.name = ${oc.env:CANARY}: is only read with" in err
    assert SECRET not in err


def test_messages_show_the_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    interpolation.note(OmegaConf.create({"description": "${oc.env:CANARY}"}))
    monkeypatch.setenv("MY_API_KEY", "sk-12345678")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "unusual value")
    monkeypatch.setenv("SHORT_KEY", "7")
    text = f"{SECRET} sk-12345678 unusual value 7"
    shown = "${oc.env:CANARY} $MY_API_KEY unusual value 7"
    assert interpolation.masked(text) == shown
    reporter = Reporter(Recipe(), tmp_path, True)
    reporter.console = Console(width=200)
    reporter.say(text)
    assert capsys.readouterr().out == f"{shown}\n"
    cli._print_traceback(ValueError, ValueError(text), None)
    assert capsys.readouterr().err == f"ValueError: {shown}\n"
