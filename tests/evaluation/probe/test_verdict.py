"""What a probe concludes from its numbers."""

from dataclasses import replace
from typing import Any

from grpo_cli.algorithm.settings import Advantage
from grpo_cli.config.recipe import Recipe
from grpo_cli.environments.settings import EpisodeSettings
from grpo_cli.evaluation.estimates import Estimate
from grpo_cli.evaluation.probe.verdict import (
    Finding,
    Measured,
    RewardStats,
    Verdict,
    judge,
)
from grpo_cli.generation.settings import Generation
from grpo_cli.scoring.settings import Reward
from tests.tables import table

REWARD = RewardStats(
    mean=0.5, none=0, errors=0, timeouts=0, error=None, constant=None, seconds=2e-4,
)  # fmt: skip


def shares(values: dict[int, float]) -> dict[int, Estimate]:
    return {size: Estimate(share, share - 0.05, share + 0.05) for size, share in values.items()}


SHARES = shares({2: 0.3, 4: 0.5, 8: 0.7, 16: 0.8})


HEALTHY = Measured(
    prompts=32, samples=16, completions=512, num_generations=8, right="exact_match",
    pass_rate=Estimate(0.5, 0.4, 0.6), reward_mean=0.5,
    rates=[(row, 0.5) for row in range(32)], signal=SHARES, differing=25,
    is_constant=False, identical=0.0, truncated=0.02, stop_reasons={},
    failed_environments=0.0,
    environment_error=None, lengths={"p50": 4.0},
    rewards={"exact_match": REWARD},
)  # fmt: skip


def rewards(**changes: Any) -> dict[str, Any]:
    return {"rewards": {"exact_match": replace(REWARD, **changes)}}


NO_SIGNAL: dict[str, Any] = {
    "differing": 0,
    "signal": {8: Estimate(0.0, 0.0, 0.1)},
    "reward_mean": 0.0,
    **rewards(constant=0.0, mean=0.0),
}
SOLVED = {"is_constant": True, "reward_mean": 1.0, **rewards(constant=1.0, mean=1.0)}
RECIPE = Recipe(reward={"exact_match": Reward("exact_match")})


def judged(changes: dict[str, Any], recipe: Recipe = RECIPE) -> Verdict:
    return judge(recipe, replace(HEALTHY, **changes))


def first(verdict: Verdict) -> Finding:
    return verdict.findings[0]


def test_a_healthy_run() -> None:
    verdict = judged({})
    assert verdict.can_learn
    assert verdict.findings == []
    assert "0.70 [0.65, 0.75] of the groups of 8 completions" in verdict.sentence


@table(
    "changes, name, words",
    [
        ({"is_constant": True}, "no_signal", ["512 completions of 32 prompts", "At most 0.10"]),
        ({"is_constant": False}, "no_signal", ["only between prompts"]),
        ({"is_constant": True, "identical": 1.0}, "identical", ["generation.temperature = 1"]),
        ({"is_constant": True, "truncated": 1.0}, "truncated", ["max_completion_tokens = 256"]),
        (rewards(none=512, mean=None), "no_reward", ["None"]),
        (SOLVED, "solved", ["nothing left to learn"]),
    ],
)
def test_runs_without_a_signal(changes: dict[str, Any], name: str, words: list[str]) -> None:
    verdict = judged(NO_SIGNAL | changes)
    assert not verdict.can_learn
    assert first(verdict).name == name
    assert verdict.sentence.startswith("The run cannot learn as it stands: ")
    for word in words:
        assert word in verdict.sentence


@table(
    "changes, name, stops",
    [
        (rewards(errors=3), "reward_error", True),
        ({"failed_environments": 0.3, "environment_error": "gone"}, "environment_error", True),
        ({"truncated": 0.4}, "truncated", False),
    ],
)
def test_findings(changes: dict[str, Any], name: str, stops: bool) -> None:
    verdict = judged(changes)
    assert [f.name for f in verdict.findings] == [name]
    assert verdict.can_learn is not stops


def test_larger_groups_are_proposed() -> None:
    verdict = judged({"num_generations": 2})
    sampling = "generation.dynamic_sampling=true"
    assert first(verdict).settings == ("generation.num_generations=4", sampling)
    assert "from 2 to 4: 0.30 -> 0.50" in first(verdict).message
    none_better = {"signal": shares({8: 0.31, 16: 0.33})}
    assert first(judged(none_better)).settings == (sampling,)
    dynamic = replace(RECIPE, generation=Generation(dynamic_sampling=True))
    assert first(judged(none_better, dynamic)).settings == ()


def test_errors_that_are_counted_do_not_stop_a_run() -> None:
    counted = replace(RECIPE, reward={"exact_match": Reward("exact_match", on_error="count")})
    verdict = judged({"rewards": {"exact_match": replace(REWARD, errors=3)}}, counted)
    assert (first(verdict).name, verdict.can_learn) == ("reward_error", True)


def test_turns_that_are_cut_off() -> None:
    own = replace(RECIPE, episode=EpisodeSettings(turn_tokens=4))
    changes = {"truncated": 0.5, "stop_reasons": {"turn_tokens": 0.4, "max_tokens": 0.1}}
    assert first(judged(changes, own)).settings == ("episode.turn_tokens=8",)
    changes["stop_reasons"] = {"max_tokens": 0.5}
    assert first(judged(changes, own)).settings == ("generation.max_completion_tokens=512",)
    whole = NO_SIGNAL | {"truncated": 1.0, "is_constant": True}
    assert [f.name for f in judged(whole).findings] == ["truncated"], "it is said once"


def test_completions_that_never_end() -> None:
    few = Estimate(0.02, 0.01, 0.05)
    verdict = judged({"truncated": 1.0, "pass_rate": few})
    assert [f.name for f in verdict.findings] == ["truncated"]
    assert not verdict.can_learn
    assert "2.0% of them are right" in verdict.sentence
    assert judged({"truncated": 1.0}).can_learn, "answers as long as the limit"
    assert judged({"truncated": 0.9, "pass_rate": few}).can_learn


def test_a_rule_that_trains_on_differences_between_prompts() -> None:
    own = replace(RECIPE, advantage=Advantage(rule="reinforce_pp", args={"baseline": "none"}))
    assert judged(NO_SIGNAL, own).can_learn
    assert not judged(NO_SIGNAL | {"is_constant": True}, own).can_learn
    assert not judged(NO_SIGNAL).can_learn
