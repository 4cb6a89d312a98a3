"""A step ends the run where too much of it failed."""

from types import SimpleNamespace
from typing import Any

import pytest

from grpo_cli.config.recipe import Recipe
from grpo_cli.environments.settings import EnvironmentSettings
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.records import StepStats, rollout_stats
from grpo_cli.scoring.settings import Reward
from grpo_cli.training.rollouts.collect import check_environments, check_reward_names
from tests.conftest import make_group
from tests.episodes import make_episode


def outcomes(failures: int, of: int = 8, reason: str = "env_error") -> StepStats:
    """Two groups; some of the rollouts, in order, have an environment that failed."""
    failed = [
        make_episode((None, None), stop_reason=reason, env_error=f"error {i}")
        for i in range(failures)
    ]
    rollouts = [*failed, *(make_episode((None, None)) for _ in range(of - failures))]
    groups = [make_group(0, rollouts[: of // 2]), make_group(1, rollouts[of // 2 :])]
    return dict(rollout_stats(groups))


def check(failures: int, limit: float, reason: str = "env_error") -> None:
    recipe = Recipe(environment=EnvironmentSettings(max_failed_share=limit))
    check_environments(recipe, outcomes(failures, reason=reason), 4)


def test_failures_within_the_limit() -> None:
    check(0, 0.0)
    check(2, 0.25)
    check(8, 1.0)


def test_failures_above_the_limit() -> None:
    with pytest.raises(TrainingError, match=r"step 5: .* 3 of 8 .*share = 0\.25; .*: error 2"):
        check(3, 0.25)
    with pytest.raises(TrainingError, match="1 of 8"):
        check(1, 0.0, reason="env_timeout")


def test_unknown_environment_reward() -> None:
    rollouts = [make_episode(env_rewards=r) for r in ({}, {"Guess": 1.0, "style": 0.5})]
    sampled = dict(rollout_stats([make_group(0, rollouts)]))
    said: list[str] = []

    def run(name: str | None, **environment: Any) -> Any:
        reward = {"own": Reward("environment", args={"name": name} if name else {})}
        recipe = Recipe(reward=reward, environment=EnvironmentSettings(**environment))
        return SimpleNamespace(recipe=recipe, reporter=SimpleNamespace(say=said.append))

    for name in (None, "turns", "style"):
        check_reward_names(run(name), sampled)
    problem = r"^reward\.own\.args\.name = 'Gues': no rollout .* there are Guess, style\. Did you"
    with pytest.raises(UserError, match=problem):
        check_reward_names(run("Gues"), sampled)
    check_reward_names(run("Gues"), dict(rollout_stats([make_group(0, rollouts[:1])])))
    assert not said
    check_reward_names(run("Shop", by_name={"g": "m:Guess", "s": "m:Shop"}), sampled)
    assert said[0].startswith("note: reward.own.args.name = 'Shop': no rollout of the first step")
