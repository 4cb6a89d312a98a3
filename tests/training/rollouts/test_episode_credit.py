"""Credit for turns needs a reward for turns and a loss that can tell them apart."""

import math
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.algorithm.settings import Advantage, Loss
from grpo_cli.config.recipe import Recipe
from grpo_cli.environments.settings import EnvironmentSettings, EpisodeSettings
from grpo_cli.errors import UserError
from grpo_cli.records import TrainingSample
from grpo_cli.reporting.stage_clock import Clock
from grpo_cli.scoring.settings import Reward
from grpo_cli.training import loop
from grpo_cli.training.rollouts.collect import collect
from grpo_cli.training.rollouts.credit import check_episode_credit, with_advantages
from tests.conftest import CPU
from tests.training.test_train import built, metrics


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
    plain.environment.path = "m:Guess"
    check_episode_credit(plain)
    rollout = Recipe(reward=plain.reward, rollout=f"{__name__}:leads")
    check_episode_credit(rollout)
    rollout.rollout = f"{__name__}:returns_tokens"
    with pytest.raises(UserError, match=r"reward.own: .* rollout = .* gives none; return"):
        check_episode_credit(rollout)


async def leads(conversation: Any) -> None: ...


def returns_tokens(prompts: Any, trainer: Any) -> None: ...


# A run


@pytest.mark.runs
def test_run_with_credit_for_turns(tmp_path: Path) -> None:
    live = built(
        tmp_path,
        steps=2,
        prompts_per_step=12,
        dataset__chat=True,
        dataset__eval=None,
        dataset__max_prompt_tokens=64,
        environment={"path": "tests.environments.samples:Flaky", "max_failed_share": 0.9},
        episode={"credit": "turns", "turn_tokens": 8},
        generation__max_completion_tokens=128,
        generation__logit_bias={2: 3.0},  # so that most turns end
        reward={"own": {"function": "environment"}},
        loss__beta=0.05,
        loss__kl_in="reward",
    )
    batch = collect(live, live.recipe, Clock(CPU))
    groups, _ = with_advantages(live.recipe, batch.groups, batch.step_stats, 0)
    rollouts = [r.as_kind(TrainingSample) for g in groups for r in g.rollouts]
    failed = [r for r in rollouts if r.completion.environment_failed]
    assert 0 < len(failed) < len(rollouts)
    for r in failed:
        assert math.isnan(r.reward)
        assert r.reward_parts == {"own": None}
        assert not r.advantages.any()
        assert r.loss_tokens == 0
    several = [r for r in rollouts if len({round(float(a), 5) for a in r.advantages}) > 1]
    assert several, "turns of one episode have advantages of their own"
    for r in several:
        for start, end in r.completion.model_turns:
            assert len(set(r.advantages[start:end].tolist())) == 1
    loop.train(live)
    live.close()
    for line in metrics(live):
        assert line["environment/unscored"] == line["rewards_none"] > 0
        assert line["episode/turns/max"] > 1
        assert line["episode/foreign_tokens"] > 0
        assert math.isfinite(line["loss"])
        assert math.isfinite(line["grad_norm"])
