"""Groups are stored, saved, loaded as plain data, and again what they were."""

import dataclasses
import io
import math
from typing import Any

import torch

from grpo_cli.data.prompts import PromptStream
from grpo_cli.records import Completion, Group, Prompt, Rollout, TrainingSample, Turn, regrouped
from grpo_cli.training.rollouts.stored_groups import from_entries, to_entries

NOT_KEPT = {"prompt", "completion"}  # by position and in parts
REWARDS = "right and steps"


def make_stream(seed: int = 3) -> PromptStream:
    prompts = [Prompt(row, [row, row + 1], f"{row}+1=", {"answer": row + 1}) for row in range(5)]
    return PromptStream(prompts, seed, shuffle=True)


def make_groups(stream: PromptStream, *positions: int) -> list[Group]:
    """Rewarded steps, no reward, masked, cut off, with and without log-probabilities."""
    groups = []
    for position in positions:
        prompt = stream.prompt_at(position)
        rollouts = [
            Rollout(
                prompt,
                Completion([7, 8, position], [-0.5, -1.25, -0.1], "stop"),
                "é中",
                reward_parts={"right": 1.0, "steps": 0.75},
                step_rewards={"steps": [(0, 0.25), (2, 0.5)]},
                reward=1.75,
                outcome_reward=1.0,
                old_logprobs=torch.tensor([-0.5, -1.5, -0.125]),
                extras={"shouted": "É中", "n": 3},
            ),
            Rollout(
                prompt,
                Completion([9], [-3.0], "stop"),
                "",
                reward_parts={"right": None, "steps": None},
            ),
            Rollout(
                prompt,
                Completion(
                    [9, 9],
                    [-3.0, 0.0],
                    "length",
                    4,
                    [True, False],
                    2,
                    1,
                    1,
                    turns=(Turn(0, 1, "model", 0.5), Turn(1, 2, "environment")),
                    stop_reason="max_turns",
                    messages=({"role": "assistant", "content": "9"},),
                    env_rewards={"Guess": 0.5},
                    env_metrics={"guesses": 1.0},
                    env_error="lost",
                    calls_by_tool={"add": [2, 1, 1]},
                    parse_errors=1,
                    env_retries=2,
                ),
                "cut",
                reward_parts={"right": 0.0, "steps": 0.0},
                step_rewards={"steps": []},
                reward=0.1,
                outcome_reward=0.1,
                excluded=True,
                old_logprobs=torch.tensor([math.pi, -2.0]),
            ),
        ]
        groups.append(Group(position, prompt, rollouts))
    return groups


def through_a_file(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # as a checkpoint is: nothing is unpickled


def same(one: Any, other: Any) -> bool:
    """Equal, of the same types, NaN equal to NaN; dicts in the same order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        fields = [f.name for f in dataclasses.fields(one)]
        return all(same(getattr(one, name), getattr(other, name)) for name in fields)
    return bool(one == other)


def test_every_field_of_a_rollout_is_stored() -> None:
    rollouts = make_groups(make_stream(), 2, 11)
    samples = [r.as_kind(TrainingSample, advantage=1.0) for g in rollouts for r in g.rollouts]
    groups = to_entries(regrouped(rollouts, samples), REWARDS)
    assert same(groups, to_entries(rollouts, REWARDS)), "what a step computes anew is not"
    of_rollout = {f.name for f in dataclasses.fields(Rollout)}
    of_completion = {f.name for f in dataclasses.fields(Completion)}
    stored = {name for group in groups for rollout in group["rollouts"] for name in rollout}
    assert stored == (of_rollout - NOT_KEPT) | of_completion


def test_a_first_observation_comes_back_with_its_group() -> None:
    groups = make_groups(make_stream(), 2, 11)  # of two epochs
    seen = dataclasses.replace(
        groups[0].prompt,
        ids=[5, 5, 6],
        text="seen",
        row_ids=groups[0].prompt.ids,
        columns={**groups[0].prompt.columns, "score": 0.5},
        added={"score": 0.5},
    )
    groups[0] = Group(2, seen, [dataclasses.replace(r, prompt=seen) for r in groups[0].rollouts])
    found = from_entries(through_a_file(to_entries(groups, REWARDS)), make_stream(), REWARDS)
    assert same(found, groups)
    assert [r.loss_tokens for r in found[0].rollouts] == [3, 0, 0]


def test_arguments_of_rewards_may_be_secret() -> None:
    entries = to_entries(make_groups(make_stream(), 2, 11), "judge(key=sk-123)")
    assert "sk-123" not in repr(entries)
    assert len(from_entries(entries, make_stream(), "judge(key=sk-123)")) == 2
    assert from_entries(entries, make_stream(), "judge(key=sk-124)") == []
