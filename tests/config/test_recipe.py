"""Every knob says what it does, what it accepts and when it is read."""

import dataclasses
from typing import Any

from grpo_cli.config.keys import KNOBS, flagged
from grpo_cli.config.knob import flags_of, violation
from grpo_cli.config.recipe import Recipe
from grpo_cli.evaluation.settings import Benchmark
from grpo_cli.generation.factory import ENGINES
from grpo_cli.scoring.settings import Reward
from tests.tables import table

Field = dataclasses.Field[Any]

EVERY = [
    *KNOBS.items(),
    *((f"reward.NAME.{f.name}", f) for f in dataclasses.fields(Reward)),
]


def default_of(f: Field) -> Any:
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()


def test_knobs_are_found_in_every_section() -> None:
    # A dataclass without its `kind` would leave its knobs without documents and suggestions.
    for key, f in KNOBS.items():
        is_class = str(f.type)[0].isupper() and f.type != "Any"
        assert is_class == bool(f.metadata["kind"]), key


@table(("key", "f"), EVERY)
def test_every_knob_has_a_sentence_and_a_default_within_its_range(key: str, f: Field) -> None:
    doc = f.metadata["doc"]
    assert doc[0].isupper() or doc.split()[0].rstrip(":") in ("auto", "`auto`")
    assert doc.endswith(".")
    default = default_of(f)
    for value in default if isinstance(default, list) else [default]:
        assert [*violation(key, value, f.metadata)] == []


@table("key", flagged("read_if"))
def test_what_a_knob_waits_for_is_another_knob_and_values_of_it(key: str) -> None:
    f = KNOBS[key]
    other, *values = flags_of(f).read_if
    assert other != key
    assert other in KNOBS
    choices = KNOBS[other].metadata["choices"]
    if other == "generation.engine":  # may also be an engine of the user's
        choices = tuple(ENGINES)
    elif isinstance(default_of(KNOBS[other]), bool):
        choices = (True, False)
    elif other == "eval.mode":  # any mode that a benchmark defines
        choices = tuple(Benchmark().modes)
    assert set(values) <= set(choices or ()), "a value that it cannot have"
    assert set(values) != set(choices or "?"), "always read: say nothing"


def test_an_evaluation_reads_other_knobs_in_place_of_some() -> None:
    for key in flagged("evaluated_as"):
        assert flags_of(KNOBS[key]).evaluated_as in {*KNOBS, "checkpoint"}
    for key in flagged("evaluated_if"):
        other, value = flags_of(KNOBS[key]).evaluated_if or ("", "")
        assert value in KNOBS[other].metadata["choices"]


@table("own", ["mine:math", "registered"])  # a short name of @reward is no shipped one
def test_a_reward_of_ones_own_is_the_accuracy(own: str) -> None:
    rewards = {"length": Reward("length"), "math": Reward("grpo_cli.rewards.math:math")}
    assert Recipe(reward={**rewards, "own": Reward(own)}).accuracies == ["own", "length", "math"]
