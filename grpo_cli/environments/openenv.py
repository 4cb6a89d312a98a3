"""Environments on an OpenEnv server: one WebSocket connection is one session of the server.

    -> {"type": "reset", "data": {"seed": 7}}
    <- {"type": "observation", "data": {"observation": {...}, "reward": null, "done": false}}
    -> {"type": "step", "data": {"guess": "12"}}
    <- {"type": "observation", "data": {"observation": {...}, "reward": 1.0, "done": true}}
    <- {"type": "error", "data": {"message": "...", "code": "EXECUTION_ERROR"}}

Needs `websockets` (extra `openenv`), and nothing of OpenEnv itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from grpo_cli.environments.adapters import (
    Broken,
    Served,
    as_done,
    as_reward,
    check_not_done,
    with_tools,
)
from grpo_cli.environments.deadlines import described
from grpo_cli.environments.functions import (
    Failed,
    Functions,
    Tool,
    ToolError,
    as_text,
    failure,
    served_tool,
)
from grpo_cli.environments.protocol import Message, Observation
from grpo_cli.errors import UserError, listed

CONNECT_SECONDS = 5.0  # for a server that refuses connections, such as one that is starting
OPEN_SECONDS = 10.0  # for one handshake
PING_SECONDS = 20.0  # between pings, and for an answer to one
CLOSE_SECONDS = 1.0
MAX_BYTES = 100 * 2**20  # of one frame
FULL = "CAPACITY_REACHED"
FIRST_WAIT, LONGEST_WAIT = 0.05, 2.0  # seconds between two attempts
SHARE_OF_DEADLINE = 0.9  # of a reset, in which a free session is waited for
TEXT = "{text}"  # stands for the text of the model's turn


class OpenEnv(Served):
    """A session of an OpenEnv server.

    Args:
        address: ws://host:port, or http://.
        functions: the recipe's tools.
        shared: what the rollouts of a worker know of the server.
        action: the action that a turn of the model is: the name of a field for its text, or the
            fields, with "{text}" in them. None: the only text field that the server's schema has.
        observation: the text of an observation, with names of its fields in braces. None: its only
            text field, or all of it as JSON.
        columns: columns of the row that `reset` is given.
        tools: whether the model calls the server's tools (an MCP environment of OpenEnv).
    """

    def __init__(
        self,
        address: str,
        functions: Functions,
        shared: dict[str, Any],
        *,
        action: str | Mapping[str, Any] | None = None,
        observation: str | None = None,
        columns: Sequence[str] = (),
        tools: bool = False,
    ) -> None:
        try:
            import websockets  # noqa: F401
        except ImportError as error:
            raise UserError(
                "environment.openenv needs the package websockets; install it with "
                "pip install 'grpo-cli[openenv]'."
            ) from error
        if not address.startswith(("ws://", "wss://", "http://", "https://")):
            raise UserError(
                f"environment.openenv: {address} is no address; give it as ws://host:port."
            )
        super().__init__(functions, "environment.openenv")
        self.address = address
        self.action = None if action == TEXT else action
        self.observation, self.columns, self.has_tools = observation, columns, tools
        self._shared = shared
        self._socket: Any = None
        self._is_out_of_step = False  # an answer may still come for a request that was given up
        self._reward: float | None = None  # of the calls of a turn
        self._is_done = False

    @property
    def url(self) -> str:
        """The address of the WebSocket."""
        url = re.sub("^http", "ws", self.address.rstrip("/"))
        return url if url.endswith("/ws") else f"{url}/ws"

    async def open(self) -> None:
        """Connects, and asks for the tools if there are some."""
        if self.has_tools:
            await self._until_free({"type": "step", "data": {"type": "list_tools"}})

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Begins an episode; waits for a free session of the server."""
        given = {"seed": seed, **{c: row[c] for c in self.columns if c in row}}
        if self.has_tools:
            await self.open()
        data = await self._until_free({"type": "reset", "data": given})
        if self.action is None and not self.has_tools:
            if "action" not in self._shared:
                self._shared["action"] = await self._only_text_field()
            self.action = self._shared["action"]
        first = self._observed(data)
        check_not_done(first)
        return replace(first, reward=None, tools=self.schemas)

    async def step(self, message: Message) -> Observation:
        """Takes a turn of the model."""
        if not self.has_tools:
            return await with_tools(self.functions, message, self._step)
        self._reward, self._is_done = None, False
        answered = await self.functions.step(message)
        return replace(answered, reward=self._reward, done=answered.done or self._is_done)

    async def close(self) -> None:
        """Ends the session of the server."""
        socket, self._socket = self._socket, None
        if socket is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(socket.send('{"type": "close"}'), CLOSE_SECONDS)
            with contextlib.suppress(Exception):
                await asyncio.wait_for(socket.close(), 2 * CLOSE_SECONDS)

    # The model's turn as an action, and the observation as a text

    async def _step(self, message: Message) -> Observation:
        text = message.get("content") or ""
        if isinstance(self.action, str):
            action: Any = {self.action: text}
        else:
            action = _filled(self.action, text)
        try:
            return self._observed(await self._request({"type": "step", "data": action}))
        except ToolError as refused:  # the model's action does not fit
            return Observation([{"role": "user", "content": failure(str(refused))}])

    async def _only_text_field(self) -> str:
        """Asks the server for the schema of its actions."""
        schema = await asyncio.to_thread(self._schema)
        fields = {k: v for k, v in schema.get("properties", {}).items() if k != "metadata"}
        texts = [str(k) for k, v in fields.items() if v.get("type") == "string"]
        required = [k for k in texts if k in schema.get("required", ())]
        for names in (required, texts):
            if len(names) == 1:
                return names[0]
        raise Broken(
            f"an action of the server has the fields {listed(fields)}; say which one holds the "
            "model's text, as environment.args.action=NAME or, with other fields, "
            'environment.args.action={NAME: "{text}"}'
        )

    def _schema(self) -> Mapping[str, Any]:
        url = re.sub("^ws", "http", self.url.removesuffix("/ws")) + "/schema"
        try:
            with urllib.request.urlopen(url, timeout=OPEN_SECONDS) as response:
                schema = json.load(response)["action"]
        except Exception as error:
            raise Broken(
                f"{url} does not say what an action is ({described(error)}); give the field for "
                "the model's text as environment.args.action=NAME"
            ) from error
        if not isinstance(schema, Mapping):
            raise Broken(f"{url} has no schema of an action")
        return schema

    def _observed(self, data: Mapping[str, Any]) -> Observation:
        shown = data["observation"]
        if self.observation is not None:
            text = re.sub(
                r"\{(\w+)\}",
                lambda m: as_text(shown[m[1]]) if m[1] in shown else m[0],
                self.observation,
            )
        else:
            own = {k: v for k, v in shown.items() if k not in ("reward", "done", "metadata")}
            texts = [v for v in own.values() if isinstance(v, str)]
            text = texts[0] if len(texts) == 1 else as_text(own) if own else ""
        return Observation(
            [{"role": "user", "content": as_text(text)}] if text else [],
            reward=as_reward(data.get("reward")),
            done=as_done(data.get("done", False)),
        )

    # Tools

    def _take_tools(self, tools: Any) -> None:
        own: dict[str, Tool] = {}
        try:
            for tool in tools:
                name, parameters = tool["name"], tool["input_schema"]
                own[name] = served_tool(
                    name, tool.get("description"), parameters, self._caller(name), in_order=True
                )
        except (TypeError, KeyError, AttributeError) as error:
            raise Broken(
                f"the server's list of tools cannot be read ({described(error)})"
            ) from error
        self.take_tools(own)

    def _caller(self, name: str) -> Any:
        async def call(**arguments: Any) -> Any:
            action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
            data = await self._request({"type": "step", "data": action})
            if (reward := as_reward(data.get("reward"))) is not None:
                self._reward = reward + (self._reward or 0.0)
            self._is_done = self._is_done or as_done(data.get("done", False))
            shown = data["observation"]
            if (error := shown.get("error")) is not None:
                raise ToolError(
                    str(error.get("message", error) if isinstance(error, dict) else error)
                )
            return _result(shown.get("result"))

        return call

    # The connection

    async def _until_free(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Sends the first request of a session, until the server has a session for it."""
        seconds = self.functions.deadlines.seconds
        begun, pause = time.monotonic(), FIRST_WAIT
        end = begun + SHARE_OF_DEADLINE * seconds if seconds is not None else float("inf")
        while True:
            try:
                data = await self._request(request)
            except _Refused as error:
                if time.monotonic() + pause > min(end, begun + CONNECT_SECONDS):
                    raise Failed("env_error", f"{self.url}: {error}") from error
            except _NoSession as error:
                if time.monotonic() + pause > end:
                    raise Failed(
                        "env_error",
                        f"{self.url} had no free session for {time.monotonic() - begun:.0f} s "
                        f"({FULL}: {error}); each rollout of a step needs one: raise the server's "
                        "max_concurrent_envs, or lower prompts_per_step",
                    ) from error
            else:
                return data
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_WAIT)

    async def _request(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Sends a request and returns the data of its answer.

        Raises:
            _Refused: there is no connection yet, and none could be made.
            _NoSession: the server has no session for this connection.
            ToolError: the action does not fit the server's schema.
            Failed: anything else.
        """
        from websockets.exceptions import ConnectionClosed, WebSocketException

        if self._is_out_of_step:
            raise Failed("env_error", f"{self.url}: an earlier call did not end in time")
        try:
            if self._socket is None:
                self._socket = await self._connect()
            self._is_out_of_step = True
            with contextlib.suppress(ConnectionClosed):  # it may have said why before it closed
                await self._socket.send(json.dumps(request))
            data = self._read(await self._socket.recv())
            self._is_out_of_step = False
        except (_NoSession, ToolError):
            self._is_out_of_step = False
            raise
        except (OSError, WebSocketException) as error:
            raise Failed("env_error", f"{self.url}: {described(error)}") from error
        if "tools" in data["observation"] and self.has_tools:
            self._take_tools(data["observation"]["tools"])
        return data

    async def _connect(self) -> Any:
        from websockets.asyncio.client import connect

        host = urllib.parse.urlsplit(self.url).hostname
        direct: dict[str, Any] = (
            {"proxy": None} if host in ("localhost", "127.0.0.1", "::1") else {}
        )
        try:
            return await connect(
                self.url,
                open_timeout=OPEN_SECONDS,
                ping_interval=PING_SECONDS,
                ping_timeout=PING_SECONDS,
                close_timeout=CLOSE_SECONDS,
                max_size=MAX_BYTES,
                **direct,
            )
        except OSError as error:
            raise _Refused(described(error)) from error

    def _read(self, frame: Any) -> Mapping[str, Any]:
        try:
            answer = json.loads(frame)
            kind, data = answer["type"], answer["data"]
            if kind == "error":
                code, text = data.get("code"), str(data.get("message"))
            else:
                assert kind == "observation"
                assert isinstance(data["observation"], dict)
        except (ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
            text = as_text(frame)[:200]
            raise Failed("env_error", f"{self.url} sent what is no answer: {text}") from error
        if kind != "error":
            return data  # type: ignore[no-any-return]
        if code == FULL:
            self._socket = None  # the server closes it
            raise _NoSession(text)
        if code == "VALIDATION_ERROR":
            raise ToolError(f"{text} {as_text(data.get('errors', ''))}".strip())
        raise Failed("env_error", f"{self.url}: {code}: {text}")


class _Refused(Exception):  # noqa: N818
    """No connection could be made."""


class _NoSession(Exception):  # noqa: N818
    """The server has as many sessions as it can have."""


def _filled(action: Any, text: str) -> Any:
    """Returns an action with the model's text in place of "{text}"."""
    if isinstance(action, Mapping):
        return {k: _filled(v, text) for k, v in action.items()}
    if isinstance(action, str):
        return action.replace(TEXT, text)
    return action


def _result(result: Any) -> Any:
    """Returns what a tool has returned, without MCP's wrapping."""
    if not isinstance(result, Mapping):
        return result
    if result.get("data") is not None and (len(result) == 1 or "content" in result):
        return result["data"]
    if isinstance(result.get("content"), list):
        texts = [b["text"] for b in result["content"] if isinstance(b.get("text"), str)]
        if len(texts) == len(result["content"]):
            return "\n".join(texts)
    return result
