"""Which groups have something to learn from, and what a KL takes off a reward."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_cli.algorithm.settings import Advantage, Loss
from grpo_cli.config.recipe import Recipe
from grpo_cli.environments.settings import EnvironmentSettings, EpisodeSettings
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.records import Group, Rollout, RolloutStats, TrainingSample, rollout_stats
from grpo_cli.reporting.stage_clock import Clock
from grpo_cli.scoring.settings import Reward
from grpo_cli.training import loop
from grpo_cli.training.rollouts import credit
from grpo_cli.training.rollouts.collect import collect
from tests.conftest import CPU, make_group, make_rollout
from tests.episodes import make_episode
from tests.reporting.test_rollout_metrics import outcome
from tests.training.test_train import built, metrics

NAN = math.nan


def signal(group: list[RolloutStats], **advantage: Any) -> bool:
    names = group[0].reward_parts
    recipe = Recipe(reward={n: Reward(n) for n in names}, advantage=Advantage(**advantage))
    return credit.has_signal(recipe, group)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0], True),
        ([1.0, 1.0, 1.0], False),
        ([NAN, 1.0, 0.0], True),
        ([NAN, NAN], False),
    ],
)
def test_groups_with_a_signal(rewards: list[float], expected: bool) -> None:
    assert signal([outcome(r) for r in rewards]) is expected


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([[1.0, 0.0], []], True),  # within one completion
        ([[1.0], [0.0]], True),
        ([[1.0, 1.0], [1.0], []], False),  # equal ones, however many
        ([[], []], False),
    ],
)
def test_signal_of_step_rewards(steps: list[list[float]], expected: bool) -> None:
    for rest in (NAN, 1.0):  # no function but this one, or another whose rewards are equal
        group = [outcome(sum(values), rest=rest, steps={"s": values}) for values in steps]
        assert signal(group) is expected


def test_signal_depends_on_the_rule() -> None:
    easy = [outcome(r) for r in (1.0, 1.0, 1.0, 1.0, 1.0, 0.0)]
    assert signal(easy)
    assert not signal(easy, rule="pass_at_k", args={"k": 2}), "every pair holds a right one"
    same_sums = [outcome(2.0, a=2.0, b=0.0), outcome(2.0, a=0.0, b=2.0)]
    assert not signal(same_sums)
    unlike = [outcome(2.0, a=2.0, b=0.0), outcome(2.0, a=1.0, b=1.0), outcome(2.0, a=1.0, b=1.0)]
    assert not signal(unlike), "the sums are equal"


def test_masked_rollouts_have_no_signal() -> None:
    assert not signal([outcome(1.0, masked=True), outcome(0.0, masked=True)])
    assert signal([outcome(1.0, masked=True), outcome(0.0)])
    steps = [outcome(1.0, rest=NAN, steps={"s": [1.0, 0.0]}, masked=True)] * 2
    assert not signal(steps)


def test_kl_is_subtracted_from_the_outcome() -> None:
    old, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0])
    plain, of_steps, without = (
        credit.subtract_kl(
            make_rollout(reward=r, outcome_reward=o, old_logprobs=old, ref_logprobs=ref), "k1", 0.1
        )
        for r, o in ((2.0, 2.0), (1.0, NAN), (NAN, NAN))
    )
    assert plain.outcome_reward == pytest.approx(1.95)
    assert of_steps.outcome_reward == pytest.approx(-0.05)
    assert math.isnan(without.outcome_reward), "what has no reward trains on nothing"
    assert (plain.reward, of_steps.reward) == (2.0, 1.0)


@pytest.mark.parametrize("loss", [Loss(policy="gmpo"), Loss(ratio_level="sequence")])
def test_rewarded_steps_need_a_loss_with_tokens(loss: Loss) -> None:
    rollouts = [make_rollout(step_rewards={"s": [(0, 1.0)]}), make_rollout()]
    with pytest.raises(TrainingError, match="gives all tokens of a completion one gradient"):
        credit.token_advantages(Recipe(loss=loss), make_group(0, rollouts), [0.0, 0.0])


@pytest.mark.parametrize(("scale", "expected"), [("none", 0.5), ("group", 0.5 / (0.5**0.5 + 1e-4))])
def test_steps_are_scaled_like_the_rule(scale: str, expected: float) -> None:
    rollouts = [make_rollout(step_rewards={"s": [(0, value)]}) for value in (1.0, 0.0)]
    recipe = Recipe(advantage=Advantage(scale=scale))
    first, _ = credit.token_advantages(recipe, make_group(0, rollouts), [0.0, 0.0])
    assert first.tolist() == pytest.approx([expected, 0.0])


# What the advantages come from


def accounted(*groups: list[RolloutStats], **advantage: Any) -> dict[str, float]:
    names = groups[0][0].reward_parts
    weights = {"a": 1.0, "b": 0.5}
    recipe = Recipe(
        reward={n: Reward(n, weight=weights[n]) for n in names}, advantage=Advantage(**advantage)
    )
    stats = dict(enumerate(groups))
    found = credit.advantage_metrics(recipe, stats, credit.rule_advantages(recipe, stats))
    return {
        key.removeprefix("rewards/").removesuffix("/advantage_share"): v for key, v in found.items()
    }


def scored(a: float | None, b: float | None, **given: Any) -> RolloutStats:
    values = [w * v for w, v in ((1.0, a), (0.5, b)) if v is not None]
    return outcome(sum(values) if values else NAN, a=a, b=b, **given)


def test_the_shares_of_weighted_rewards() -> None:
    """Variances 1/4 and 1/16: of all groups the third has no advantage."""
    varied = [scored(a, b) for a in (0.0, 1.0) for b in (0.0, 1.0)]
    same = [scored(1.0, 1.0)] * 3
    found = accounted(varied, varied, same, scale="none")
    assert found == pytest.approx({"frac_zero_advantage": 1 / 3, "a": 0.8, "b": 0.2})


def test_a_reward_that_does_not_apply_adds_nothing() -> None:
    group = [scored(1.0, None), scored(0.0, None), scored(None, None)]
    found = accounted(group, scale="none")
    assert found == pytest.approx({"frac_zero_advantage": 0.0, "a": 1.0, "b": 0.0})


def test_gdpo_adds_up_normalised_rewards() -> None:
    varied = [scored(a, b) for a in (0.0, 100.0) for b in (0.0, 1.0)]
    found = accounted(varied, rule="gdpo")  # with the weights 1 and 1/2
    assert found == pytest.approx({"frac_zero_advantage": 0.0, "a": 0.8, "b": 0.2}, abs=1e-3)
    against = [scored(0.0, 2.0), scored(1.0, 0.0)]  # equal sums, and an advantage
    assert accounted(against, rule="gdpo")["frac_zero_advantage"] == 0
    assert accounted(against) == {"frac_zero_advantage": 1.0}


def test_the_shares_of_rewarded_steps_are_those_of_their_sum() -> None:
    """Deviations ±1 from the steps of b, ±0.5 from a: (1.5·1, 1.5·0.5) / 1.5²."""
    group = [
        outcome(3.0, rest=1.0, steps={"b": [1.0, 1.0]}, a=1.0, b=4.0),
        outcome(0.0, rest=0.0, steps={"b": [0.0]}, a=0.0, b=0.0),
    ]
    found = accounted(group)
    assert found == pytest.approx({"frac_zero_advantage": 0.0, "a": 1 / 3, "b": 2 / 3})


def turns_of_a_group() -> list[Rollout]:
    """Rewards of turns, with weights: 2, 0 | 0 | not scored; replies of two tokens."""
    steps = ({"own": [(1, 2.0), (5, 0.0)]}, {"own": [(1, 0.0)]}, dict[str, Any]())
    return [
        replace(
            make_episode(rewards),
            step_rewards=own,
            reward_parts={"own": 0.0, "style": style},
            outcome_reward=style,
            reward=style + sum(v for _, v in own.get("own", ())),
        )
        for rewards, own, style in zip(
            ((1.0, None), (0.0,), (None,)), steps, (1.0, 0.0, NAN), strict=True
        )
    ]


def advantages_of(recipe: Recipe, group: Group) -> list[TrainingSample]:
    (found,), _ = credit.with_advantages(recipe, [group], dict(rollout_stats([group])), 0)
    return [r for r in found.rollouts if isinstance(r, TrainingSample)]


def test_the_advantages_of_turns_are_on_their_tokens() -> None:
    recipe, group = by_turns(), make_group(0, turns_of_a_group())
    rollouts = advantages_of(recipe, group)
    # The rule gives ±0.5 for the style. Returns: 2 and 0 at the first turn, 0 and 0 at the second;
    # the reply (tokens 2 and 3) has no turn's advantage, and does not train.
    assert rollouts[0].advantages.tolist() == [1.5, 1.5, 0.5, 0.5, 0.5, 0.5]
    assert rollouts[1].advantages.tolist() == [-1.5, -1.5]
    assert rollouts[2].advantages.tolist() == [0.0, 0.0], "no part of the baseline"
    rewards = dict(rollout_stats([group]))
    assert credit.has_signal(recipe, rewards[0])


def test_step_rewards_beside_turns() -> None:
    rollouts = [
        replace(r, step_rewards=r.step_rewards | {"prm": steps})
        for r, steps in zip(turns_of_a_group(), ([(3, 1.0)], [(1, 0.0)]), strict=False)
    ]
    found = credit.token_advantages(by_turns(), make_group(0, rollouts), [0.0, 0.0])
    expected = [[1.5, 1.5, 0.5, 0.5, 0.0, 0.0], [-1.5, -1.5]]
    assert [tokens.tolist() for tokens in found if tokens is not None] == expected


def test_equal_returns_of_turns_are_no_signal() -> None:
    recipe = by_turns()
    recipe.advantage.scale = "group"

    def episode(*values: float) -> RolloutStats:
        return outcome(sum(values), rest=NAN, steps={"own": list(values)}, own=0.0, style=None)

    assert not credit.has_signal(recipe, [episode(0.0, 1.0), episode(1.0)])
    assert not credit.has_signal(recipe, [episode(0.5, 0.5), episode(0.5, 0.5)])
    assert credit.has_signal(recipe, [episode(0.0, 1.0), episode(0.0)])
    recipe.episode.credit = "sum"  # then they are steps, which differ
    assert credit.has_signal(recipe, [episode(0.0, 1.0), episode(1.0)])


def by_turns(**loss: Any) -> Recipe:
    return Recipe(
        reward={"own": Reward("environment", weight=2.0), "style": Reward("length")},
        environment=EnvironmentSettings(path="m:Guess"),
        episode=EpisodeSettings(credit="turns"),
        advantage=Advantage(scale="none"),
        loss=Loss(**loss),
    )


def test_credit_for_turns_is_checked_before_a_run() -> None:
    credit.check_episode_credit(by_turns())
    credit.check_episode_credit(Recipe(reward={"r": Reward("length")}))
    for loss in ({"policy": "gmpo"}, {"ratio_level": "sequence"}):
        with pytest.raises(UserError, match="all tokens of a completion have one gradient"):
            credit.check_episode_credit(by_turns(**loss))
    without = by_turns()
    del without.reward["own"]
    with pytest.raises(UserError, match=r"only read with a reward for turns.*reward=environment"):
        credit.check_episode_credit(without)
    plain = Recipe(reward={"own": Reward("grpo_cli.rewards.environment:environment")})
    with pytest.raises(UserError, match=r"reward.own: is what an environment gives, and there is"):
        credit.check_episode_credit(plain)
    plain.tools = {"add": "m:add"}
    with pytest.raises(UserError, match="and tools give none; set "):
        credit.check_episode_credit(plain)
    plain.environment.path = "m:Guess"
    credit.check_episode_credit(plain)
    rollout = Recipe(reward=plain.reward, rollout=f"{__name__}:leads")
    credit.check_episode_credit(rollout)
    rollout.rollout = f"{__name__}:returns_tokens"
    with pytest.raises(UserError, match=r"reward.own: .* rollout = .* gives none; return"):
        credit.check_episode_credit(rollout)


async def leads(conversation: Any) -> None: ...


def returns_tokens(prompts: Any, trainer: Any) -> None: ...


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
    batch = collect(live, Clock(CPU))
    groups, _ = credit.with_advantages(live.recipe, batch.groups, batch.step_stats, 0)
    rollouts = [r.as_kind(TrainingSample) for g in groups for r in g.rollouts]
    failed = [r for r in rollouts if r.completion.environment_failed]
    assert 0 < len(failed) < len(rollouts)
    for r in failed:
        assert math.isnan(r.reward)
        assert r.loss_tokens == 0
    several = [r for r in rollouts if len({round(float(a), 5) for a in r.advantages}) > 1]
    assert several, "turns of one episode have advantages of their own"
    loop.train(live)
    live.close()
    for line in metrics(live):
        assert line["environment/unscored"] == line["rewards_none"] > 0
        assert line["episode/turns/max"] > 1
        assert line["episode/foreign_tokens"] > 0
        assert math.isfinite(line["loss"])
        assert math.isfinite(line["grad_norm"])
