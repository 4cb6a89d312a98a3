"""A step under way is kept, loaded as plain data, and again what it was."""

from __future__ import annotations

import dataclasses
import io
import math
from typing import Any, Literal

import pytest
import torch

from grpo_cli.algorithm.loss import Mean, MeasuredUpdate
from grpo_cli.algorithm.metric_sums import ReducedMetrics
from grpo_cli.data import PromptStream
from grpo_cli.records import (
    Completion,
    Group,
    Prompt,
    Rollout,
    RolloutStats,
    StepStats,
    rollout_stats,
)
from grpo_cli.training.rollouts.collect import use_samplers_logprobs
from grpo_cli.training.rollouts.credit import subtract_kl_from_rewards
from grpo_cli.training.step_progress import StepBatch, StepProgress, from_state
from tests.conftest import make_group, make_rollout
from tests.episodes import make_episode

HOW = "of this recipe"
# What a resumed step computes anew before it goes on with its updates.
ANEW = {
    "advantage", "token_advantages", "ref_logprobs", "weight", "high_entropy", "cov_selected",
}  # fmt: skip


def make_stream(seed: int = 3) -> PromptStream:
    prompts = [Prompt(row, [row, row + 1], f"{row}+1=", {"answer": row + 1}) for row in range(5)]
    return PromptStream(prompts, seed, shuffle=True)


def completed(
    prompt: Prompt, ids: list[int], reason: Literal["stop", "length"], **known: Any
) -> Rollout:
    logprobs = [-0.5 * i for i in range(len(ids))]
    return Rollout(prompt, Completion(ids, logprobs, reason, sampled_at=7), f"of {ids}", **known)


def make_groups(stream: PromptStream, *positions: int) -> list[Group]:
    """Each of a rewarded one, one without a reward, and one that was cut off and is masked."""
    groups = []
    for position in positions:
        prompt = stream.prompt_at(position)
        rollouts = [
            completed(
                prompt,
                [7, 8, position],
                "stop",
                reward_parts={"right": 1.0, "steps": 0.75},
                step_rewards={"steps": [(0, 0.25), (2, 0.5)]},
                reward=1.75,
                outcome_reward=1.0,
                extras={"shouted": "É中"},
                old_logprobs=torch.tensor([-0.5, -1.5, -0.125]),
            ),
            completed(prompt, [9], "stop", reward_parts={"right": None, "steps": None}),
            completed(
                prompt,
                [9, 9],
                "length",
                reward_parts={"right": 0.1, "steps": None},
                reward=0.1,
                outcome_reward=0.1,
                excluded=True,
                old_logprobs=torch.tensor([math.pi, -2.0]),
            ),
        ]
        groups.append(Group(position, prompt, rollouts))
    return groups


def measured(metrics: ReducedMetrics) -> MeasuredUpdate:
    kl = Mean(metrics.sums["kl"], metrics.counts["kl"])
    return MeasuredUpdate(metrics.sums["loss"], kl, Mean(), Mean(1e-30, 3.0), Mean(), metrics)


def make_work(stream: PromptStream) -> StepProgress:
    """Of a process that has two of a step's three groups; a fourth was sampled and dropped."""
    own, others = make_groups(stream, 6, 2), make_groups(stream, 4)
    step_stats = dict(rollout_stats([*own, *others]))
    sampled = step_stats | dict(rollout_stats(make_groups(stream, 5)))
    totals = [
        measured(
            ReducedMetrics({"loss": 0.5, "kl": 2.0}, {"kl": 8.0}, {"low": math.inf}, {"high": 1.5})
        ),
        measured(
            ReducedMetrics(
                {"loss": -0.25, "kl": 1 / 3}, {"kl": 7.0}, {"low": -2.0}, {"high": 1e-30}
            )
        ),
    ]
    metrics = {"dynamic_sampling/dropped": 1.0, "rewards/right/mean": math.nan}
    return StepProgress(
        StepBatch(own, step_stats, sampled, metrics), totals, [0.75, 1 / 3], updates=3
    )


