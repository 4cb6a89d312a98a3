import math
import time

import pytest
import torch

from grpo_cli.metrics import Clock, Outcome, mean, outcomes, reward_matrix, rollout_metrics
from tests.conftest import CPU, make_group, make_rollout

NAN = math.nan


def outcome(
    reward: float, tokens: int = 1, truncated: bool = False, **parts: float | None
) -> Outcome:
    return Outcome(reward, parts or {"r": reward}, 2, tokens, truncated)


def test_rollout_metrics_by_hand() -> None:
    whole_step = {
        8: [outcome(1.0, 10, a=1.0, b=0.0), outcome(0.0, 4, a=0.0, b=0.0)],
        5: [outcome(2.0, 6, True, a=2.0, b=None), outcome(2.0, 8, True, a=2.0, b=None)],
    }
    assert rollout_metrics(whole_step) == pytest.approx(
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


def test_lengths_of_those_that_ended() -> None:
    step = [outcome(0.0, 9, True), outcome(0.0, 2), outcome(0.0, 5)]
    found = rollout_metrics({0: step})
    assert found["completions/mean_length"] == pytest.approx(16 / 3)
    assert found["completions/max_length"] == 9.0
    assert found["completions/mean_terminated_length"] == 3.5
    assert found["completions/min_terminated_length"] == 2.0
    assert found["completions/max_terminated_length"] == 5.0
    none_ended = rollout_metrics({0: [outcome(0.0, 9, True)] * 2})
    assert none_ended["completions/mean_terminated_length"] == 0.0
    assert none_ended["completions/clipped_ratio"] == 1.0


def test_outcomes_of_groups() -> None:
    r = make_rollout(
        [1, 2, 3], [4, 5], reward=0.5, parts={"a": 0.5, "b": None}, finish_reason="length"
    )
    expected = Outcome(0.5, {"a": 0.5, "b": None}, 3, 2, True)
    assert outcomes([make_group(7, [r])]) == [(7, [expected])]
    assert not Outcome.of(make_rollout()).truncated


def test_the_reward_matrix_goes_by_position() -> None:
    whole_step = {9: [outcome(3.0), outcome(NAN)], 2: [outcome(0.1), outcome(1.0)]}
    expected = torch.tensor([[0.1, 1.0], [3.0, NAN]], dtype=torch.float64)
    torch.testing.assert_close(reward_matrix(whole_step), expected, rtol=0, atol=0, equal_nan=True)


def test_metrics_do_not_depend_on_the_order_in_which_groups_arrive() -> None:
    groups = {p: [outcome(0.1 * p + i, 1 + p) for i in range(3)] for p in range(5)}
    backwards = dict(reversed(groups.items()))
    assert rollout_metrics(groups) == rollout_metrics(backwards)


def test_mean() -> None:
    assert mean([1.0, 2.0, 6.0]) == 3.0
    assert math.isnan(mean([]))


def test_the_clock_adds_up_stages_and_counts_tokens() -> None:
    clock = Clock(CPU)
    for _ in range(2):
        with clock.stage("a"):
            time.sleep(0.01)
    found = clock.metrics({0: [outcome(0.0, 3), outcome(0.0, 5)]})
    assert found.keys() == {"time/a", "step_time", "tokens_per_second"}
    assert 0.02 <= found["time/a"] <= found["step_time"]
    # two prompts of 2 tokens, completions of 3 and 5
    assert found["tokens_per_second"] * found["step_time"] == pytest.approx(12)
