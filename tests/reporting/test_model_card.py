"""The model card of a checkpoint: metadata that the hub reads, and nothing that is secret."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from grpo_cli.config.recipe import Recipe
from grpo_cli.data.settings import MixturePart
from grpo_cli.reporting.model_card import model_card
from grpo_cli.scoring.settings import Reward
from tests.tables import table
from tests.training.test_train import trained

BEFORE = {"eval/accuracy": 0.25, "eval/accuracy_low": 0.2, "eval/accuracy_high": 0.3}
AFTER = {
    "eval/accuracy": 0.5, "eval/accuracy_low": 0.4, "eval/accuracy_high": 0.6,
    "eval/reward": 0.7, "eval/clipped_ratio": 0.0,
}  # fmt: skip


def recipe(**changes: Any) -> Recipe:
    made = Recipe(recipe="test", steps=9)
    made.model.path, made.dataset.train = "Qwen/Qwen2.5-0.5B", "openai/gsm8k"
    made.dataset.eval = "openai/gsm8k"
    made.reward = {"judge": Reward(function="judge")}
    for key, value in changes.items():
        node, (*path, last) = made, key.split("__")
        for part in path:
            node = getattr(node, part)
        setattr(node, last, value)
    return made


def card(made: Recipe, words: tuple[str, ...] = ("grpo", "train"), **of_run: Any) -> str:
    known: dict[str, Any] = {"before": BEFORE, "after": AFTER, "after_step": 6} | of_run
    return model_card(made, words, 6, processes=1, **known)


def test_the_hub_finds_base_model_data_and_tags() -> None:
    data = ModelCard(card(recipe())).data
    assert data.base_model == "Qwen/Qwen2.5-0.5B"
    assert data.datasets == ["openai/gsm8k"]
    assert "grpo" in data.tags
    parts = {"a": MixturePart(data="openai/gsm8k"), "b": MixturePart(data="/my/rows.jsonl")}
    mixed = card(recipe(dataset__train=None, dataset__mixture=parts))
    assert ModelCard(mixed).data.datasets == ["openai/gsm8k"]
    assert "| data | openai/gsm8k, rows.jsonl |" in mixed


def test_an_adapter_names_the_model_it_belongs_to() -> None:
    text = card(recipe(adapter__method="lora"))
    data = ModelCard(text).data
    assert (data.library_name, data.base_model) == ("peft", "Qwen/Qwen2.5-0.5B")
    assert data.to_dict()["base_model_relation"] == "adapter"
    assert "lora" in data.tags
    assert "An adapter (lora) for [Qwen/Qwen2.5-0.5B](https://" in text
    built = card(recipe(adapter__method="dora", model__path=None))
    assert "An adapter (dora) for a model built from scratch, trained with" in built
    assert ModelCard(card(recipe())).data.library_name == "transformers"


def test_a_reader_finds_results_recipe_command_and_paper() -> None:
    text = card(recipe(), ("grpo", "train", "steps=9", "description=two words"))
    assert "| accuracy | 0.250 [0.200, 0.300] | 0.500 [0.400, 0.600] |" in text
    assert "before training | after step 6" in text
    assert "grpo train steps=9 'description=two words'" in text
    assert "\nsteps: 9\n" in text, "the complete recipe"
    assert "eprint = {arXiv:2402.03300}" in text
    assert "transformers 5." in text
    assert "6 of 9 steps" in text


@table(
    ("key", "value", "is_shown"),
    [
        ("api_key", "sk-from-me", False),
        ("HF_TOKEN", "hf_mine", False),
        ("password", "pw-mine", False),
        ("api_key", "${oc.env:OPENAI_API_KEY}", True),
        ("stop_token", "</s>-mine", True),
        ("api_key_file", "key-file.txt", True),
    ],
)
def test_a_secret_that_is_written_as_text_stays_out(key: str, value: str, is_shown: bool) -> None:
    made = recipe()
    made.reward["judge"].args = {"url": "http://a", key: value}
    text = card(made, ("grpo", "train", f"reward.judge.args.{key}={value}"))
    assert text.count(value) == (2 if is_shown else 0)


def test_values_of_the_environment_and_the_home_folder_stay_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_environment")
    monkeypatch.setenv("HOME", "/home/somebody")
    made = recipe(description="hf_of_the_environment", dataset__train="/home/somebody/rows.jsonl")
    text = card(made, ("grpo", "train", "output_dir=/home/somebody/out", "x=hf_of_the_environment"))
    assert "hf_of_the_environment" not in text
    assert "somebody" not in text
    assert "output_dir=~/out" in text.replace("'", "")


@pytest.mark.runs
def test_a_resumed_run_writes_the_same_cards(tmp_path: Path) -> None:
    live = trained(tmp_path, eval__every=2)
    cards = [live.folder / "checkpoints" / f"step-{n}" / "README.md" for n in (2, 4)]
    whole = [c.read_text(encoding="utf-8") for c in cards]
    assert live.state.after is not None
    assert f" {live.state.after['eval/accuracy']:.3f} [" in whole[1]
    for path in (live.folder / "summary.json", *cards[1].parent.rglob("*")):
        if path.is_file():
            path.unlink()
    trained(tmp_path, eval__every=2, resume="auto")
    assert [c.read_text(encoding="utf-8") for c in cards] == whole
