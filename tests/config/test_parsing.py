"""A composed config is checked once: ranges, contradictions, and what nothing reads."""

import dataclasses
import re
import textwrap
from collections.abc import Collection, Iterator
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from grpo_cli.algorithm import arguments
from grpo_cli.algorithm.variants import POLICY, RULES
from grpo_cli.config.keys import KNOBS, flagged
from grpo_cli.config.knob import allowed, as_written, flags_of, value_at, violation
from grpo_cli.config.notices import notices
from grpo_cli.config.parsing import with_steps
from grpo_cli.config.recipe import Recipe
from grpo_cli.errors import UserError
from grpo_cli.models.settings import Model
from grpo_cli.scoring.settings import Reward
from grpo_cli.training.prepare import parse

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
TALKS: dict[str, Any] = {"environment.path": "my:Environment", "dataset.chat": True}
DEFAULTS = Recipe()


def recipe(**changes: Any) -> dict[str, Any]:
    """A sound recipe as plain dicts, with changes such as **{"loss.beta": 1}."""
    cfg = OmegaConf.create(SOUND)
    for key, value in changes.items():
        OmegaConf.update(cfg, key, value)
    tree: dict[str, Any] = OmegaConf.to_container(cfg)  # type: ignore[assignment]
    return tree


def refused(cfg: DictConfig | dict[str, Any], given: Collection[str] = ()) -> str:
    with pytest.raises(UserError) as error:
        parse(cfg, given)
    return str(error.value)


def message(**changes: Any) -> str:
    return refused(recipe(**changes))


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


# Ranges.


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("generation.logit_bias", {42: float("nan")}, "bias.42 = nan: must be a finite number."),
        ("loss.normalize", "token", "must be one of tokens, completions, prompts, constant, sums. "
         "Did you mean tokens?"),
    ],
)  # fmt: skip
def test_a_value_out_of_range(key: str, value: Any, expected: str) -> None:
    assert expected in message(**{key: value})


def just_outside(f: dataclasses.Field[Any]) -> Iterator[Any]:
    """Values of a knob beyond each of its bounds."""
    meta, step = f.metadata, 1 if "int" in str(f.type) else 0.25
    if meta.get("choices"):
        yield "no-such-choice"
    if meta.get("ge") is not None:
        yield meta["ge"] - step
    if meta.get("gt") is not None:
        yield meta["gt"]
    if meta.get("le") is not None:
        yield meta["le"] + step
    if meta.get("lt") is not None:
        yield meta["lt"]


OUTSIDE = [(key, f, value) for key, f in KNOBS.items() for value in just_outside(f)]


def test_most_knobs_have_a_range() -> None:
    assert len(OUTSIDE) > 90


@pytest.mark.parametrize(("key", "f", "value"), OUTSIDE, ids=[f"{k}={v}" for k, _, v in OUTSIDE])
def test_every_range_is_kept(key: str, f: dataclasses.Field[Any], value: Any) -> None:
    base = BUILT if key.startswith("model.build.") else {}
    given = [value, value] if str(f.type).startswith("list") else value
    entry = ".7" if str(f.type).startswith("dict[int") else ""
    first = message(**{**base, key: {7: value} if entry else given}).split("\n")[0]
    assert first.startswith(f"{key}{entry} = ")
    assert f"{value}" in first
    assert f": must be {allowed(f.metadata)}." in first


def test_several_violations_are_named_together() -> None:
    found = message(**{"steps": 0, "loss.epsilon": 2, "model.path": None})
    assert found.split("\n")[:3] == [
        "steps = 0: must be >= 1.",
        "loss.epsilon = 2.0: must be >= 0 and <= 1. For the upper bound: loss.epsilon_high.",
        "missing: model.path. A run needs a model, rows and a reward:",
    ]


def test_a_rewards_weight_is_a_finite_number() -> None:
    # A weight of NaN would make every reward NaN, which trains on nothing.
    found = message(**{"reward.math.weight": float("nan")})
    assert found == "reward.math.weight = nan: must be a finite number."


# Contradictions.


PASS_AT_4 = {"advantage.rule": "pass_at_k", "advantage.args": {"k": 4}}
UPWARDS = {"loss.sampling_correction": "token_mask", "loss.sampling_floor": 0.5}
PLAIN_REINFORCE_PP = {"advantage.rule": "reinforce_pp", "advantage.args": {"baseline": "none"}}


