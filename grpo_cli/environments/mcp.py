"""The tools of an MCP server (Model Context Protocol), which the model may call.

The server is a command that speaks JSON-RPC on its standard input and output, or an address
(streamable HTTP). A client for tools needs four of the protocol's messages, and no package:

    -> {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {...}}
    -> {"jsonrpc": "2.0", "method": "notifications/initialized"}
    -> {"jsonrpc": "2.0", "id": 2, "method": "tools/list", "params": {}}
    -> {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": {"name": ..., "arguments": {}}}
    <- {"jsonrpc": "2.0", "id": 3, "result": {"content": [{"type": "text", "text": "6"}]}}
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shlex
from collections.abc import Mapping
from typing import Any, Protocol

from grpo_cli import __version__
from grpo_cli.environments.adapters import Broken, Served
from grpo_cli.environments.deadlines import described
from grpo_cli.environments.functions import (
    Failed,
    Functions,
    Tool,
    ToolError,
    as_text,
    clean_text,
    served_tool,
)
from grpo_cli.environments.protocol import Message, Observation
from grpo_cli.errors import UserError

PROTOCOL = "2025-06-18"  # the revision that the client offers; the server answers with its own
LINE_BYTES = 100 * 2**20  # of one message on a server's output
MAX_PAGES = 100  # of a list of tools
CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 1.0  # for a server to end after its input has
METHOD_NOT_FOUND = -32601


class McpTools(Served):
    """The tools of an MCP server, and those of the recipe.

    Args:
        server: a command, or an address that begins with http.
        functions: the recipe's tools.
        shared: the connections that the rollouts of a worker share, by server.
        per_rollout: whether each rollout has a connection (and a server process) of its own, for
            servers that keep a state.
        env: more environment variables of the command.
        headers: of HTTP requests, such as Authorization.
    """

    is_reusable = True

    def __init__(
        self,
        server: str,
        functions: Functions,
        shared: dict[str, Any],
        *,
        per_rollout: bool = False,
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(functions, "environment.mcp")
        self._shared = {} if per_rollout else shared
        self._is_own = per_rollout
        self.is_reusable = not per_rollout
        self._server, self._env, self._headers = server, dict(env or {}), dict(headers or {})

    async def open(self) -> None:
        """Connects and asks for the tools, unless another rollout has."""
        connection = await self._connected()
        own: dict[str, Tool] = {}
        for tool in connection.tools:
            name = tool["name"]
            own[name] = served_tool(
                name, tool.get("description"), tool.get("inputSchema") or {}, self._caller(name)
            )
        self.take_tools(own)

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Begins an episode."""
        await self.open()
        return Observation(tools=self.schemas)

    async def step(self, message: Message) -> Observation:
        """Answers the calls of a turn; a turn without a call ends the episode."""
        return await self.functions.step(message)

    async def close(self) -> None:
        """Ends a connection of this rollout's own."""
        if self._is_own and (connection := self._shared.pop(self._server, None)) is not None:
            await connection.close()

    async def _connected(self) -> _Connection:
        lock = self._shared.setdefault("lock", asyncio.Lock())
        async with lock:
            known: _Connection | None = self._shared.get(self._server)
            if known is None or known.error is not None:
                transport: _Transport
                if self._server.startswith(("http://", "https://")):
                    transport = _Http(self._server, self._headers, self.functions.deadlines.seconds)
                else:
                    transport = _Process(self._server, self._env)
                known = _Connection(transport)
                await known.open()
                self._shared[self._server] = known
            return known

    def _caller(self, name: str) -> Any:
        async def call(**arguments: Any) -> str:
            connection = self._shared.get(self._server)
            if connection is None:
                raise Failed("env_error", f"the MCP server {self._server} is not connected")
            result = await connection.request("tools/call", {"name": name, "arguments": arguments})
            text = _text(result)
            if result.get("isError"):
                raise ToolError(text)
            return text

        return call


