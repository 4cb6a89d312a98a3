"""Sessions in worker processes: whatever an environment does, each call ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from grpo_cli.config.schema import EnvironmentSettings
from grpo_cli.environments.protocol import Message, Observation
from grpo_cli.environments.sessions import EnvironmentFailure, Session, Sessions

pytestmark = pytest.mark.programs

SAMPLES = "tests.environments.samples"
PATIENCE = 60.0  # seconds after which a test that hangs fails instead
SECONDS = 1.0  # deadline of calls that hang

Open = Callable[..., Sessions]


@pytest.fixture
def start() -> Iterator[Open]:
    opened = []

    def start(
        name: str | None = None, tools: dict[str, str] | None = None, **more: Any
    ) -> Sessions:
        path = f"{SAMPLES}:{name}" if name else None
        defaults: dict[str, Any] = {"workers": 1, "seconds": 30.0}
        settings = EnvironmentSettings(path=path, **{**defaults, **more})
        opened.append(Sessions(settings, {n: f"{SAMPLES}:{f}" for n, f in (tools or {}).items()}))
        return opened[-1]

    yield start
    for sessions in opened:
        sessions.close()


def says(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def calls(*calls: tuple[str, Any]) -> Message:
    made = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    return says("", tool_calls=made)


def texts(observation: Observation) -> list[str]:
    return [m["content"] for m in observation.messages]


def begin(sessions: Sessions, row: dict[str, Any] | None = None, seed: int = 0) -> Session:
    session = sessions.open("", row or {}, seed)
    session.reset().result(PATIENCE)
    return session


def failed(call: Any) -> EnvironmentFailure:
    error = call.exception(PATIENCE)
    assert isinstance(error, EnvironmentFailure), error
    return error


@pytest.mark.parametrize("isolate", [True, False])
def test_an_episode(start: Open, isolate: bool) -> None:
    sessions = start("Guess", isolate=isolate)
    session = sessions.open("", {}, seed=7)
    assert texts(session.reset().result(PATIENCE)) == ["Below 32?"]
    guesses = {i: session.step(says(str(i))).result(PATIENCE) for i in range(32)}
    (right,) = [i for i, o in guesses.items() if o.reward == 1.0]
    assert guesses[right].done
    assert {tuple(texts(o)) for i, o in guesses.items() if i < right} <= {("higher",)}
    assert session.finish().result(PATIENCE).rewards == {}
    again = sessions.open("", {}, seed=7)
    again.reset().result(PATIENCE)
    assert again.step(says(str(right))).result(PATIENCE).done, "the same seed, the same number"