AT_MOST_8 = {"generation.max_completion_tokens": 8}
IN_REWARD = {"loss.beta": 0.1, "loss.kl_in": "reward"}
AHEAD_OF_EVAL = {"generation.min_completion_tokens": 9, "eval.max_completion_tokens": 8}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({**BUILT, "model.path": "some/model"}, "model.path = some/model: .*recipe=chat"),
        ({**BUILT, "model.build.hidden_size": 20}, "hidden_size = 20: must be a multiple of 8"),
        ({**BUILT, "model.build.warmup_steps": 1}, "the warm-up needs dataset.solution"),
        ({**BUILT, "dataset.max_prompt_tokens": 2041}, "= 2049: must be <= 2048, the longest"),
        ({"reward.math.weight": 0}, "reward: every weight is 0"),
        ({"eval.accuracy": "exact_match"}, "eval.accuracy = 'exact_match': must be one of .* math"),
        ({"eval.every": 5}, "eval.every = 5: needs held-out rows; set dataset.eval"),
        ({"eval.num_samples": 4, "eval.temperature": 0}, "set eval.temperature above 0"),
        ({"optimizer.betas": [0.9]}, r"optimizer.betas = \[0.9\]: must be two numbers"),
        ({"update.minibatches": 9, "prompts_per_step": 8}, "must be <= prompts_per_step = 8"),
        ({**PASS_AT_4, "generation.num_generations": 4},
         "advantage.args.k = 4: must be below generation.num_generations = 4; "),
        ({**UPWARDS, "loss.sampling_cap": 0.25}, "sampling_floor = 0.5: .*sampling_cap = 0.25"),
        ({"loss.policy": "clip_cov", "loss.args": {"cov_low": 5.0}},
         "loss.args.cov_low = 5: must be below loss.args.cov_high = 5"),
        ({"loss.args.delta": 1.25, "loss.epsilon_high": 0.3}, r">= 1 \+ epsilon_high = 1.3; "),
        ({"loss.args.delta": 1.1}, r"loss.args.delta = 1.1: must be >= 1 \+ epsilon_high = 1.2; "),
        ({"loss.entropy_target": 1, "loss.entropy_coef": 1.5}, "entropy_coef = 1.5: must be <= 1"),
        ({"distributed.offload": "all"}, "offload = all: .* use distributed=fsdp2"),
        ({**IN_REWARD, "loss.kl_bias_correction": True}, "only read with loss.kl_in = loss"),
        ({**IN_REWARD, "advantage.rule": "gdpo"}, "loss.kl_in = reward: .*use loss.kl_in=loss"),
        ({"loss.kl_in": "reward", "advantage.rule": "max_rl", "loss.beta": 0.1},
         "loss.kl_in = reward: advantage.rule=max_rl needs rewards >= 0"),
        ({**PLAIN_REINFORCE_PP, "generation.dynamic_sampling": True},
         "generation.dynamic_sampling: .*advantage.args.baseline=none"),
        ({"generation.min_completion_tokens": 9, **AT_MOST_8},
         "generation.min_completion_tokens = 9: must be <= generation.max_completion_tokens = 8"),
        (AHEAD_OF_EVAL, "= 9: must be <= eval.max_completion_tokens = 8"),
        ({"generation.stop": ["a", ""]}, "generation.stop: holds an empty string"),
        ({"tools.add": "my:add", "dataset.chat": False}, "false: .*set dataset.chat=true"),
        ({**TALKS, "environment.mcp": "server"}, "environment.path and environment.mcp: "),
        ({**TALKS, "rollout": "my:function"}, "rollout together with environment.path"),
        ({**TALKS, "dataset.final_assistant": "continue"}, "continue: .*use drop or refuse"),
        ({**TALKS, "episode.turn_tokens": 9, **AT_MOST_8}, "episode.turn_tokens = 9: must be <= "),
        ({"episode.max_turns": 3}, "is only read with tools or an environment"),
    ],
    ids=lambda v: str(v)[:60] if isinstance(v, dict) else "",
)  # fmt: skip
def test_a_contradiction(changes: dict[str, Any], expected: str) -> None:
    found = message(**changes)
    assert re.search(expected, found), found
    assert "\n" not in found


