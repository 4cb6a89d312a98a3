"""The reward that an environment gives: for turns, for the episode, or none."""

from collections.abc import Sequence
from typing import Any

import pytest

from grpo_cli.data.sample import Sample
from grpo_cli.rewards.environment import environment
from tests.episodes import make_episode
from tests.tables import table


def value(
    rewards: Sequence[float | None] = (None, None),
    final: dict[str, float] | None = None,
    **args: Any,
) -> Any:
    sample = Sample.of(make_episode(rewards, env_rewards=final or {}))
    (found,) = environment(["c"], [[1, 2]], [sample.episode], **args)
    return found


@table(
    ("turns", "final", "name", "expected"),
    [
        ((None, None), {}, None, 0.0),
        ((1.0, None, 0.5), {}, None, 1.5),
        ((0.5, None), {"Guess": 1.0, "style": -0.25}, None, 1.25),
        ((0.5, None), {"Guess": 1.0, "style": -0.25}, "Guess", 1.0),
        ((0.5, None), {"Guess": 1.0}, "turns", 0.5),
        ((0.5, None), {"Guess": 1.0}, "Other", None),
    ],
)
def test_the_sum(
    turns: Sequence[float | None], final: dict[str, float], name: str | None, expected: float | None
) -> None:
    assert value(turns, final, name=name) == expected


def test_with_credit_for_turns_each_has_its_reward_and_the_last_the_episodes() -> None:
    # Turns of two tokens with replies of two: they end at tokens 1, 5 and 9.
    given = value((1.0, None, 0.5), {"Guess": 2.0}, episode_credit="turns")
    assert given == [(1, 1.0), (5, 0.0), (9, 2.5)]
    assert value((1.0, 2.0), {"G": 4.0}, name="turns", episode_credit="turns") == [
        (1, 1.0),
        (5, 2.0),
    ]
    assert value((None, None), episode_credit="turns") == [(1, 0.0), (5, 0.0)]
    assert value((1.0, None), name="Guess", episode_credit="turns") is None


def test_a_completion_that_is_no_episode_has_none() -> None:
    assert environment(["a", "b"], [[1], [2]]) == [None, None]
    assert environment(["a", "b"], [[1], [2]], [None, None]) == [None, None]


def test_an_episode_without_turns_is_one_turn() -> None:
    episode = {"messages": [], "turns": [], "stop_reason": "answered", "rewards": {"G": 1.0}}
    assert environment(["a"], [[5, 6, 7]], [episode]) == [1.0]
    assert environment(["a"], [[5, 6, 7]], [episode], episode_credit="turns") == [[(2, 1.0)]]


def test_another_credit_is_refused() -> None:
    with pytest.raises(ValueError, match="episode_credit is 'turn'; it must be one of sum, turns"):
        value(episode_credit="turn")
