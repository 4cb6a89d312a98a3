"""Credit for turns needs a reward for turns and a loss that can tell them apart."""

from typing import Any

import pytest

from grpo_cli.config.schema import (
    Advantage,
    EnvironmentSettings,
    EpisodeSettings,
    Loss,
    Recipe,
    Reward,
)
from grpo_cli.errors import UserError
from grpo_cli.training.episode_credit import check_episode_credit


def by_turns(**loss: Any) -> Recipe:
    return Recipe(
        reward={"own": Reward("environment", weight=2.0), "style": Reward("length")},
        environment=EnvironmentSettings(path="m:Guess"),
        episode=EpisodeSettings(credit="turns"),
        advantage=Advantage(scale="none"),
        loss=Loss(**loss),
    )


def test_credit_for_turns_is_checked_before_a_run() -> None:
    check_episode_credit(by_turns())
    check_episode_credit(Recipe(reward={"r": Reward("length")}))
    for loss in ({"policy": "gmpo"}, {"ratio_level": "sequence"}):
        with pytest.raises(UserError, match="all tokens of a completion have one gradient"):
            check_episode_credit(by_turns(**loss))
    without = by_turns()
    del without.reward["own"]
    with pytest.raises(UserError, match=r"only read with a reward for turns.*reward=environment"):
        check_episode_credit(without)
    plain = Recipe(reward={"own": Reward("grpo_cli.rewards.environment:environment")})
    with pytest.raises(UserError, match=r"reward.own: is what an environment gives, and there is"):
        check_episode_credit(plain)
    plain.tools = {"add": "m:add"}
    with pytest.raises(UserError, match="and tools give none; set "):
        check_episode_credit(plain)
    plain.environment.openenv = "ws://localhost:1"
    check_episode_credit(plain)