@pytest.mark.parametrize(
    "changes",
    [
        {**BUILT, "model.build.warmup_steps": 1, "dataset.solution": "{a}"},
        {**BUILT, "dataset.max_prompt_tokens": 2040},
        {"eval.every": 5, "dataset.eval": "b.jsonl"},
        {"eval.accuracy": "math"},
        {"update.minibatches": 8, "prompts_per_step": 8},
        {"reward.math.weight": -1},
        {**PASS_AT_4, "generation.num_generations": 5},
        {**UPWARDS, "loss.sampling_cap": 0.5},
        {"loss.args.delta": 1.3, "loss.epsilon_high": 0.3},
        {"loss.entropy_target": 1, "loss.entropy_coef": 1},
        {"loss.kl_in": "reward", "loss.beta": 0.1, "advantage.rule": "rloo"},
        {**PLAIN_REINFORCE_PP},
        {"generation.min_completion_tokens": 8, "generation.max_completion_tokens": 8},
        {"generation.min_completion_tokens": 8, "eval.max_completion_tokens": 8},
        {"generation.stop": ["\n\n", " "]},
        {**TALKS, "tools.add": "my:add", "episode.max_turns": 3},
        {"rollout": "my:function", "episode.max_turns": 3},
    ],
    ids=str,
)
def test_what_only_looks_like_a_contradiction(changes: dict[str, Any]) -> None:
    parse(recipe(**changes))


def test_votes_need_a_reward_that_judges_answers() -> None:
    voting = {"eval.num_samples": 4, "eval.metric": ["maj"]}
    parse(recipe(**voting))
    found = refused({**recipe(**voting), "reward": {"length": {}}})
    assert "completions of the held-out rows have no final answers to vote on" in found
    both = {"a": {"data": "a.jsonl"}, "b": {"data": "b.jsonl", "reward": "code"}}
    assert "completions of b have no" in message(**voting, benchmark=both)
    parse(recipe(**{**voting, "eval.metric": ["maj", "pass"]}, benchmark=both))
    of_programs = {**voting, "eval.metric": ["maj", "pass"], "benchmark": {"b": both["b"]}}
    assert "completions of b have no" in message(**of_programs)


# What nothing reads.

READ_IF = {key: flags_of(KNOBS[key]).read_if for key in flagged("read_if")}
READ_IF |= {  # the knobs that some losses and rules read, by the signatures of these
    key: ("loss.policy" if key.startswith("loss.") else "advantage.rule", *readers)
    for key in KNOBS
    if (readers := arguments.readers_of(key))
}

SERVERS = {"generation.vllm.servers": ["http://node:8000"]}
TIR = {"modes": {"tir": {"prompt": "{question}"}}}
WITH_PROGRAMS = {"benchmark": {"own": {"data": "b.jsonl", **TIR}}}

# What must hold besides for a knob's new value to make sense.
BESIDES: dict[str, dict[str, Any]] = {
    "adapter.sync": {"adapter.method": "lora"},
    **{k: SERVERS for k, (_, *v) in READ_IF.items() if v == ["vllm_server"]},
    "eval.patience": {"dataset.eval": "a.jsonl"},
    "stop.accuracy": {"dataset.eval": "a.jsonl"},
    "stop.max_kl": {"loss.beta": 0.1},
    "generation.vllm.in_flight": SERVERS,
    **{k: WITH_PROGRAMS for k, (other, *_) in READ_IF.items() if other == "eval.mode"},
}


def another(key: str) -> Any:
    """A value within a knob's range, not its default and, if there is a choice, not `none`."""
    f, default = KNOBS[key], value_at(DEFAULTS, key)
    kind = str(f.type).removesuffix(" | None")
    if f.metadata["choices"]:
        # "none" switches some off
        candidates: tuple[Any, ...] = tuple(sorted(f.metadata["choices"], key="none".__eq__))
    else:
        candidates = {
            "bool": (True, False),
            "int": (3, 2, 1),
            "float": (0.5, 1.5, 0.25),
            "str": ('{"type": "object"}',) if key.endswith("json_schema") else ("another",),
            "list[str]": (["http://another:8000"],),
            "Any": (["another"],),
            "dict[str, Any]": ({"another": 1},),
        }[kind]
    if kind in ("int", "float"):
        candidates = tuple(v for v in candidates if not [*violation(key, v, f.metadata)])
    return next(v for v in candidates if v != default)


