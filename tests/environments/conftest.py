"""Sessions of environments in worker processes, which end with the test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from grpo_cli.environments.functions import EnvironmentFailure
from grpo_cli.environments.sessions import EnvironmentSession, Sessions
from grpo_cli.environments.settings import EnvironmentSettings

SAMPLES = "tests.environments.samples"
PATIENCE = 60.0  # seconds after which a test that hangs fails instead

Open = Callable[..., Sessions]


@pytest.fixture
def start() -> Iterator[Open]:
    """Starts an environment, given as a class of samples.py or as my_module:name."""
    opened = []

    def start(
        name: str | None = None, tools: dict[str, str] | None = None, **more: Any
    ) -> Sessions:
        path = f"{SAMPLES}:{name}" if name and ":" not in name else name
        defaults: dict[str, Any] = {"workers": 1, "seconds": 30.0}
        settings = EnvironmentSettings(path=path, **{**defaults, **more})
        opened.append(Sessions(settings, {n: f"{SAMPLES}:{f}" for n, f in (tools or {}).items()}))
        return opened[-1]

    yield start
    for sessions in opened:
        sessions.close()


def begin(sessions: Sessions, row: dict[str, Any] | None = None) -> EnvironmentSession:
    session = sessions.open("", row or {}, 0)
    session.reset().result(PATIENCE)
    return session


def failed(call: Any) -> EnvironmentFailure:
    error = call.exception(PATIENCE)
    assert isinstance(error, EnvironmentFailure), error
    return error