def _text(result: Mapping[str, Any]) -> str:
    """Returns the text of a tool's result."""
    blocks = result.get("content") or ()
    if not blocks and result.get("structuredContent") is not None:
        return as_text(result["structuredContent"])
    texts = []
    for block in blocks:
        if isinstance(block, Mapping) and isinstance(block.get("text"), str):
            texts.append(block["text"])
        else:
            kind = block.get("type") if isinstance(block, Mapping) else None
            texts.append(f"[{kind or 'unreadable'}]")
    return "\n".join(texts)


class _Transport(Protocol):
    """Carries messages to a server and back."""

    name: str

    async def open(self) -> None: ...

    async def request(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Sends a request and returns its response; raises `Failed`."""

    async def notify(self, message: Mapping[str, Any]) -> None: ...

    async def close(self) -> None: ...


class _Connection:
    """A connection to a server, after its handshake."""

    def __init__(self, transport: _Transport) -> None:
        self.transport = transport
        self.error: Failed | None = None  # why it cannot be used any more
        self.tools: list[Mapping[str, Any]] = []
        self._numbers = itertools.count(1)

    async def open(self) -> None:
        """Connects, shakes hands and asks for the tools."""
        try:
            await self.transport.open()
            client = {"name": "grpo", "version": __version__}
            await self.request(
                "initialize",
                {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": client},
            )
            await self.transport.notify({"jsonrpc": "2.0", "method": "notifications/initialized"})
            await self._list_tools()
        except BaseException:
            await self.close()
            raise

    async def _list_tools(self) -> None:
        cursor = None
        for _ in range(MAX_PAGES):
            page = await self.request("tools/list", {} if cursor is None else {"cursor": cursor})
            found = page.get("tools")
            if not isinstance(found, list) or not all(
                isinstance(t, dict) and isinstance(t.get("name"), str) for t in found
            ):
                raise Broken(f"the MCP server {self.transport.name} lists no tools")
            self.tools += found
            cursor = page.get("nextCursor")
            if cursor is None:
                return

    async def request(self, method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the result of a request.

        Raises:
            ToolError: the server refuses the call of a tool.
            Failed: the server has gone, or answers with what is no answer.
        """
        if self.error is not None:
            raise self.error
        request = {"jsonrpc": "2.0", "id": next(self._numbers), "method": method, "params": params}
        try:
            response = await self.transport.request(request)
        except Failed as failed:
            self.error = failed
            raise
        if (error := response.get("error")) is not None:
            text = error.get("message") if isinstance(error, Mapping) else error
            if method == "tools/call":
                raise ToolError(clean_text(str(text), 2000))
            raise Failed("env_error", f"the MCP server {self.transport.name}: {method}: {text}")
        result = response.get("result")
        if not isinstance(result, Mapping):
            raise Failed("env_error", f"the MCP server {self.transport.name} gave no result")
        return result

    async def close(self) -> None:
        """Ends the connection."""
        self.error = self.error or Failed("env_error", "the connection was closed")
        with contextlib.suppress(Exception):
            await self.transport.close()


class _Process:
    """A server that is a process, with one JSON message on each line."""

    def __init__(self, command: str, env: Mapping[str, str]) -> None:
        self.name, self._env = command, env
        self._waiting: dict[Any, asyncio.Future[Mapping[str, Any]]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._listener: asyncio.Task[None] | None = None
        self._ended: str | None = None

    async def open(self) -> None:
        try:
            words = shlex.split(self.name)
            self._process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LINE_BYTES,
                env={**os.environ, **{k: str(v) for k, v in self._env.items()}},
            )
        except (OSError, ValueError) as error:
            raise UserError(
                f"environment.mcp: {self.name} cannot be started ({described(error)}); give a "
                "command that is on the PATH, or an address that begins with http."
            ) from error
        self._listener = asyncio.ensure_future(self._listen())

    async def request(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        future = asyncio.get_running_loop().create_future()
        self._waiting[message["id"]] = future
        try:
            await self._write(message)
            return await future  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            with contextlib.suppress(Failed):
                params = {"requestId": message["id"]}
                self._send({"method": "notifications/cancelled", "params": params})
            raise
        finally:
            self._waiting.pop(message["id"], None)

    async def notify(self, message: Mapping[str, Any]) -> None:
        await self._write(message)

    async def _write(self, message: Mapping[str, Any]) -> None:
        self._send(message)
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            await self._process.stdin.drain()
        except OSError:
            await asyncio.sleep(0.1)  # the listener learns how it ended
            raise self._failed() from None

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._ended is not None or self._process is None or self._process.stdin is None:
            raise self._failed()
        self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")

    def _failed(self) -> Failed:
        return Failed("env_error", f"the MCP server {self.name} {self._ended or 'has ended'}")

    async def _listen(self) -> None:
        """Gives each response to its request until the server ends."""
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                self._take(line)
            self._ended = f"has ended (exit code {await self._process.wait()})"
        except ValueError:
            self._ended = "has written a line that is too long"
        except Exception as error:
            self._ended = f"cannot be read ({described(error)})"
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._failed())

    def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            return  # a line that it has printed
        if not isinstance(message, dict):
            return
        if "method" in message:
            if "id" in message:  # a request of the server: it may ask whether the client lives
                known = message["method"] == "ping"
                error = {"code": METHOD_NOT_FOUND, "message": "not supported"}
                answer = {"result": {}} if known else {"error": error}
                with contextlib.suppress(Failed):
                    self._send({"id": message["id"], **answer})
            return
        future = self._waiting.get(message.get("id"))
        if future is not None and not future.done():
            future.set_result(message)

    async def close(self) -> None:
        process, listener = self._process, self._listener
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), CLOSE_SECONDS)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        if listener is not None:
            listener.cancel()