def met(key: str) -> dict[str, Any]:
    """Settings with which a knob is read."""
    if key not in READ_IF:
        return {}
    other, *values = READ_IF[key]
    if other == "model.path":  # SOUND has one
        return {}
    value = values[0] if values else another(other)
    several = str(KNOBS[other].type).startswith("list")
    if not several:
        return {**met(other), other: value}
    return {**met(other), other: [*(v for v in value_at(DEFAULTS, other) if v != "none"), value]}


def unmet(key: str) -> dict[str, Any]:
    """Settings with which it is not, and everything else is sound."""
    other, *values = READ_IF[key]
    if other == "model.path":
        return BUILT
    if not values:
        return {}  # off by default: asserted below
    default = value_at(DEFAULTS, other)
    # They may also be of the user's: their knobs have no choices.
    of_names = {"loss.policy": POLICY, "advantage.rule": RULES}
    choices = (
        of_names.get(other)
        or KNOBS[other].metadata["choices"]
        or ((True, False) if isinstance(default, bool) else None)
        or (default if isinstance(default, list) else (default,))
    )
    value = next(c for c in choices if c not in values)
    return {other: [value] if str(KNOBS[other].type).startswith("list") else value}


def test_knobs_that_depend_on_others_are_found() -> None:
    assert len(READ_IF) > 30
    off = [READ_IF[key][0] for key in READ_IF if len(READ_IF[key]) == 1]
    assert all(value_at(DEFAULTS, other) in (None, False, 0, "none") for other in off)


@pytest.mark.parametrize("key", READ_IF)
def test_a_knob_that_is_set_and_not_read_is_an_error(key: str) -> None:
    other, *values = READ_IF[key]
    parse(recipe(**unmet(key)))  # nothing else is wrong
    value = another(key)
    assert value != value_at(DEFAULTS, key)
    found = message(**unmet(key), **{key: value})
    assert found.startswith(f"{key} = {as_written(value)}: is only read ")
    assert found.count("\n") == 0
    named = " or ".join(map(as_written, values))
    what = f"with {other} = {named}; it is " if values else f"when {other} is set."
    assert what in found


@pytest.mark.parametrize("key", [*READ_IF][::6])
def test_on_the_command_line_its_default_is_the_same_error(key: str) -> None:
    default = as_written(value_at(DEFAULTS, key))
    found = refused(recipe(**unmet(key)), given=[key])
    assert found.startswith(f"{key} = {default}: is only read ")
    # A file's value can be taken back; one from the command line is left out.
    assert message(**unmet(key), **{key: another(key)}).endswith(f"{key}={default} takes it back.")


@pytest.mark.parametrize("key", READ_IF)
def test_with_its_condition_met_it_is_accepted(key: str) -> None:
    value = another(key)
    settings = {**met(key), **BESIDES.get(key, {})}
    parsed = parse(recipe(**{**settings, key: value}), given=[key])
    assert value_at(parsed, key) == value
    parse(recipe(**settings), given=[key])


def test_betas_of_another_optimizer_are_refused_on_the_command_line_only() -> None:
    key = "optimizer.betas"
    sgd = recipe(**{"optimizer.algorithm": "torch.optim:SGD", "optimizer.betas": [0.9, 0.95]})
    parse(sgd)
    parse(recipe(), given=[key])
    found = refused(sgd, given=[key])
    assert found.startswith(f"{key}: is only read with optimizer.algorithm = adamw or muon")


def test_a_knob_that_is_always_read_may_be_given_with_its_default() -> None:
    parse(recipe(), given=["steps", "loss.beta", "generation.top_p"])


def test_a_misspelt_choice_is_the_only_mistake() -> None:
    found = message(**{"loss.policy": "sappo", "loss.epsilon": 0.3})
    assert found.endswith("Did you mean sapo?")
    assert "epsilon" not in found


@pytest.mark.parametrize(
    ("key", "sources", "shown"),
    [
        ("dataset.subset", {}, "the recipe has files: a.jsonl."),
        ("dataset.train_split", {"dataset.eval": "owner/name"}, "the recipe has files: a.jsonl."),
        ("dataset.eval_split", {"dataset.eval": "b.csv"}, "the recipe has files: b.csv."),
        ("dataset.eval_split", {}, "the recipe has none."),
        # That the package is not there is said where the file is looked for.
        (
            "dataset.subset",
            {"dataset.train": "pkg://no_such_package/a.jsonl"},
            "the recipe has files: pkg://no_such_package/a.jsonl.",
        ),
    ],
)
def test_files_have_no_subsets_or_splits(key: str, sources: dict[str, Any], shown: str) -> None:
    found = refused(recipe(**sources, **{key: "main"}), given=[key])
    assert found == f"{key} = main: is only read for a hub data set or a folder; {shown}"
    # From a recipe whose hub data set was replaced by files, it stays.
    parse(recipe(**sources, **{key: "main"}))


