"""The host of sessions, without a process, and the messages between it and the run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from grpo_cli.environments.adapters import Spec
from grpo_cli.environments.deadlines import Deadlines
from grpo_cli.environments.protocol import Observation
from grpo_cli.environments.session_worker import Host, Reader, Reply, Request, packed

GUESS = Spec(path="tests.environments.samples:Guess")
TOOLS = Spec(tools={"times": "tests.environments.samples:multiply"})


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls(*numbers: int) -> dict[str, Any]:
    made = [{"function": {"name": "times", "arguments": {"a": n, "b": 1}}} for n in numbers]
    return {"role": "assistant", "content": "", "tool_calls": made}


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


def test_messages_arrive_whole_however_they_are_cut() -> None:
    sent = [["a", 1], [Request(1, 2, "reset", {"x": "y" * 1000})], "close"]
    data = b"".join(map(packed, sent))
    for size in (1, 7, 100, len(data)):
        reader = Reader()
        pieces = [data[i : i + size] for i in range(0, len(data), size)]
        assert [m for piece in pieces for m in reader.feed(piece)] == sent


def test_a_host_answers_calls_of_sessions() -> None:
    replies = answers(
        GUESS,
        Request(1, 7, "reset", ("", {}, 0)),
        Request(2, 7, "step", (says("-1"), 0)),
        Request(3, 7, "finish"),
        Request(4, 0, "try", ("", {}, 0)),
        Request(5, 0, "schemas", ""),
    )
    assert [(r.number, r.status) for r in replies] == [(n, "ok") for n in range(1, 6)]
    assert replies[1].payload.messages == [{"role": "user", "content": "higher"}]
    assert replies[3].payload.messages == [{"role": "user", "content": "Below 32?"}]
    assert replies[4].payload == []


def test_a_failed_session_is_over_and_the_others_go_on() -> None:
    replies = answers(
        GUESS,
        Request(1, 7, "reset", ("", {}, 0)),
        Request(2, 8, "reset", ("", {}, 0)),
        Request(3, 7, "step", (says("seven"), 0)),
        Request(4, 8, "step", (says("-1"), 0)),
        Request(5, 8, "abandon"),
    )
    assert [(r.number, r.status) for r in replies] == [
        (1, "ok"), (2, "ok"), (3, "env_error"), (4, "ok"),
    ]  # fmt: skip
    assert replies[2].payload.startswith("step raised ValueError: invalid literal")


def test_a_mistake_of_the_user_is_told_from_a_failure() -> None:
    (reply,) = answers(Spec(path="nowhere:Guess"), Request(1, 0, "try", ("", {}, 0)))
    assert reply.status == "mistake"


def test_answers_of_a_turn_are_passed_on_and_those_before_are_skipped() -> None:
    first, *_, last = answers(TOOLS, Request(1, 7, "step", (calls(4, 5, 6), 1)))
    assert (first.status, first.payload[0]["content"]) == ("partial", "5")
    assert isinstance(last.payload, Observation)
    assert [m["content"] for m in last.payload.messages] == ["5", "6"]


class Raises:
    def __init__(self) -> None:
        raise RuntimeError("no licence")

    def reset(self, row: Any) -> None: ...


def test_a_constructor_is_blamed_once() -> None:
    (reply,) = answers(Spec(path=f"{__name__}:Raises"), Request(1, 0, "schemas", ""))
    assert reply.payload.count("its constructor") == 1


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
        Request(2, 0, "try", ("", {}, 0)),
    )
    assert [r.status for r in replies] == ["ok", "ok"]
    assert capsys.readouterr().err.count("never opened") == 2
