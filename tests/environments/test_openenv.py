"""OpenEnv servers: one in this process speaks their frames, well and badly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from grpo_cli.config.schema import EnvironmentSettings
from grpo_cli.environments.functions import Functions
from grpo_cli.environments.openenv import OpenEnv
from grpo_cli.environments.protocol import Message, Observation
from grpo_cli.environments.sessions import EnvironmentFailure, Session, Sessions
from grpo_cli.errors import UserError

pytestmark = pytest.mark.programs

PATIENCE = 60.0
TEXT = {"type": "string"}
GUESS = {"properties": {"metadata": {}, "guess": TEXT}, "required": ["guess"]}
TOOL = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


class Server:
    """Guess a number: the reward is 1 for the right one. Faults are what the model says."""

    def __init__(self) -> None:
        self.capacity = 1000
        self.now = 0
        self.actions: dict[str, Any] = GUESS
        self.resets: list[Any] = []
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE)

    def _run(self) -> None:
        self._loop.run_until_complete(self._start())
        self._loop.run_forever()
        self._loop.run_until_complete(asyncio.sleep(0.01))

    async def _start(self) -> None:
        self._server = await serve(self._talk, "127.0.0.1", 0, process_request=self._over_http)
        self.port = self._server.sockets[0].getsockname()[1]
        self._ready.set()

    def close(self) -> None:
        async def leave() -> None:
            self._server.close()
            with contextlib.suppress(TimeoutError):  # of those that sleep
                await asyncio.wait_for(self._server.wait_closed(), 0.2)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(leave(), self._loop).result(PATIENCE)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(PATIENCE)

    def _over_http(self, _: ServerConnection, request: Request) -> Response | None:
        if request.path != "/schema":
            return None
        return Response(
            HTTPStatus.OK, "OK", Headers(), json.dumps({"action": self.actions}).encode()
        )

    async def _talk(self, socket: ServerConnection) -> None:
        if self.now >= self.capacity:
            await self._error(socket, "CAPACITY_REACHED", "1 of 1 sessions")
            return
        self.now += 1
        try:
            async for frame in socket:
                if not await self._answer(socket, json.loads(frame)):
                    return
        finally:
            self.now -= 1

    async def _error(self, socket: ServerConnection, code: str, text: str) -> None:
        data = {"message": text, "code": code}
        await socket.send(json.dumps({"type": "error", "data": data}))

    async def _answer(self, socket: ServerConnection, message: Any) -> bool:
        data = message.get("data", {})
        if message["type"] == "close":
            return False
        if message["type"] == "reset":
            self.resets.append(data)
            if data["seed"] == 404:
                return await self._observe(socket, {"hint": "No game."}, done=True)
            return await self._observe(socket, {"hint": "Guess."})
        if data.get("type") == "list_tools":
            return await self._observe(socket, {"tools": [TOOL]})
        if data.get("type") == "call_tool":
            a, b = data["arguments"]["a"], data["arguments"]["b"]
            if a < 0:
                return await self._observe(socket, {"error": {"message": "too small"}})
            return await self._observe(socket, {"result": {"data": a + b}}, 0.5, a == 7)
        said = data["guess"]
        if said == "vanish":
            socket.transport.abort()
            return False
        if said == "sleep":
            await socket.wait_closed()
        if said == "garbage":
            await socket.send("no JSON")
            return True
        if said == "odd":
            await socket.send('{"type": "observation", "data": 3}')
            return True
        if said in ("VALIDATION_ERROR", "EXECUTION_ERROR"):
            await self._error(socket, said, "on purpose")
            return True
        if said == "nan":
            return await self._observe(socket, {}, float("nan"))
        if said == "7":
            return await self._observe(socket, {"hint": ""}, 1.0, True)
        return await self._observe(socket, {"hint": "No.", "board": [1, 2]}, 0.0)

    async def _observe(
        self, socket: ServerConnection, shown: Any, reward: float | None = None, done: bool = False
    ) -> bool:
        data = {"observation": shown, "reward": reward, "done": done}
        await socket.send(json.dumps({"type": "observation", "data": data}))
        return True


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def opened() -> Iterator[list[Sessions]]:
    opened: list[Sessions] = []
    yield opened
    for sessions in opened:
        sessions.close()


def start(
    opened: list[Sessions], server: Server, tools: dict[str, str] | None = None, **more: Any
) -> Sessions:
    settings: dict[str, Any] = {
        "openenv": f"ws://127.0.0.1:{server.port}", "workers": 1, "seconds": 30.0, **more
    }  # fmt: skip
    opened.append(Sessions(EnvironmentSettings(**settings), tools))
    return opened[-1]


def begin(sessions: Sessions, row: dict[str, Any] | None = None, seed: int = 7) -> Session:
    session = sessions.open("", row or {}, seed)
    session.reset().result(PATIENCE)
    return session


def says(text: str, *calls: tuple[str, Any]) -> Message:
    made = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if calls else {})}


def texts(observation: Observation) -> list[str]:
    return [m["content"] for m in observation.messages]


def failed(call: Any) -> EnvironmentFailure:
    error = call.exception(PATIENCE)
    assert isinstance(error, EnvironmentFailure), error
    return error


@pytest.mark.parametrize("isolate", [True, False])
def test_an_episode(server: Server, opened: list[Sessions], isolate: bool) -> None:
    sessions = start(opened, server, isolate=isolate, args={"columns": ["task"]})
    session = sessions.open("", {"task": 3, "other": 4}, 7)
    first = session.reset().result(PATIENCE)
    assert texts(first) == ["Guess."]
    assert server.resets == [{"seed": 7, "task": 3}]
    wrong = session.step(says("5")).result(PATIENCE)
    assert (texts(wrong), wrong.reward, wrong.done) == (["No."], 0.0, False)
    right = session.step(says("7")).result(PATIENCE)
    assert (texts(right), right.reward, right.done) == ([], 1.0, True)
    assert session.finish().result(PATIENCE).rewards == {}


def test_the_action_and_the_observation_as_the_recipe_writes_them(
    server: Server, opened: list[Sessions]
) -> None:
    args = {"action": {"guess": "{text}", "more": [1]}, "observation": "{hint} of {board}"}
    session = begin(start(opened, server, args=args))
    assert texts(session.step(says("5")).result(PATIENCE)) == ["No. of [1, 2]"]


def test_an_action_with_two_texts_has_to_be_named(server: Server, opened: list[Sessions]) -> None:
    server.actions = {"properties": {"guess": TEXT, "reason": TEXT}}
    failure = failed(start(opened, server).open("", {}, 0).reset())
    assert "has the fields guess, reason; say which one" in str(failure)
    session = begin(start(opened, server, args={"action": "guess"}))
    assert session.step(says("7")).result(PATIENCE).done


def test_tools_of_the_recipe_are_not_the_servers(server: Server, opened: list[Sessions]) -> None:
    sessions = start(opened, server, {"times": "tests.environments.samples:multiply"})
    assert [s["function"]["name"] for s in sessions.schemas()] == ["times"]
    session = begin(sessions)
    assert texts(session.step(says("", ("times", {"a": 2, "b": 3}))).result(PATIENCE)) == ["6"]


def test_tools_of_the_server(server: Server, opened: list[Sessions]) -> None:
    tools = {"times": "tests.environments.samples:multiply"}
    sessions = start(opened, server, tools, args={"tools": True})
    names = [s["function"]["name"] for s in sessions.schemas()]
    assert names == ["add", "times"]
    session = begin(sessions)
    turn = says(
        "", ("add", {"a": "1", "b": 2}), ("times", {"a": 2, "b": 3}), ("add", {"a": 3, "b": 3}),
        ("add", {"a": -1, "b": 0}), ("add", {"a": 1}),
    )  # fmt: skip
    answer = session.step(turn).result(PATIENCE)
    assert texts(answer)[:4] == ["3", "6", "6", '{"error": "too small"}']
    assert "missing argument 'b'" in texts(answer)[4]
    assert (answer.reward, answer.done) == (1.0, False)
    assert session.step(says("", ("add", {"a": 7, "b": 0}))).result(PATIENCE).done
    assert session.step(says("It is 7.")).result(PATIENCE).done


@pytest.mark.parametrize(
    ("said", "stop_reason", "reason"),
    [
        ("vanish", "env_error", "ConnectionClosed"),
        ("sleep", "env_timeout", "step took more than 1 s"),
        ("garbage", "env_error", "sent what is no answer: no JSON"),
        ("odd", "env_error", "sent what is no answer"),
        ("EXECUTION_ERROR", "env_error", "EXECUTION_ERROR: on purpose"),
        ("nan", "env_error", "its reward is nan, not a finite number"),
    ],
)
def test_faults(
    server: Server, opened: list[Sessions], said: str, stop_reason: str, reason: str
) -> None:
    sessions = start(opened, server, seconds=1.0)
    bad, good = begin(sessions), begin(sessions)
    failure = failed(bad.step(says(said)))
    assert failure.stop_reason == stop_reason
    assert failure.own
    assert reason in str(failure)
    assert good.step(says("7")).result(PATIENCE).done


def test_an_action_that_does_not_fit_is_the_models_fault(
    server: Server, opened: list[Sessions]
) -> None:
    session = begin(start(opened, server))
    answer = session.step(says("VALIDATION_ERROR")).result(PATIENCE)
    assert texts(answer) == ['{"error": "on purpose"}']
    assert session.step(says("7")).result(PATIENCE).done


def test_a_server_that_ends_in_the_middle(server: Server, opened: list[Sessions]) -> None:
    sessions = start(opened, server, seconds=5.0)
    session = begin(sessions)
    server.close()
    assert "ConnectionClosed" in str(failed(session.step(says("5"))))
    failure = failed(sessions.open("", {}, 0).reset())
    assert "Connect call failed" in str(failure)
    with pytest.raises(UserError, match=r"the environment ws://127.* cannot be used: "):
        sessions.try_out("", {})


def test_a_full_server_is_waited_for(server: Server, opened: list[Sessions]) -> None:
    server.capacity = 1
    sessions = start(opened, server)
    first = begin(sessions)
    second = sessions.open("", {}, 0)
    reset = second.reset()
    assert first.step(says("5")).result(PATIENCE).reward == 0.0
    assert not reset.done()
    first.finish().result(PATIENCE)
    assert texts(reset.result(PATIENCE)) == ["Guess."]
    assert second.step(says("7")).result(PATIENCE).done


def test_a_server_that_stays_full(server: Server, opened: list[Sessions]) -> None:
    server.capacity = 0
    failure = failed(start(opened, server, seconds=1.0).open("", {}, 0).reset())
    assert failure.stop_reason == "env_error"
    assert "had no free session for 1 s (CAPACITY_REACHED: 1 of 1 sessions)" in str(failure)


def test_an_abandoned_session_is_free_again(server: Server, opened: list[Sessions]) -> None:
    server.capacity = 1
    sessions = start(opened, server)
    session = begin(sessions)
    step = session.step(says("sleep"))
    session.abandon()
    assert failed(step)
    begin(sessions)


def test_bad_settings(opened: list[Sessions], monkeypatch: pytest.MonkeyPatch) -> None:
    for args, reason in (
        ({"openenv": "localhost:8000"}, "localhost:8000 is no address; give it as ws://host:port."),
        (
            {"openenv": "ws://localhost", "args": {"actoin": "x"}},
            "environment.args.actoin: environment.openenv has no such argument; it has action, "
            "columns, observation, tools. Did you mean action?",
        ),
    ):
        opened.append(Sessions(EnvironmentSettings(isolate=False, **args)))
        with pytest.raises(UserError) as error:
            opened[-1].schemas()
        assert reason in str(error.value)
    monkeypatch.setitem(sys.modules, "websockets", None)
    with pytest.raises(UserError, match=r"pip install 'grpo-cli\[openenv\]'"):
        OpenEnv("ws://localhost", Functions({}), {})


def test_an_episode_that_is_over_at_its_beginning_is_a_failure(
    opened: list[Sessions], server: Server
) -> None:
    session = start(opened, server).open("", {}, 404)
    assert "returned done=True, and the model has taken no turn" in str(failed(session.reset()))
