import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_cli.records import RolloutStats, rollout_stats
from grpo_cli.reporting.rollout_metrics import rollout_metrics
from grpo_cli.training.rollouts.credit import reward_tensors
from tests.conftest import make_group, make_rollout
from tests.episodes import make_episode

NAN = math.nan


def outcome(
    reward: float,
    tokens: int = 1,
    truncated: bool = False,
    masked: bool = False,
    *,
    rest: float | None = None,
    steps: dict[str, list[float]] | None = None,
    **parts: float | None,
) -> RolloutStats:
    """rest: the reward without its steps, where there are some."""
    without_steps = reward if rest is None else rest
    return RolloutStats(
        reward,
        without_steps,
        parts or {"r": None if math.isnan(reward) else reward},
        steps or {},
        prompt_tokens=2,
        tokens=tokens,
        truncated=truncated,
        excluded=masked,
        sampled_tokens=tokens,
    )


def test_rollout_metrics_by_hand() -> None:
    step_stats = {
        8: [outcome(1.0, 10, a=1.0, b=0.0), outcome(0.0, 4, a=0.0, b=0.0)],
        5: [outcome(2.0, 6, True, a=2.0, b=None), outcome(2.0, 8, True, a=2.0, b=None)],
    }
    assert rollout_metrics(step_stats) == pytest.approx(
        {
            "reward": 1.25,
            "reward_std": 0.35355339,  # of the groups: sqrt(1/2) and 0
            "frac_reward_zero_std": 0.5,
            "rewards_none": 0.0,
            "completions/mean_length": 7.0,
            "completions/min_length": 4.0,
            "completions/max_length": 10.0,
            "completions/clipped_ratio": 0.5,
            "completions/mean_terminated_length": 7.0,
            "completions/min_terminated_length": 4.0,
            "completions/max_terminated_length": 10.0,
            "rewards/a/mean": 1.25,
            "rewards/a/std": 0.95742711,  # sqrt((0.0625 + 1.5625 + 2 · 0.5625) / 3)
            "rewards/b/mean": 0.0,
            "rewards/b/std": 0.0,
        }
    )


def test_rollouts_without_a_reward_are_counted_and_no_part_of_means() -> None:
    found = rollout_metrics(
        {
            0: [outcome(NAN, r=None), outcome(3.0, r=3.0)],
            1: [outcome(NAN, r=None), outcome(NAN, r=None)],
        }
    )
    assert found["reward"] == 3.0
    assert found["rewards_none"] == 3.0
    assert found["reward_std"] == 0.0
    assert found["frac_reward_zero_std"] == 1.0
    assert found["rewards/r/mean"] == 3.0
    assert found["rewards/r/std"] == 0.0


def test_outcomes_of_groups() -> None:
    parts, steps = {"a": 0.5, "b": None, "c": 3.0}, {"c": [(0, 1.0), (1, 0.5)]}
    values: dict[str, Any] = {"reward": 2.0, "outcome_reward": 0.5, "step_rewards": steps}
    r = make_rollout([1, 2, 3], [4, 5], parts=parts, finish_reason="length", **values)
    expected = RolloutStats(2.0, 0.5, parts, {"c": [1.0, 0.5]}, 3, 2, True, False, 2)
    assert rollout_stats([make_group(7, [r])]) == [(7, [expected])]
    assert not RolloutStats.of(make_rollout()).truncated


def same(found: Tensor, rows: list[list[float]]) -> bool:
    expected = torch.tensor(rows, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    return True


def test_reward_tensors_by_hand() -> None:
    step_stats = {
        6: [
            outcome(5.0, 3, a=1.0, b=2.0),
            outcome(1.0, 4, a=1.0, b=None),
            outcome(NAN, 5, a=None, b=None),
        ],
        # Steps are given to the tokens, not to the rule; a function may give some rollouts numbers.
        4: [
            outcome(4.0, 1, rest=1.0, steps={"b": [1.0, 2.0]}, a=1.0, b=1.5),
            outcome(2.0, 2, rest=2.0, steps={"b": []}, a=2.0, b=0.0),
        ],
    }
    found = reward_tensors(step_stats, {"a": 1.0, "b": 2.0})
    assert found.keys() == {"rewards", "parts", "weights", "lengths"}
    assert same(found["rewards"], [[1.0, 2.0, NAN], [5.0, 1.0, NAN]])
    assert same(found["parts"][..., 0], [[1.0, 2.0, NAN], [1.0, 1.0, NAN]])
    assert same(found["parts"][..., 1], [[NAN, NAN, NAN], [2.0, NAN, NAN]])
    assert same(found["lengths"], [[1.0, 2.0, 0.0], [3.0, 4.0, 5.0]])
    assert found["weights"].tolist() == [1.0, 2.0]
    swapped = reward_tensors(step_stats, {"b": 2.0, "a": 1.0})
    assert swapped["weights"].tolist() == [2.0, 1.0]
    torch.testing.assert_close(swapped["parts"], found["parts"].flip(-1), equal_nan=True)


def test_metrics_of_episodes_are_trls() -> None:
    # G = 3: a good call, a call with a wrong argument, no call (test_grpo_trainer.py).
    called: dict[str, Any] = {"tool_calls": 1, "calls_by_tool": {"multiply": [1, 0, 0]}}
    good = make_episode((None, None), **called)
    called = {"tool_calls": 1, "tool_errors": 1, "calls_by_tool": {"multiply": [1, 1, 1]}}
    wrong = make_episode((None, None), parse_errors=1, **called)
    none = make_episode((None,), stop_reason="max_turns", env_metrics={"wins": 0.5})
    metrics = rollout_metrics(dict(rollout_stats([make_group(0, [good, wrong, none])])))
    assert metrics["tools/call_frequency"] == pytest.approx(2 / 3)
    assert metrics["tools/failure_frequency"] == pytest.approx(1 / 2)
    found = {k: v for k, v in metrics.items() if k.startswith(("tools/m", "tools/p", "e"))}
    assert {k: v for k, v in found.items() if v or "/stop/" not in k} == pytest.approx(
        {
            "tools/multiply/calls": 2,
            "tools/multiply/failures": 1,
            "tools/multiply/timeouts": 1,
            "tools/parse_errors": 1,
            "episode/turns/mean": 5 / 3,
            "episode/turns/max": 2,
            "episode/foreign_tokens": 4 / 3,
            "episode/stop/answered": 2 / 3,
            "episode/stop/max_turns": 1 / 3,
            "environment/wins": 0.5,
            "environment/retries": 0,
            "environment/unscored": 0,
        }
    )
    assert metrics["completions/max_length"] == 4, "the reply is not the model's"
