"""The tools and the environment of the shipped recipes."""

import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_cli.environments.examples import GuessNumber, multiply, multiply_wrongly
from grpo_cli.environments.observations import observed
from grpo_cli.environments.protocol import Message, Observation
from tests.scripts.test_docs import example
from tests.tables import table


def test_the_tools() -> None:
    assert multiply(12, 34) == 408
    for a, b in [(12, 34), (10, 10), (99, 99)]:
        assert 1 <= multiply_wrongly(a, b) - a * b < 100
        assert multiply_wrongly(a, b) == multiply_wrongly(a, b)


def play(guess: Callable[[int, int], str], number: int, turns: int = 5) -> tuple[float, list[str]]:
    """Plays a game with a strategy over what is left; returns the reward and the replies."""
    game = GuessNumber(turns=turns)
    assert not game.reset({"id": 1}, 0).messages
    game.number = number
    low, high = 0, 31
    replies: list[str] = []
    for _ in range(turns):
        text = guess(low, high)
        observation = game.step({"role": "assistant", "content": text})
        if observation.done:
            return game.get_reward(), replies
        (message,) = observation.messages
        assert message["role"] == "user"
        replies.append(str(message["content"]))
        if replies[-1] == "higher":
            low = int(text) + 1
        elif replies[-1] == "lower":
            high = int(text) - 1
    pytest.fail("the game does not end")


def test_halving_finds_31_of_32_numbers() -> None:
    rewards = [play(lambda low, high: str((low + high) // 2), number)[0] for number in range(32)]
    assert sum(rewards) / 32 == pytest.approx(0.969, abs=5e-4)


@table(
    ("guesses", "number", "reward", "replies"),
    [
        (["3", " 7\n"], 7, 1.0, ["higher"]),
        (["3", "9", "7"], 7, 1.0, ["higher", "lower"]),
        (["x", "", "-7", "\u0667", "7"], 7, 1.0, ["number?"] * 4),
        (["9" * 5000, "7.0", "1", "2", "3"], 7, 0.0, ["number?", "number?", "higher", "higher"]),
    ],
)
def test_games(guesses: list[str], number: int, reward: float, replies: list[str]) -> None:
    turns = iter(guesses)
    assert play(lambda low, high: next(turns), number) == (reward, replies)


def test_the_seed_alone_says_the_number() -> None:
    def number(row: int, seed: int) -> int:
        game = GuessNumber()
        game.reset({"id": row}, seed)
        return game.number

    assert {number(row, 5) for row in range(20)} == {number(0, 5)}
    assert {number(0, seed) for seed in range(500)} == set(range(32))


def test_a_wrapped_environment_of_skyrl_gym(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gym:
        def __init__(self, env_config: Any, extras: Mapping[str, Any]) -> None:
            self.answer, self.refusal = extras["answer"], env_config.refusal

        def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
            return [*prompt, {"role": "user", "content": "Go."}], {}

        def step(self, action: str) -> dict[str, Any]:
            right = action == self.answer
            said = [] if right else [{"role": "user", "content": self.refusal}]
            return {"observations": said, "reward": float(right), "done": right, "metadata": {}}

    made = {"gym": Gym}
    library = SimpleNamespace(make=lambda name, **args: made[name](**args))
    monkeypatch.setitem(sys.modules, "skyrl_gym", library)  # type: ignore[arg-type]
    names: dict[str, Any] = {}
    exec(example("environments.md", "my_skyrl.py"), names)
    env = names["SkyRl"]("gym", refusal="Nope.")
    first = env.reset({"prompt": "Which?", "answer": "b"}, 0)
    assert observed(first) == Observation([{"role": "user", "content": "Go."}], tools=[], calls=[])
    wrong, right = (observed(env.step({"content": text})) for text in "ab")
    assert (wrong.messages[0]["content"], wrong.reward, wrong.done) == ("Nope.", 0.0, False)
    assert (list(right.messages), right.reward, right.done) == ([], 1.0, True)
