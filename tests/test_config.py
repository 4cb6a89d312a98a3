import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import OmegaConf

from grpo_cli.config import Model, Recipe, Reward, allowed, knobs, parse
from grpo_cli.errors import UserError

SOUND: dict[str, Any] = {
    "model": {"path": "some/model"},
    "dataset": {"train": "a.jsonl"},
    "reward": {"math": {}},
}
BUILT: dict[str, Any] = {
    "model.path": None,
    "model.build": {"warmup_steps": 0},
    "dataset.max_prompt_tokens": 8,
    "generation.max_completion_tokens": 8,
}


def recipe(**changes: Any) -> dict[str, Any]:
    """A sound recipe as plain dicts, with changes such as **{"loss.beta": 1}."""
    cfg = OmegaConf.create(SOUND)
    for key, value in changes.items():
        OmegaConf.update(cfg, key, value)
    tree: dict[str, Any] = OmegaConf.to_container(cfg)  # type: ignore[assignment]
    return tree


def message(**changes: Any) -> str:
    with pytest.raises(UserError) as error:
        parse(recipe(**changes))
    return str(error.value)


# What is right.


def test_a_sound_recipe_keeps_what_it_says_and_defaults_the_rest() -> None:
    parsed = parse(recipe(**{"loss.beta": 0.04, "optimizer.betas": [0.9, 0.95], "steps": 7}))
    assert isinstance(parsed.model, Model)
    assert (parsed.model.path, parsed.model.build, parsed.steps) == ("some/model", None, 7)
    assert (parsed.loss.beta, parsed.loss.epsilon, parsed.loss.epsilon_high) == (0.04, 0.2, None)
    assert parsed.optimizer.betas == [0.9, 0.95]


def test_a_rewards_function_is_its_name_unless_it_says_otherwise() -> None:
    rewards = {
        "math": {"weight": 2},
        "brief": {"function": "length", "args": {"target": 5}},
        "gone": None,
    }
    assert parse({**SOUND, "reward": rewards}).reward == {
        "math": Reward(function="math", weight=2.0, args={}),
        "brief": Reward(function="length", weight=1.0, args={"target": 5}),
    }


def test_recipes_share_no_defaults() -> None:
    parse(recipe()).optimizer.betas.append(0.5)
    assert parse(recipe()).optimizer.betas == [0.9, 0.999]


def test_a_whole_number_is_a_number() -> None:
    assert parse(recipe(**{"loss.epsilon": 1})).loss.epsilon == 1.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("loss.epsilon", 0.0),
        ("loss.epsilon", 1.0),
        ("loss.epsilon_high", 5.0),
        ("generation.top_p", 1.0),
        ("generation.num_generations", 2),
        ("optimizer.learning_rate", 0.0),
        ("model.dropout", None),
        ("seed", 0),
        ("steps", 1),
    ],
)
def test_bounds_are_inside(key: str, value: Any) -> None:
    assert OmegaConf.select(OmegaConf.structured(parse(recipe(**{key: value}))), key) == value


# Ranges.


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("steps", 0, "steps = 0: must be >= 1."),
        ("update.minibatches", 0, "update.minibatches = 0: must be >= 1."),
        ("seed", -1, "seed = -1: must be >= 0."),
        ("generation.num_generations", 1, "generation.num_generations = 1: must be >= 2."),
        ("generation.temperature", 0.0, "generation.temperature = 0.0: must be > 0."),
        ("generation.top_p", 0.0, "generation.top_p = 0.0: must be > 0 and <= 1."),
        ("generation.top_p", 1.5, "generation.top_p = 1.5: must be > 0 and <= 1."),
        ("generation.min_p", 1.01, "generation.min_p = 1.01: must be >= 0 and <= 1."),
        ("loss.epsilon", -0.1, "loss.epsilon = -0.1: must be >= 0 and <= 1."),
        ("loss.epsilon_high", -1, "loss.epsilon_high = -1.0: must be >= 0."),
        ("loss.beta", float("nan"), "loss.beta = nan: must be >= 0."),
        ("loss.beta", float("inf"), "loss.beta = inf: must be >= 0."),
        ("optimizer.eps", 0, "optimizer.eps = 0.0: must be > 0."),
        ("optimizer.betas", [0.9, 1.0], "optimizer.betas = 1.0: must be >= 0 and < 1."),
        ("optimizer.betas", [0.9, 1.1], "optimizer.betas = 1.1: must be >= 0 and < 1."),
        ("model.dropout", 1.5, "model.dropout = 1.5: must be >= 0 and <= 1."),
        (
            "loss.normalize",
            "token",
            "loss.normalize = 'token': must be one of tokens, completions. Did you mean tokens?",
        ),
        ("device", "rocm", "device = 'rocm': must be one of auto, cpu, cuda, mps."),
        (
            "advantage.scale",
            "batch",
            "advantage.scale = 'batch': must be one of group, none.",
        ),
    ],
)
def test_a_value_out_of_range(key: str, value: Any, expected: str) -> None:
    assert message(**{key: value}) == expected