def through_a_file(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # as a checkpoint is: nothing is unpickled


def kept(work: StepProgress) -> tuple[Any, Any]:
    shared, own = through_a_file((work.shared(), work.own(HOW)))
    return shared, own


def same(one: Any, other: Any) -> bool:
    """Equal, of the same types, NaN equal to NaN; dicts in the same order."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        fields = [f.name for f in dataclasses.fields(one)]
        return all(same(getattr(one, name), getattr(other, name)) for name in fields)
    return bool(one == other)


def found_again(work: StepProgress, stream: PromptStream) -> StepProgress:
    found = from_state(*kept(work), stream, HOW)
    assert found is not None
    return found


def test_a_step_comes_back_as_it_was() -> None:
    work = make_work(make_stream())
    stream = make_stream()  # of the process that goes on
    found = found_again(work, stream)
    assert same(found, work)
    assert [g.prompt_index for g in found.collected.groups] == [6, 2]
    assert all(g.prompt is r.prompt for g in found.collected.groups for r in g.rollouts)
    assert found.collected.groups[0].prompt is stream.prompt_at(6)


def test_what_is_computed_anew_is_not_kept() -> None:
    work = make_work(make_stream())
    before = work.own(HOW)
    for r in (r for g in work.collected.groups for r in g.rollouts):
        for name in ANEW:
            setattr(r, name, torch.ones(1))
    assert same(work.own(HOW), before)


def test_the_order_of_the_groups_is_kept() -> None:
    # Metrics are means over them in this order, to the last bit.
    found = found_again(make_work(make_stream()), make_stream())
    assert list(found.collected.step_stats) == [6, 2, 4]
    assert list(found.collected.sampled) == [6, 2, 4, 5]


def test_an_outcome_with_a_kl_taken_off_is_kept_without() -> None:
    """`loss.kl_in = reward` is taken off again by the step that goes on."""
    work = make_work(make_stream())
    plain = make_work(make_stream())
    rollouts = [r for g in work.collected.groups for r in g.rollouts]
    for r in rollouts:
        r.old_logprobs = torch.zeros(len(r.completion.ids))
        r.ref_logprobs = torch.full((len(r.completion.ids),), -0.25)
    subtract_kl_from_rewards([r for r in rollouts if r.loss_tokens], "k1", beta=2.0)
    penalized = 1.0 - 2 * 3 * 0.25
    assert rollouts[0].outcome_reward == penalized, "or else nothing was taken off"

    groups = found_again(work, make_stream()).collected.groups
    for group, before in zip(groups, plain.collected.groups, strict=True):
        for r, its in zip(group.rollouts, before.rollouts, strict=True):
            assert same(r.outcome_reward, its.outcome_reward)
            assert same(r.reward, its.reward)
    assert rollouts[0].outcome_reward == penalized, "the run that is saved goes on with it"


def test_a_rewarded_step_alone_is_without_an_outcome_again() -> None:
    """A KL makes a number of it: with only steps rewarded there was none."""
    stream = make_stream()
    (group,) = make_groups(stream, 4)
    for r in group.rollouts:
        r.outcome_reward, r.reward = math.nan, 0.5
    work = StepProgress(StepBatch([group], dict(rollout_stats([group])), {}))
    for r in group.rollouts:
        r.old_logprobs = r.ref_logprobs = torch.zeros(len(r.completion.ids))
    subtract_kl_from_rewards(group.rollouts, "k1", beta=1.0)
    assert [r.outcome_reward for r in group.rollouts] == [0.0, 0.0, 0.0]
    (found,) = found_again(work, make_stream()).collected.groups
    assert all(math.isnan(r.outcome_reward) for r in found.rollouts)


def test_what_the_sampler_said_is_kept() -> None:
    """Of what an earlier policy has sampled, whose log-probabilities nobody could compute."""
    work = make_work(make_stream())
    for r in (r for g in work.collected.groups for r in g.rollouts):
        use_samplers_logprobs(r, step=8)
    for group in found_again(work, make_stream()).collected.groups:
        for r in group.rollouts:
            assert r.old_logprobs is not None
            assert r.old_logprobs.tolist() == r.completion.sampling_logprobs
            assert r.completion.sampled_at == 7


@pytest.mark.parametrize(
    ("stream", "how"),
    [(make_stream(), "of another recipe"), (make_stream(seed=4), HOW)],
    ids=["another recipe", "other prompts"],
)
def test_a_step_of_another_recipe_is_begun_anew(stream: PromptStream, how: str) -> None:
    shared, own = kept(make_work(make_stream()))
    assert from_state(shared, own, make_stream(), HOW) is not None
    assert from_state(shared, own, stream, how) is None


def test_one_group_that_is_of_no_use_is_enough() -> None:
    shared, own = kept(make_work(make_stream()))
    own[1]["prompt_ids"] = [99]
    assert from_state(shared, own, make_stream(), HOW) is None


def test_a_process_with_no_group_of_the_step_can_go_on() -> None:
    # More processes than groups: what the others have is not its own to judge.
    shared, _ = kept(make_work(make_stream()))
    found = from_state(shared, [], make_stream(), HOW)
    assert found is not None
    assert found.collected.groups == []
    step_stats: StepStats = make_work(make_stream()).collected.step_stats
    assert same(found.collected.step_stats, step_stats)
    assert all(isinstance(o, RolloutStats) for group in step_stats.values() for o in group)


def test_the_numbers_of_episodes_are_kept() -> None:
    episode = make_episode(
        (None, None),
        calls_by_tool={"add": [2, 1, 0]},
        env_rewards={"Guess": 1.0},
        env_metrics={"wins": 1.0},
        env_error="lost",
        env_retries=1,
    )
    stats: StepStats = dict(rollout_stats([make_group(4, [episode, make_rollout()])]))
    shared, _ = through_a_file((StepProgress(StepBatch([], stats, stats)).shared(), []))
    found = from_state(shared, [], make_stream(), HOW)
    assert found is not None
    assert same(found.collected.sampled, stats)
    assert found.collected.step_stats[4][0].episode is not None
