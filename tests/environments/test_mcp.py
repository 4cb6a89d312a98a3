"""MCP servers: a process that speaks JSON-RPC, and one behind HTTP."""

import json
import shlex
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from grpo_cli.environments.protocol import Observation
from grpo_cli.environments.sessions import EnvironmentSession
from grpo_cli.errors import UserError
from tests.environments.conftest import PATIENCE, Open, begin, failed
from tests.environments.messages import calls, texts
from tests.programs import ROOT, gone

pytest.importorskip("mcp")
pytestmark = pytest.mark.programs

SERVER = shlex.join([sys.executable, str(ROOT / "tests/environments/mcp_server.py")])


def step(session: EnvironmentSession, *made: tuple[str, Any]) -> list[str]:
    return texts(session.step(calls(*made)).result(PATIENCE))


def test_the_tools_of_a_server_and_of_the_recipe(start: Open) -> None:
    sessions = start(mcp=SERVER, tools={"times": "multiply"})
    schemas = [s["function"] for s in sessions.schemas()]
    assert [s["name"] for s in schemas] == ["add", "count", "fault", "times"]
    assert schemas[0]["description"] == "Adds."
    session = begin(sessions)
    assert step(session, ("add", {"a": "2", "b": 3}), ("times", {"a": 2, "b": 3})) == ["5", "6"]
    assert "missing argument 'b'" in step(session, ("add", {"a": 2}))[0]
    assert session.step({"role": "assistant", "content": "5"}).result(PATIENCE).done
    assert session.finish().result(PATIENCE) == Observation()


@pytest.mark.parametrize(
    ("what", "text"),
    [("error", '{"error": "on purpose"}'), ("image", "[image]\nseen"), ("structured", '{"n": 1}')],
)
def test_results(start: Open, what: str, text: str) -> None:
    assert step(begin(start(mcp=SERVER)), ("fault", {"what": what})) == [text]


def test_the_rollouts_of_a_worker_share_a_server_or_have_their_own(start: Open) -> None:
    def counts(**more: Any) -> list[list[str]]:
        sessions = start(mcp=SERVER, **more)
        return [step(begin(sessions), ("count", {}))[0].split() for _ in range(2)]

    (first, one), (second, two) = counts()
    assert (first == second, one, two) == (True, "1", "2")
    (first, one), (second, two) = counts(args={"per_rollout": True})
    assert (first == second, one, two) == (False, "1", "1")


def test_a_server_that_ends_is_started_again_for_the_next_episode(start: Open) -> None:
    sessions = start(mcp=SERVER)
    session, other = begin(sessions), begin(sessions)
    failure = failed(session.step(calls(("fault", {"what": "end"}))))
    assert failure.own
    assert str(failure).endswith("mcp_server.py: Connection closed")
    assert failed(other.step(calls(("add", {"a": 1, "b": 1}))))
    assert step(begin(sessions), ("add", {"a": 1, "b": 1})) == ["2"]


def test_a_call_that_never_returns(start: Open) -> None:
    sessions = start(mcp=SERVER, seconds=1.0, args={"per_rollout": True})
    session = begin(sessions)
    server = int(step(session, ("count", {}))[0].split()[0])
    observation = session.step(calls(("fault", {"what": "sleep"}))).result(PATIENCE)
    assert texts(observation) == ['{"error": "took more than 1 s and was stopped"}']
    assert observation.calls[0].timed_out
    sessions.close()
    assert gone(server)


@pytest.mark.parametrize(
    ("server", "says"),
    [
        ("/nowhere/server", "environment.mcp: /nowhere/server cannot be started"),
        ("false", "the MCP server false: "),
        ("sleep 3600", "took more than 1 s"),
        ("http://127.0.0.1:9", "the MCP server http://127.0.0.1:9: ConnectError"),
    ],
)
def test_what_is_no_server(start: Open, server: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        start(mcp=server, seconds=1.0).schemas()
    assert says in str(error.value)


class Handler(BaseHTTPRequestHandler):
    """Answers with JSON, and calls of tools with an event stream."""

    seen: list[str | None]

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).seen.append(self.headers.get("Mcp-Session-Id"))
        if "id" not in message:
            self.answer(202, "text/plain", "")
            return
        results: dict[str, Any] = {
            "initialize": {
                "protocolVersion": "2025-03-26",
                "capabilities": {},
                "serverInfo": {"name": "test", "version": "1"},
            },
            "tools/list": {"tools": [{"name": "add", "inputSchema": {"type": "object"}}]},
            "tools/call": {"content": [{"type": "text", "text": "5"}]},
        }
        if message["method"] not in results:
            self.answer(404, "text/plain", "")
            return
        reply = {"jsonrpc": "2.0", "id": message["id"], "result": results[message["method"]]}
        if message["method"] != "tools/call":
            self.answer(200, "application/json", json.dumps(reply))
        elif message["params"]["arguments"]:
            self.answer(500, "text/plain", "broken")
        else:
            progress = {"progressToken": 1, "progress": 1}
            said = {"jsonrpc": "2.0", "method": "notifications/progress", "params": progress}
            events = [said, reply]
            body = "".join(f"event: message\ndata: {json.dumps(e)}\n\n" for e in events)
            self.answer(200, "text/event-stream", body)

    def answer(self, status: int, kind: str, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Mcp-Session-Id", "s1")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None: ...


def test_a_server_behind_http(start: Open) -> None:
    Handler.seen = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        sessions = start(mcp=f"http://127.0.0.1:{server.server_port}/mcp")
        session = begin(sessions)
        assert step(session, ("add", {})) == ["5"]
        assert Handler.seen[-2:] == ["s1", "s1"]
        failure = failed(session.step(calls(("add", {"a": 1}))))
        assert "Server returned an error response" in str(failure)
        assert step(begin(sessions), ("add", {})) == ["5"], "a new connection"
    finally:
        server.shutdown()
        server.server_close()
