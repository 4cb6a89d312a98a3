"""Every shipped recipe and group file composes and passes the schema, and is stored faithfully."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from grpo_cli import compose, config, data, parsing, registry, stored
from grpo_cli.errors import UserError

FOLDER = compose.recipe_files()[0].parent
RECIPES = [p.stem for p in compose.recipe_files()]
GROUP_FILES = sorted(p.relative_to(FOLDER) for p in FOLDER.glob("*/*.yaml"))
PARTS = sorted(p.relative_to(FOLDER) for p in FOLDER.glob("*/*/*.yaml"))  # of choices
# Groups whose files begin with `_defaults`, so that another choice leaves nothing behind.
BEGIN_ANEW = {"loss": config.Loss, "advantage": config.Advantage}

Composed = Callable[..., config.Recipe]


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> Composed:
    """The checked recipe of a command line, composed as `grpo train` does it."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "argv", ["grpo"])

    def one(*words: str) -> config.Recipe:
        found: list[config.Recipe] = []

        def task(cfg: DictConfig) -> None:
            found.append(parsing.parse(cfg, compose.given_keys(cfg)))

        compose.compose_and_call(list(words), task)
        (recipe,) = found
        return recipe

    return one


def tree_of(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    return tree


def test_the_promised_recipes_are_there() -> None:
    promised = "arithmetic_tiny gsm8k_tiny gsm8k_qwen math_qwen tldr_qwen deepseekmath"
    assert set(promised.split()) <= set(RECIPES)


def test_no_file_is_left_out() -> None:
    assert len(list(FOLDER.rglob("*.yaml"))) == len([*RECIPES, *GROUP_FILES, *PARTS]) > 40


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_composes_and_passes_the_schema(name: str, composed: Composed) -> None:
    recipe = composed(f"recipe={name}")
    assert recipe.recipe == name
    assert recipe.output_dir == f"outputs/{name}"
    assert recipe.description, "`grpo recipes` shows it"
    for reward in recipe.reward.values():
        registry.resolve(reward.function)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_survives_being_stored(name: str, tmp_path: Path, composed: Composed) -> None:
    recipe = composed(f"recipe={name}")
    (tmp_path / "stored.yaml").write_text(stored.as_yaml(recipe), encoding="utf-8")
    kept = tree_of(tmp_path / "stored.yaml")
    assert kept.pop("defaults")
    assert stored.differences(kept, recipe) == []


@pytest.mark.parametrize("path", GROUP_FILES, ids=str)
def test_group_file_fits_a_recipe(path: Path, composed: Composed) -> None:
    """What the file says is what the recipe has: all of it, and sound together with the rest."""
    group, choice = path.parent.as_posix(), path.stem
    override = f"{group}=[{choice}]" if group == "reward" else f"{group}={choice}"
    # What the recipe itself sets and other choices of the group need not support.
    extra = {
        "dataset": ["eval.every=0", "model.build.warmup_steps=0"],
        "advantage": ["generation.num_generations=8"],
    }
    recipe = composed(override, *extra.get(group, []))
    said = OmegaConf.load(FOLDER / path)
    assert isinstance(said, DictConfig)
    defaults = said.pop("defaults", None)
    if group == "reward":
        assert list(recipe.reward) == [choice]
        said, has = said[choice], OmegaConf.structured(recipe.reward[choice])
    else:
        has = OmegaConf.structured(getattr(recipe, group))
    assert OmegaConf.merge(has, said) == has
    if group in BEGIN_ANEW:  # and nothing but what it says
        assert defaults == ["_defaults", "_self_"]
        assert has == OmegaConf.merge(OmegaConf.structured(BEGIN_ANEW[group]), said)


def test_each_policy_and_rule_has_a_file() -> None:
    fields = dict(config.knobs())
    for group, key in (("loss", "policy"), ("advantage", "rule")):
        defaults = getattr(config.Recipe(), group)
        files = [OmegaConf.load(p) for p in (FOLDER / group).glob("*.yaml")]
        named = {OmegaConf.select(f, key, default=getattr(defaults, key)) for f in files}
        assert named == set(fields[f"{group}.{key}"].metadata["choices"])


def test_recipes_that_need_no_network_find_their_data(composed: Composed) -> None:
    for name in ("arithmetic_tiny", "gsm8k_tiny"):
        recipe = composed(f"recipe={name}")
        train, held_out = (data.load_rows(recipe.dataset, split) for split in ("train", "eval"))
        questions = {row["question"] for row in train.rows}
        assert not questions & {row["question"] for row in held_out.rows}, "held-out rows leak"


def test_command_line_beats_the_recipe_and_groups_can_be_switched(composed: Composed) -> None:
    recipe = composed("loss=grpo", "optimizer.learning_rate=1e-5")
    assert (recipe.loss.normalize, recipe.loss.beta) == ("completions", 0.04)
    assert recipe.optimizer.learning_rate == 1e-5


def test_the_papers_settings(composed: Composed) -> None:
    recipe = composed("recipe=deepseekmath")
    assert recipe.optimizer.learning_rate == 1e-6
    assert recipe.loss.beta == 0.04
    assert recipe.generation.num_generations == 64
    assert recipe.generation.max_completion_tokens == 1024
    assert recipe.prompts_per_step * recipe.generation.num_generations == 1024
    assert recipe.update.num_iterations * recipe.update.minibatches == 1
    assert recipe.loss.normalize == "completions"


# What the command line sets to no effect, and what it takes back.


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["loss=sapo", "loss.epsilon=0.2"], "loss.epsilon = 0.2: is only read with loss.policy"),
        (["loss=sapo", "loss={epsilon: 0.2}"], "loss.epsilon = 0.2: is only read with"),
        (["loss=sapo", "++loss.epsilon=0.2"], "loss.epsilon = 0.2: is only read with"),
        (["loss=sapo", "loss.epsilon_high=null"], "loss.epsilon_high = null: is only read with"),
        (["loss.policy=sapo"], "loss.epsilon_high = 0.28: is only read with loss.policy"),
        (["advantage.k=3"], "advantage.k = 3: is only read with advantage.rule = pass_at_k"),
        (["eval.top_p=1"], "eval.top_p = 1: is only read when eval.temperature is above 0."),
        (["recipe=gsm8k_qwen", "dataset.chat=false"], "dataset.system = Please"),
    ],
    ids=str,
)
def test_what_the_command_line_sets_is_read_or_refused(
    words: list[str], expected: str, composed: Composed
) -> None:
    with pytest.raises(UserError) as error:
        composed(*words)
    assert str(error.value).startswith(expected)
    assert "\n" not in str(error.value)


