"""A trajectory on the terminal: every message with its role, rewards at turns, replies dimmed."""

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from grpo_cli.config.interpolation import printable
from grpo_cli.data.sample import Sample
from grpo_cli.records import Rollout
from grpo_cli.reporting.trajectories import trajectory
from tests.episodes import make_episode


def shown(r: Rollout, **columns: Any) -> str:
    console = Console(width=100, color_system=None)
    sample = replace(Sample.of(r), columns=columns)
    with console.capture() as capture:
        console.print(trajectory(sample), soft_wrap=True)
    return capture.get()


def test_an_episode_turn_by_turn() -> None:
    r = make_episode((0.5, None), env_rewards={"Guess": 1.0}, env_metrics={"wins": 1.0})
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 times 7?"}]
    r = replace(r, prompt=replace(r.prompt, text=chat))  # type: ignore[arg-type]
    sampled = r.completion.is_sampled
    cells: dict[str, Any] = {"step": 3, "row": 5, "sample": 1, "reward": 1.5, "advantage": -0.25}
    cells["token_advantages"] = [1.5, 1.5, 0.0, 0.0, -0.25, -0.25]
    lines = shown(r, **cells, sampled=sampled, **{"rewards/env": 1.5, "rewards/style": None})
    assert [line.rstrip() for line in lines.splitlines()[1:]] == [
        "step 3 · row 5 · sample 1 · reward 1.5 · advantage -0.25 · ended: answered",
        "system: Be brief.",
        "user: 6 times 7?",
        "assistant, turn 1: → multiply(a=6, b=7)",
        "  reward of the turn: 0.5, advantage: 1.5",
        "tool multiply: 42",
        "assistant, turn 2: It is 42.",
        "  advantage: -0.25",
        "rewards: env 1.5, style none",
        "of the environment: Guess 1",
        "metrics: wins 1",
        "turns of the model: 2; tokens: 4 sampled, 2 of replies",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[2J gone", r"\x1b[2J gone"),
        ("a\rb\x07\x9b", r"a\x0db\x07\x9b"),
        ("two\nlines [bold]é", "two\nlines [bold]é"),
    ],
)
def test_a_tool_does_not_reach_the_terminal(text: str, expected: str) -> None:
    assert printable(text) == expected
    messages = ({"role": "tool", "name": text, "content": text},)
    assert expected in shown(make_episode((None,), messages=messages))


def test_messages_of_other_forms() -> None:
    messages = (
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image"}]},
        {"role": "user", "content": None},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{}"}]},
    )
    lines = shown(make_episode((None, None), messages=messages)).splitlines()
    assert [line.rstrip() for line in lines[3:6]] == [
        "assistant, turn 1: a<image>",
        "user:",
        "assistant, turn 2: → f({})",
    ]