@pytest.mark.parametrize("key", ["dataset.subset", "dataset.train_split", "dataset.eval_split"])
def test_hub_data_sets_have_them(key: str) -> None:
    hub = {"dataset.train": "owner/name", "dataset.eval": "owner/name"}
    parse(recipe(**hub, **{key: "main"}), given=[key])
    # One of two is enough for the subset, which both read.
    parse(recipe(**{"dataset.eval": "owner/name", "dataset.subset": "main"}), ["dataset.subset"])


# What is allowed and does little.

K1_IN_LOSS = {"loss.beta": 0.1, "loss.kl_estimator": "k1"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"loss.policy": "kl_cov"}, "loss.policy = kl_cov: its KL acts from"),
        (K1_IN_LOSS, "loss.kl_estimator = k1: in the loss its gradient is 0"),
        ({}, None),
        ({"loss.policy": "kl_cov", "update.num_iterations": 2}, None),
        ({"loss.policy": "kl_cov", "update.minibatches": 2}, None),
        ({**K1_IN_LOSS, "loss.kl_in": "reward"}, None),
        ({**K1_IN_LOSS, "loss.kl_bias_correction": True}, None),
        ({**K1_IN_LOSS, "loss.kl_estimator": "k2"}, None),
        ({"generation.top_p": 0.9}, None),
        ({"optimizer.warmup_steps": 5, "steps": 5}, "optimizer.warmup_steps = 5: the warm-up is "),
        ({"optimizer.warmup_steps": 4, "steps": 5}, None),
        (
            {"model.dtype": "bfloat16", "optimizer.learning_rate": 1e-6},
            "model.dtype = bfloat16: updates with a learning rate of 1e-06 are smaller",
        ),
        ({"model.dtype": "bfloat16", "optimizer.learning_rate": 1e-3}, None),
        *(
            (
                {"loss.sampling_correction": "token_mask", f"generation.{knob}": value},
                "loss.sampling_correction: with top_p, top_k or min_p",
            )
            for knob, value in {"top_p": 0.9, "top_k": 5, "min_p": 0.1}.items()
        ),
        *(
            (
                {"loss.off_policy_mask": 0.1, f"generation.{knob}": value},
                f"loss.off_policy_mask: with {knob} the sampler's distribution differs",
            )
            for knob, value in {
                "repetition_penalty": 0.9,
                "min_completion_tokens": 1,
                "presence_penalty": -0.5,
                "frequency_penalty": 0.5,
                "logit_bias": {3: 1.0},
            }.items()
        ),
        ({"generation.repetition_penalty": 1.1, "generation.min_completion_tokens": 2}, None),
        (
            {"loss.sampling_correction": "token_mask", **met("generation.vllm.in_flight")},
            "loss.sampling_correction: is 1 for prefetched completions",
        ),
        ({"loss.ratio_level": "sequence"}, "loss.ratio_level = sequence with loss.normalize = tok"),
        ({"loss.ratio_level": "sequence", "loss.normalize": "completions"}, None),
        ({"loss.ratio_level": "sequence", "loss.normalize": "sums"}, None),
        ({"loss.normalize": "constant"}, "loss.normalize = constant is half of Dr. GRPO"),
        ({"loss.normalize": "constant", "advantage.scale": "none"}, None),
        ({"loss.normalize": "sums"}, "loss.normalize = sums with loss.ratio_level = token: LUSPO"),
        ({"steps": 5, "log.keep_steps": [5, 6]}, "log.keep_steps: the run has 5 steps; there is "),
        ({"steps": 5, "log.keep_steps": [5]}, None),
    ],
    ids=lambda v: str(v)[:70] if isinstance(v, dict) else "",
)
def test_a_notice_says_what_does_less_than_it_seems(
    changes: dict[str, Any], expected: str | None
) -> None:
    parsed = parse(recipe(**changes))
    found = [*arguments.notices(parsed), *notices(parsed)]
    assert len(found) == (expected is not None)
    assert all(notice.startswith(str(expected)) for notice in found)