def test_what_the_recipe_says_can_be_taken_back(composed: Composed, tmp_path: Path) -> None:
    recipe = composed("recipe=gsm8k_qwen", "dataset.chat=false", "dataset.system=null")
    assert recipe.dataset.system is None
    assert composed("loss.policy=sapo", "loss.epsilon_high=null").loss.epsilon_high is None
    (tmp_path / "mine.yaml").write_text(
        "defaults: [arithmetic_tiny, override loss: grpo, _self_]\nloss: {kl_estimator: k1}\n"
    )
    mine = f"recipe={tmp_path / 'mine.yaml'}"
    assert composed(mine).loss.kl_estimator == "k1"
    with pytest.raises(UserError, match=r"= k1: .* loss\.kl_estimator=k3 takes it back\."):
        composed(mine, "loss.beta=0")
    assert composed(mine, "loss.beta=0", "loss.kl_estimator=k3").loss == config.Loss(
        normalize="completions"
    )
    # Once more, it has no effect again.
    with pytest.raises(UserError, match=r"loss\.kl_estimator = k3: is only read"):
        composed("loss.kl_estimator=k3")


# Stored recipes.

SCHEDULES = [
    "schedules.loss.beta={to: 0.1, shape: cosine, end: 50}",
    "schedules.generation.temperature={to: 0.5, shape: jump, begin: 9}",
]


