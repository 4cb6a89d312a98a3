"""Every shipped recipe and group file composes and passes the schema, and is stored faithfully."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from grpo_cli.algorithm.settings import Advantage, Loss
from grpo_cli.algorithm.variants import POLICY, RULES
from grpo_cli.config import command_line, saved_recipe
from grpo_cli.config.recipe import Recipe
from grpo_cli.data.rows import load_rows
from grpo_cli.errors import UserError
from grpo_cli.scoring import registry
from tests.composed import composed

pytestmark = pytest.mark.smoke  # Hydra takes a second for each composition

FOLDER = command_line.recipe_files()[0].parent
RECIPES = [p.stem for p in command_line.recipe_files()]
FILES = {
    folder.name: sorted(p.relative_to(FOLDER) for p in folder.glob("*.yaml"))
    for folder in FOLDER.iterdir()
    if [*folder.glob("*.yaml")]
}
# A composition takes a second: one file of each of these groups at a time.
TOGETHER = (
    ("loss", "advantage", "model", "optimizer", "distributed", "tracking", "benchmark"),
    ("reward", "dataset", "generation", "adapter"),
)
ROWS = [
    [path for path in row if path is not None]
    for groups in TOGETHER
    for row in itertools.zip_longest(*(FILES[group] for group in groups))
]
# Groups whose files begin with `_defaults`, so that another choice leaves nothing behind.
BEGIN_ANEW = {"loss": Loss, "advantage": Advantage}

WITH_DATA = ("arithmetic_tiny", "gsm8k_tiny", "calculator", "guess_number")


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_composes(name: str, tmp_path: Path) -> None:
    missing = ["model.path=M", "dataset.train=rows.jsonl", "reward=[math]"]
    recipe = composed(f"recipe={name}", *(missing if name == "chat" else []))
    assert recipe.recipe == name
    assert recipe.output_dir == f"outputs/{name}"
    assert recipe.description, "`grpo recipes` shows it"
    for reward in recipe.reward.values():
        registry.resolve(reward.function)
    if name in WITH_DATA:
        train, held_out = (load_rows(recipe.dataset, split) for split in ("train", "eval"))
        key = "id" if name == "guess_number" else "question"
        questions = {row[key] for row in train.rows}
        assert len(questions) == len(train.rows)
        assert not questions & {row[key] for row in held_out.rows}, "held-out rows leak"
    # And it survives being stored.
    (tmp_path / "stored.yaml").write_text(saved_recipe.as_yaml(recipe), encoding="utf-8")
    kept: dict[str, Any] = yaml.safe_load((tmp_path / "stored.yaml").read_text("utf-8"))
    assert kept.pop("defaults")
    assert saved_recipe.differences(kept, recipe) == []


@pytest.mark.parametrize("paths", ROWS, ids=lambda paths: paths[0].stem)
def test_group_files_fit_a_recipe(paths: list[Path]) -> None:
    """What a file says is what the recipe has: all of it, and sound together with the rest."""
    words = ["generation.num_generations=8"]  # of which advantage=pass_at_k needs several
    for path in paths:
        group, choice = path.parent.as_posix(), path.stem
        words.append(f"{group}=[{choice}]" if group == "reward" else f"{group}={choice}")
        if group == "dataset":  # what the recipe sets and other data need not support
            words += ["eval.every=0", "model.build.warmup_steps=0"]
    recipe = composed(*words)
    for path in paths:
        check_group(recipe, path.parent.as_posix(), path)


def check_group(recipe: Recipe, group: str, path: Path) -> None:
    said = OmegaConf.load(FOLDER / path)
    assert isinstance(said, DictConfig)
    defaults = said.pop("defaults", None)
    if group == "adapter":  # whose choices also say whether the model under it is quantized
        quantized = said.pop("model", {}).get("quantization", "none")
        assert recipe.model.quantization == quantized
        said = said.adapter
    if group == "reward":
        assert list(recipe.reward) == [path.stem]
        said, has = said[path.stem], OmegaConf.structured(recipe.reward[path.stem])
    else:
        has = OmegaConf.structured(getattr(recipe, group))
    assert OmegaConf.merge(has, said) == has
    if group in BEGIN_ANEW:  # and nothing but what it says
        assert defaults == ["_defaults", "_self_"]
        unset = {name: None for name, value in has.args.items() if value is None}
        anew = OmegaConf.merge(OmegaConf.structured(BEGIN_ANEW[group]), said, {"args": unset})
        assert has == anew


def test_each_policy_and_rule_has_a_file() -> None:
    assert set(FILES) == {group for groups in TOGETHER for group in groups}
    for group, key, table in (("loss", "policy", POLICY), ("advantage", "rule", RULES)):
        defaults = getattr(Recipe(), group)
        files = [OmegaConf.load(p) for p in (FOLDER / group).glob("*.yaml")]
        named = {OmegaConf.select(f, key, default=getattr(defaults, key)) for f in files}
        assert named == set(table)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), {"boxed_format": {"style": "hashes"}, "math": {}}),
        (("reward=[math,length]", "~reward.length"), {"math": {}}),
        (  # the recipe's `boxed_format.args` do not keep it
            ("reward=[math]", "+reward.mine.function=a:b", "reward.mine.args.x=1"),
            {"math": {}, "mine": {"x": 1}},
        ),
    ],
)
def test_a_choice_of_rewards_replaces_those_of_the_recipe(
    words: tuple[str, ...], expected: dict[str, Any]
) -> None:
    recipe = composed("recipe=gsm8k_tiny", *words)
    assert {name: reward.args for name, reward in recipe.reward.items()} == expected


def test_the_papers_settings() -> None:
    recipe = composed("recipe=deepseekmath")
    assert recipe.optimizer.learning_rate == 1e-6
    assert recipe.loss.beta == 0.04
    assert recipe.generation.num_generations == 64
    assert recipe.generation.max_completion_tokens == 1024
    assert recipe.prompts_per_step * recipe.generation.num_generations == 1024
    assert recipe.update.num_iterations * recipe.update.minibatches == 1
    assert recipe.loss.normalize == "completions"


def test_what_the_recipe_says_can_be_taken_back() -> None:
    recipe = composed("recipe=gsm8k_qwen", "dataset.chat=false", "dataset.system=null")
    assert recipe.dataset.system is None
    assert composed("loss.policy=sapo", "loss.epsilon_high=null").loss.epsilon_high is None


def test_what_a_users_recipe_says_is_read_refused_or_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "defaults: [arithmetic_tiny, override loss: grpo, _self_]\nloss: {kl_estimator: k1}\n"
    )
    mine = f"recipe={path}"
    assert composed(mine).loss.kl_estimator == "k1"
    with pytest.raises(UserError, match=r"= k1: .* loss\.kl_estimator=k3 takes it back\."):
        composed(mine, "loss.beta=0")
    back = composed(mine, "loss.beta=0", "loss.kl_estimator=k3")
    assert back.loss == Loss(normalize="completions")


@pytest.fixture
def store(tmp_path: Path) -> Callable[..., str]:
    """Stores the recipe of a command line; returns the word that names it."""

    def one(*words: str) -> str:
        path = tmp_path / "recipe.yaml"
        path.write_text(saved_recipe.as_yaml(composed(*words)), encoding="utf-8")
        return f"recipe={path}"

    return one


def test_a_stored_recipe_is_the_same_again(store: Callable[..., str]) -> None:
    words = [
        "loss=gspo",
        "advantage=rloo",
        "loss.args.delta=4",
        "reward.exact_match.weight=2",
    ]
    original = composed(*words)
    assert (original.loss.ratio_level, original.loss.epsilon) == ("sequence", 3e-4)
    again = store(*words)
    assert composed(again) == original
    assert composed(again, "seed=1") != original


def test_loss_replaces_the_stored_one(store: Callable[..., str]) -> None:
    choice = "loss=grpo"
    stored_recipe = store("loss=gspo", "loss.args.delta=4", "loss.mask_truncated=true")
    assert composed(stored_recipe, choice) == composed(choice)


def test_a_recipe_stored_when_there_were_schedules(store: Callable[..., str]) -> None:
    word = store("loss=gspo")
    file = Path(word.removeprefix("recipe="))
    text = file.read_text(encoding="utf-8")
    file.write_text(f"{text}schedules: {{}}\n", encoding="utf-8")
    assert composed(word) == composed("loss=gspo")
    file.write_text(f"{text}schedules: {{loss: {{beta: {{to: 0.1}}}}}}\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"schedules: .* resume with the new value at the step"):
        composed(word)
