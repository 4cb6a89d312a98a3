"""Every shipped recipe and group file composes and passes the schema."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from grpo_cli import compose as composing
from grpo_cli import config, data, scoring, stored

FOLDER = composing.recipe_files()[0].parent
RECIPES = [p.stem for p in composing.recipe_files()]
GROUP_FILES = sorted(p.relative_to(FOLDER) for p in FOLDER.glob("*/*.yaml"))


def composed(name: str, *overrides: str) -> config.Recipe:
    composing.register_schema()
    with initialize_config_module("grpo_cli.recipes", version_base="1.3"):
        return config.parse(compose(name, [f"recipe={name}", *overrides]))


def test_the_promised_recipes_are_there() -> None:
    promised = "arithmetic_tiny gsm8k_tiny gsm8k_qwen math_qwen tldr_qwen deepseekmath"
    assert set(promised.split()) <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_composes_and_passes_the_schema(name: str) -> None:
    recipe = composed(name)
    assert recipe.recipe == name
    assert recipe.output_dir == f"outputs/{name}"
    assert recipe.description, "`grpo recipes` shows it"
    for reward in recipe.reward.values():
        scoring.resolve(reward.function)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_survives_being_stored(name: str, tmp_path: Path) -> None:
    recipe = composed(name)
    (tmp_path / "stored.yaml").write_text(stored.as_yaml(recipe), encoding="utf-8")
    kept = OmegaConf.to_container(OmegaConf.load(tmp_path / "stored.yaml"))
    assert isinstance(kept, dict)
    kept.pop("defaults")
    assert stored.differences(kept, recipe) == []


@pytest.mark.parametrize("path", GROUP_FILES, ids=str)
def test_group_file_fits_a_recipe(path: Path) -> None:
    group, choice = path.parent.name, path.stem
    override = f"{group}=[{choice}]" if group == "reward" else f"{group}={choice}"
    # What the recipe itself sets and other choices of the group need not support.
    extra = ["eval.every=0", "dataset.solution=x"]
    composed("arithmetic_tiny", override, *extra)


def test_recipes_that_need_no_network_find_their_data() -> None:
    for name in ("arithmetic_tiny", "gsm8k_tiny"):
        recipe = composed(name)
        train, held_out = (data.load_rows(recipe.dataset, split) for split in ("train", "eval"))
        questions = {row["question"] for row in train.rows}
        assert not questions & {row["question"] for row in held_out.rows}, "held-out rows leak"


def test_command_line_beats_the_recipe_and_groups_can_be_switched() -> None:
    recipe = composed("arithmetic_tiny", "loss=grpo", "optimizer.learning_rate=1e-5")
    assert (recipe.loss.normalize, recipe.loss.beta) == ("completions", 0.04)
    assert recipe.optimizer.learning_rate == 1e-5


def test_the_papers_settings() -> None:
    recipe = composed("deepseekmath")
    assert recipe.optimizer.learning_rate == 1e-6
    assert recipe.loss.beta == 0.04
    assert recipe.generation.num_generations == 64
    assert recipe.generation.max_completion_tokens == 1024
    assert recipe.prompts_per_step * recipe.generation.num_generations == 1024
    assert recipe.update.num_iterations * recipe.update.minibatches == 1
    assert recipe.loss.normalize == "completions"