@pytest.fixture
def store(tmp_path: Path, composed: Composed) -> Callable[..., str]:
    """Stores the recipe of a command line; returns the word that names it."""

    def one(*words: str) -> str:
        path = tmp_path / "recipe.yaml"
        path.write_text(stored.as_yaml(composed(*words)), encoding="utf-8")
        return f"recipe={path}"

    return one


def test_a_stored_recipe_is_the_same_again(store: Callable[..., str], composed: Composed) -> None:
    words = [
        *SCHEDULES,
        "loss=gspo",
        "advantage=rloo",
        "loss.delta=4",
        "reward.exact_match.weight=2",
    ]
    original = composed(*words)
    assert {k: (s.to, s.shape) for k, s in original.schedules.items()} == {
        "loss.beta": (0.1, "cosine"),
        "generation.temperature": (0.5, "jump"),
    }
    assert (original.loss.ratio_level, original.loss.epsilon) == ("sequence", 3e-4)
    again = store(*words)
    assert composed(again) == original
    assert composed(again, "seed=1") != original


# One loss without the stored one's clip, one with another, and one that sets a beta.
@pytest.mark.parametrize("choice", ["loss=sapo", "loss=dapo", "loss=grpo"])
def test_a_loss_leaves_nothing_of_a_stored_one(
    choice: str, store: Callable[..., str], composed: Composed
) -> None:
    stored_recipe = store(*SCHEDULES, "loss=gspo", "loss.delta=4", "loss.mask_truncated=true")
    assert composed(stored_recipe, choice) == composed(*SCHEDULES, choice)


@pytest.mark.parametrize("choice", ["advantage=group", "advantage=rloo"])
def test_an_advantage_leaves_nothing_of_a_stored_one(
    choice: str, store: Callable[..., str], composed: Composed
) -> None:
    stored_recipe = store("advantage=pass_at_k", "advantage.k=3")
    assert composed(stored_recipe, choice) == composed(choice)


def test_a_stored_schedule_can_be_changed_and_dropped(
    store: Callable[..., str], composed: Composed
) -> None:
    name = store(*SCHEDULES)
    jump = config.Schedule(to=0.5, shape="jump", begin=9)
    changed = composed(name, "schedules.loss.beta.to=0.3").schedules
    assert changed == {
        "loss.beta": config.Schedule(to=0.3, shape="cosine", end=50),
        "generation.temperature": jump,
    }
    assert composed(name, "schedules.loss.beta=null").schedules == {"generation.temperature": jump}
    assert composed(name, "schedules.loss=null").schedules == {"generation.temperature": jump}
    added = composed(name, "schedules.loss.epsilon.to=0.1").schedules
    assert sorted(added) == ["generation.temperature", "loss.beta", "loss.epsilon"]
    # Stored again, what was dropped stays away.
    again = store(name, "schedules.loss.beta=null")
    assert list(composed(again).schedules) == ["generation.temperature"]


def test_what_a_stored_recipe_says_can_be_taken_back(
    store: Callable[..., str], composed: Composed
) -> None:
    name = store("tracking=wandb", "tracking.project=mine")
    with pytest.raises(UserError, match=r"tracking\.project=grpo takes it back"):
        composed(name, "tracking=none")
    assert composed(name, "tracking=none", "tracking.project=grpo").tracking == config.Tracking()


def test_differences_name_what_changed_in_a_schedule(composed: Composed) -> None:
    before = yaml.safe_load(stored.as_yaml(composed(*SCHEDULES)))
    later = composed(*SCHEDULES, "schedules.loss.beta.to=0.3", "loss=grpo")
    found = stored.differences(before, later)
    assert "schedules.loss.beta.to: 0.1 -> 0.3" in found
    assert [line for line in found if "temperature" in line] == []