def just_outside(f: dataclasses.Field[Any]) -> Iterator[Any]:
    """Values of a knob beyond each of its bounds."""
    meta, step = f.metadata, 1 if str(f.type).startswith("int") else 0.25
    if meta.get("choices"):
        yield "no-such-choice"
    if meta.get("ge") is not None:
        yield meta["ge"] - step
    if meta.get("gt") is not None:
        yield meta["gt"]
    if meta.get("le") is not None:
        yield meta["le"] + step


OUTSIDE = [(key, f, value) for key, f in knobs() for value in just_outside(f)]


def test_most_knobs_have_a_range() -> None:
    assert len(OUTSIDE) > 55


@pytest.mark.parametrize(("key", "f", "value"), OUTSIDE, ids=[f"{k}={v}" for k, _, v in OUTSIDE])
def test_every_range_is_kept(key: str, f: dataclasses.Field[Any], value: Any) -> None:
    base = BUILT if key.startswith("model.build.") else {}
    given = [value, value] if str(f.type).startswith("list") else value
    first = message(**{**base, key: given}).split("\n")[0]
    assert first.startswith(f"{key} = ")
    assert f"{value}" in first
    assert f": must be {allowed(f)}." in first


def test_several_violations_are_named_together() -> None:
    found = message(**{"steps": 0, "loss.epsilon": 2, "model.path": None})
    assert found.split("\n") == [
        "steps = 0: must be >= 1.",
        "loss.epsilon = 2.0: must be >= 0 and <= 1.",
        "model.path: set it to a hub name or a folder, or choose model=tiny_qwen.",
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_rewards_weight_is_a_finite_number(value: float) -> None:
    # A weight of NaN would make every reward NaN, which trains on nothing.
    found = message(**{"reward.math.weight": value})
    assert found == f"reward.math.weight = {value}: must be a finite number."


# Contradictions.


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"model.path": None},
            "model.path: set it to a hub name or a folder, or choose model=tiny_qwen.",
        ),
        (
            {**BUILT, "model.path": "some/model"},
            "model.path = some/model: the recipe builds a model; add model.build=null.",
        ),
        (
            {**BUILT, "model.build.num_heads": 3},
            "model.build: num_heads = 3 must divide hidden_size = 128 and be a multiple of "
            "num_kv_heads = 2.",
        ),
        (
            {**BUILT, "model.build.num_kv_heads": 3},
            "model.build: num_heads = 4 must divide hidden_size = 128 and be a multiple of "
            "num_kv_heads = 3.",
        ),
        (
            {**BUILT, "model.build.warmup_steps": 1},
            "model.build.warmup_steps: the warm-up needs dataset.solution, a template over the "
            'row\'s columns such as "{solution}"; or set it to 0.',
        ),
        (
            {**BUILT, "model.build.max_position_embeddings": 16, "dataset.max_prompt_tokens": 9},
            "dataset.max_prompt_tokens + generation.max_completion_tokens = 17: must be <= "
            "model.build.max_position_embeddings = 16.",
        ),
        ({"dataset.system": "S"}, "dataset.system: is only read with dataset.chat=true."),
        (
            {"model.chat_template": "{{}}"},
            "model.chat_template: is only read with dataset.chat=true.",
        ),
        (
            {"reward.math": None},
            "reward: at least one is needed, such as reward=[math]; `grpo rewards` lists them.",
        ),
        (
            {"reward.math.weight": 0},
            "reward: every weight is 0, so there is nothing to learn from.",
        ),
        (
            {"eval.accuracy": "exact_match"},
            "eval.accuracy = 'exact_match': must be one of the recipe's rewards, math.",
        ),
        (
            {"eval.every": 5},
            "eval.every = 5: needs held-out rows; set dataset.eval, or eval.every=0.",
        ),
        (
            {"eval.num_samples": 4},
            "eval.num_samples = 4: greedy completions are all the same; "
            "set eval.temperature above 0.",
        ),
        ({"optimizer.betas": [0.9]}, "optimizer.betas = [0.9]: must be two numbers."),
        (
            {"optimizer.min_learning_rate": 1e-7},
            "optimizer.min_learning_rate: the constant schedule does not read it.",
        ),
        (
            {"update.minibatches": 9, "prompts_per_step": 8},
            "update.minibatches = 9: must be <= prompts_per_step = 8, "
            "since a minibatch holds whole groups.",
        ),
    ],
    ids=lambda v: str(v)[:50] if isinstance(v, dict) else "",
)
def test_a_contradiction(changes: dict[str, Any], expected: str) -> None:
    assert message(**changes) == expected


