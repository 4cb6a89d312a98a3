"""The tools of an MCP server (Model Context Protocol), which the model may call.

The server is a command that uses MCP on its standard input and output, or an address
(streamable HTTP). The client comes from the package `mcp` (extra `mcp`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shlex
from collections.abc import Mapping
from typing import Any

import httpx2

from grpo_cli.environments.adapters import Adapted
from grpo_cli.environments.functions import (
    EnvironmentFailure,
    Functions,
    Tool,
    ToolError,
    as_text,
    clean_text,
)
from grpo_cli.environments.protocol import Observation
from grpo_cli.errors import UserError
from grpo_cli.scoring.guards import described

try:
    import mcp
    from mcp.client.streamable_http import streamable_http_client
    from mcp.types import CONNECTION_CLOSED, INTERNAL_ERROR
except ImportError as error:
    raise UserError(
        "environment.mcp needs the package mcp; install it with pip install 'mcp>=2'."
    ) from error

HTTP = ("http://", "https://")
CONNECT_SECONDS = 10.0


class McpTools(Adapted):
    """The tools of an MCP server and of the recipe.

    Args:
        server: a command, or an address that begins with http.
        functions: the recipe's tools.
        shared: the connections that a worker's rollouts share, by server.
        per_rollout: whether each rollout has its own connection, for servers with a state.
        env: additional environment variables for the command.
        headers: headers of HTTP requests, such as Authorization.
    """

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
        super().__init__(None, functions)
        self._tools_of_recipe = functions
        self._shared = {} if per_rollout else shared
        self._is_own = per_rollout
        self.is_reusable = not per_rollout
        self._server, self._env, self._headers = server, dict(env or {}), dict(headers or {})

    async def open(self) -> None:
        """Connects and lists the tools, unless another rollout has done so."""
        async with self._shared.setdefault("lock", asyncio.Lock()):
            connection: _Connection | None = self._shared.get(self._server)
            if connection is None or connection.error is not None:
                connection = _Connection(self._server, self._env, self._headers)
                await connection.open()
                self._shared[self._server] = connection
        own: dict[str, Tool] = {}
        for tool in connection.tools:
            function = {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": dict(tool.input_schema),
            }
            schema = {"type": "function", "function": function}
            own[tool.name] = Tool(tool.name, functools.partial(self._call, tool.name), schema)
        self.functions = self._tools_of_recipe.joined(own, "environment.mcp")

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Begins an episode."""
        await self.open()
        return await super().reset(row, seed)

    async def close(self) -> None:
        """Closes the connection if it belongs to this rollout alone."""
        if self._is_own and (connection := self._shared.pop(self._server, None)) is not None:
            await connection.close()

    async def _call(self, name: str, /, **arguments: Any) -> str:
        connection: _Connection | None = self._shared.get(self._server)
        if connection is None:
            text = f"the MCP server {self._server} is not connected"
            raise EnvironmentFailure("env_error", text)
        return await connection.call(name, arguments)


class _Connection:
    """A connection to a server, opened and closed in the same task, as anyio requires."""

    def __init__(self, server: str, env: Mapping[str, str], headers: Mapping[str, str]) -> None:
        self._server, self._env, self._headers = server, env, headers
        self.error: EnvironmentFailure | None = None  # why the connection is no longer usable
        self.tools: list[mcp.Tool] = []
        self._client: mcp.Client | None = None
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._leaves = asyncio.Event()
        self._task = asyncio.create_task(self._hold())

    async def open(self) -> None:
        """Waits until the connection is open and the tools are listed.

        Raises:
            UserError: the server cannot be started.
            EnvironmentFailure: no MCP server answers.
        """
        try:
            await self._opened
        except BaseException:
            self._task.cancel()
            raise

    async def _hold(self) -> None:
        """Connects, lists the tools and keeps the connection open until `close`."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                client = await stack.enter_async_context(await self._new_client(stack))
                self._client = client
                page = await client.list_tools()
                self.tools += page.tools
                while page.next_cursor is not None:
                    page = await client.list_tools(cursor=page.next_cursor)
                    self.tools += page.tools
                self._opened.set_result(None)
                await self._leaves.wait()
        except Exception as error:
            if not self._opened.done():
                self._opened.set_exception(self._reason(error))

    async def _new_client(self, stack: contextlib.AsyncExitStack) -> mcp.Client:
        """Returns a client of the server, not yet connected."""
        if self._server.startswith(HTTP):
            limits = httpx2.Timeout(None, connect=CONNECT_SECONDS)  # calls have deadlines already
            http = httpx2.AsyncClient(headers=dict(self._headers), timeout=limits)
            await stack.enter_async_context(http)
            return mcp.Client(streamable_http_client(self._server, http_client=http))
        command, *args = shlex.split(self._server)
        env = {**os.environ, **{k: str(v) for k, v in self._env.items()}}
        return mcp.Client(mcp.StdioServerParameters(command=command, args=args, env=env))

    def _reason(self, error: Exception) -> UserError | EnvironmentFailure:
        """Returns the error for a connection that could not be opened."""
        while isinstance(error, ExceptionGroup):  # raised by the client's own tasks
            error = error.exceptions[0]
        if isinstance(error, (OSError, ValueError)) and not self._server.startswith(HTTP):
            return UserError(
                f"environment.mcp: {self._server} cannot be started ({described(error)}); give a "
                "command that is on the PATH, or an address that begins with http."
            )
        return self._failed(described(error))

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Calls a tool; returns the text of its result.

        Raises:
            ToolError: the server refuses the call.
            EnvironmentFailure: the connection is closed, or the server had an internal error.
        """
        if self.error is not None:
            raise self.error
        assert self._client is not None, "open comes first"
        try:
            result = await self._client.call_tool(name, arguments)
        except mcp.MCPError as error:
            if error.code not in (CONNECTION_CLOSED, INTERNAL_ERROR):
                raise ToolError(clean_text(str(error), 2000)) from error
            self.error = self._failed(str(error))
            self._leaves.set()
            raise self.error from error
        if not result.content and result.structured_content is not None:
            text = as_text(result.structured_content)
        else:
            text = "\n".join(b.text if b.type == "text" else f"[{b.type}]" for b in result.content)
        if result.is_error:
            raise ToolError(text)
        return text

    def _failed(self, text: str) -> EnvironmentFailure:
        return EnvironmentFailure("env_error", f"the MCP server {self._server}: {text}")

    async def close(self) -> None:
        """Closes the connection."""
        self.error = self.error or self._failed("the connection was closed")
        self._leaves.set()
        await asyncio.wait({self._task})
