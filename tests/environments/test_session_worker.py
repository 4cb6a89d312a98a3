"""The host of sessions, without a process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from grpo_cli.environments.adapters import Spec
from grpo_cli.environments.deadlines import Deadlines
from grpo_cli.environments.protocol import Observation
from grpo_cli.environments.session_worker import Host, Reply, Request


def answers(spec: Spec, *requests: Request) -> list[Reply]:
    """The replies to requests, each of which waits for the one before."""
    replies: list[Reply] = []

    async def ask() -> None:
        host = Host(spec, Deadlines(), replies.append)
        for request in requests:
            host.take(request)
            for _ in range(5):
                await asyncio.sleep(0)
        await host.close()

    asyncio.run(ask())
    return replies


class Raises:
    def __init__(self) -> None:
        raise RuntimeError("no licence")

    def reset(self, row: Any) -> None: ...


def test_a_constructor_is_blamed_once() -> None:
    (reply,) = answers(Spec(path=f"{__name__}:Raises"), Request(1, 0, "schemas", ""))
    assert str(reply.result).count("its constructor") == 1


class ClosesBadly:
    def reset(self, row: Any, seed: int) -> Observation:
        return Observation()

    def step(self, message: Any) -> Observation:
        return Observation(done=True)

    def close(self) -> None:
        raise RuntimeError("never opened")


def test_an_error_of_close_is_only_printed(capsys: pytest.CaptureFixture[str]) -> None:
    replies = answers(
        Spec(path=f"{__name__}:ClosesBadly"),
        Request(1, 0, "schemas", ""),
        Request(2, 7, "reset", ("", {}, 0)),
        Request(3, 7, "finish"),
    )
    assert not any(isinstance(r.result, Exception) for r in replies)
    assert capsys.readouterr().err.count("never opened") == 2