@pytest.mark.parametrize(
    "changes",
    [
        BUILT,
        {**BUILT, "model.build.warmup_steps": 1, "dataset.solution": "{a}"},
        {**BUILT, "model.build.max_position_embeddings": 16},
        {"dataset.system": "S", "model.chat_template": "{{}}", "dataset.chat": True},
        {"eval.every": 5, "dataset.eval": "b.jsonl"},
        {"eval.num_samples": 4, "eval.temperature": 0.6},
        {"eval.accuracy": "math"},
        {"optimizer.min_learning_rate": 1e-7, "optimizer.schedule": "linear"},
        {"update.minibatches": 8, "prompts_per_step": 8},
        {"reward.math.weight": -1},
    ],
    ids=str,
)
def test_what_only_looks_like_a_contradiction(changes: dict[str, Any]) -> None:
    parse(recipe(**changes))


# Keys and types.


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"stepz": 3}, ["stepz"]),
        ({"loss.epsilonn": 3}, ["loss.epsilonn"]),
        ({"steps": "many"}, ["steps", "many"]),
        ({"steps": 2.5}, ["steps", "2.5"]),
        ({"loss.beta": "much"}, ["loss.beta", "much"]),
        ({"overwrite": "perhaps"}, ["overwrite", "perhaps"]),
        ({"optimizer.betas": 0.9}, ["optimizer.betas"]),
    ],
    ids=str,
)
def test_an_unknown_key_or_a_wrong_type_is_named(changes: dict[str, Any], parts: list[str]) -> None:
    found = message(**changes)
    assert all(part in found for part in parts)
    assert "\n" not in found


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("math", "reward.r = 'math': must be a mapping with a `function`."),
        (
            {"funktion": "math"},
            "reward.r.funktion: there is no such key; a reward has args, function, weight.",
        ),
    ],
)
def test_a_reward_that_is_not_one(value: Any, expected: str) -> None:
    assert message(**{"reward.r": value}) == expected


def test_a_rewards_weight_of_another_type_is_named() -> None:
    found = message(**{"reward.r": {"weight": "much"}})
    assert "reward.r.weight" in found
    assert "much" in found


# Every knob.

EVERY = [*knobs(), *((f"reward.NAME.{f.name}", f) for f in dataclasses.fields(Reward))]


def test_every_knob_is_listed_once() -> None:
    keys = [key for key, _ in EVERY]
    assert len(keys) == len(set(keys))
    assert {"steps", "model.build.hidden_size", "tracking.name", "eval.top_p"} <= set(keys)


@pytest.mark.parametrize(("key", "f"), EVERY, ids=[key for key, _ in EVERY])
def test_every_knob_has_a_sentence_and_a_default_within_its_range(
    key: str, f: dataclasses.Field[Any]
) -> None:
    meta = f.metadata
    doc = meta["doc"]
    assert doc[0].isupper() or doc.split()[0].rstrip(":") in ("auto", "`auto`")
    assert doc.endswith(".")
    made = f.default_factory is not dataclasses.MISSING
    default = f.default_factory() if made else f.default  # type: ignore[misc]
    for value in default if isinstance(default, list) else [default]:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            assert meta["ge"] is None or value >= meta["ge"]
            assert meta["gt"] is None or value > meta["gt"]
            assert meta["le"] is None or value <= meta["le"]
        if meta.get("choices"):
            assert value in meta["choices"]


def test_the_defaults_lack_only_what_a_recipe_must_say() -> None:
    with pytest.raises(UserError) as error:
        parse(OmegaConf.structured(Recipe))
    assert str(error.value).split("\n") == [
        "model.path: set it to a hub name or a folder, or choose model=tiny_qwen.",
        "reward: at least one is needed, such as reward=[math]; `grpo rewards` lists them.",
    ]