# Keys and types.


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"loss.epsilonn": 3}, ["loss.epsilonn"]),
        ({"steps": 2.5}, ["steps", "2.5"]),
        ({"loss.beta": "much"}, ["loss.beta", "much"]),
        ({"overwrite": "perhaps"}, ["overwrite", "perhaps"]),
        ({"optimizer.betas": 0.9}, ["optimizer.betas: must be a list", "'optimizer.betas=[...]'"]),
        ({"stop.hours": "all"}, ["stop.hours = all: must be a number, > 0, or null."]),
        ({"log.report": None}, ["log.report = null: must be true or false."]),
        ({"stop": None}, ["stop: is a section, which takes no value; write stop.zero_gradient=V"]),
    ],
    ids=str,
)
def test_an_unknown_key_or_a_wrong_type_is_named(changes: dict[str, Any], parts: list[str]) -> None:
    found = message(**changes)
    assert all(part in found for part in parts)
    assert "\n" not in found


def test_a_reward_that_is_not_one() -> None:
    assert message(**{"reward.r": "math"}).startswith("reward.r = 'math': must be a mapping of arg")
    found = message(**{"reward.r": {"funktion": "math"}})
    assert found.startswith("reward.r.funktion: there is no such key; a reward has args")
    assert found.endswith("Did you mean function?")


@pytest.mark.parametrize("name", ["../../trav", "a/b", "..", "", ".hidden"])
def test_a_benchmarks_name_names_a_folder_inside(name: str) -> None:
    with pytest.raises(UserError, match="its name may have letters, digits, _, - and dots"):
        parse({**SOUND, "benchmark": {name: {"data": "a.jsonl"}}})
    modes = {name: {"prompt": "{question}"}}
    with pytest.raises(UserError, match="its name may have letters, digits, _, - and dots"):
        parse({**SOUND, "benchmark": {"own": {"data": "a.jsonl", "modes": modes}}})


def test_the_defaults_lack_only_what_a_recipe_must_say() -> None:
    found = refused(OmegaConf.structured(Recipe))
    assert found.startswith("missing: model.path, dataset.train, reward. ")
    example = found.partition("my.yaml`:\n\n")[2].partition("\n\n`grpo")[0]
    tree = yaml.safe_load(textwrap.dedent(example))
    assert tree.pop("defaults") == ["chat", "_self_"]
    parse(tree)
    for key in ("model.path", "reward.math"):
        assert message(**{key: None}).startswith(f"missing: {key.removesuffix('.math')}. A run")


# The length of a run.


@pytest.mark.parametrize(
    ("epochs", "prompts", "steps"),
    [(1, 64, 2), (1, 65, 3), (0.5, 64, 1), (2.5, 64, 5), (0.01, 64, 1), (0.1, 960, 3), (3, 32, 3)],
)
def test_steps_follow_from_epochs(epochs: float, prompts: int, steps: int) -> None:
    parsed = parse(recipe(epochs=epochs, prompts_per_step=32), given=["epochs"])
    assert with_steps(parsed, prompts).steps == steps


def test_epochs_and_steps_are_not_given_both() -> None:
    both = recipe(epochs=2, steps=7)
    assert refused(both, ["epochs", "steps"]) == "steps = 7 and epochs = 2: set only one of them."
    assert refused(both, ["steps"]) == (
        "steps = 7: epochs = 2 of the recipe decides the number of steps; add epochs=null."
    )
    assert parse(both, ["epochs"]).epochs == 2, "steps are a recipe's, and there by default"
    assert "a step takes as many prompts as it needs" in message(
        **{"epochs": 2, "generation.dynamic_sampling": True}
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dataset.test_split_size": 2.5}, "must be a fraction below 1 or a whole number of rows"),
        (
            {"dataset.test_split_size": 0.1, "dataset.eval": "b.jsonl"},
            "dataset.test_split_size = 0.1: the recipe has held-out rows already; set dataset.e",
        ),
    ],
)
def test_mistakes_about_rows_that_are_split_off(changes: dict[str, Any], expected: str) -> None:
    assert expected in message(**changes)
    parse(recipe(**{"dataset.test_split_size": 5, "eval.every": 1}))