class _Http:
    """A server at an address: each message is a POST, answered with JSON or an event stream."""

    def __init__(self, url: str, headers: Mapping[str, str], seconds: float | None) -> None:
        self.name, self._headers, self._seconds = url, dict(headers), seconds
        self._client: Any = None
        self._version = PROTOCOL

    async def open(self) -> None:
        import httpx2

        limits = httpx2.Timeout(self._seconds, connect=CONNECT_SECONDS)
        self._client = httpx2.AsyncClient(timeout=limits, follow_redirects=True)
        self._headers |= {
            "Accept": "application/json, text/event-stream",
            "Content-Type": "application/json",
        }

    async def request(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        response = await self._post(message)
        if response is None:
            raise Failed("env_error", f"the MCP server {self.name} gave no answer")
        if message["method"] == "initialize":
            result = response.get("result")
            if isinstance(result, Mapping) and isinstance(result.get("protocolVersion"), str):
                self._headers["MCP-Protocol-Version"] = result["protocolVersion"]
        return response

    async def notify(self, message: Mapping[str, Any]) -> None:
        await self._post(message)

    async def _post(self, message: Mapping[str, Any]) -> Mapping[str, Any] | None:
        import httpx2

        try:
            async with self._client.stream(
                "POST", self.name, json=dict(message), headers=self._headers
            ) as response:
                if (session := response.headers.get("mcp-session-id")) is not None:
                    self._headers["Mcp-Session-Id"] = session
                if response.status_code >= 400:
                    text = (await response.aread()).decode("utf-8", "replace")[:200]
                    raise Failed(
                        "env_error", f"the MCP server {self.name}: {response.status_code} {text}"
                    )
                if "id" not in message:
                    return None
                if "text/event-stream" in response.headers.get("content-type", ""):
                    return await self._from_events(response, message["id"])
                return self._read((await response.aread()).decode("utf-8", "replace"))
        except httpx2.HTTPError as error:
            text = f"the MCP server {self.name}: {described(error)}"
            raise Failed("env_error", text) from error

    async def _from_events(self, response: Any, number: int) -> Mapping[str, Any] | None:
        data: list[str] = []
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                data.append(line[5:].removeprefix(" "))
            elif not line and data:
                message = self._read("\n".join(data))
                if message.get("id") == number and "method" not in message:
                    return message
                data = []
        return self._read("\n".join(data)) if data else None

    def _read(self, text: str) -> Mapping[str, Any]:
        try:
            message = json.loads(text)
            assert isinstance(message, dict)
        except (ValueError, AssertionError) as error:
            raise Failed(
                "env_error", f"the MCP server {self.name} sent what is no answer: {text[:200]}"
            ) from error
        return message

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
