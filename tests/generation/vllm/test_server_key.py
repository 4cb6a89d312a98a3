"""The key of a server, and the check of it in front of vLLM's routes."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_cli.errors import UserError
from grpo_cli.generation.vllm import ipc_wire, server_key

KEY = "the-key-of-this-test"
INIT = "/init_weight_transfer_engine"


# The file.


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The key's file in an empty cache folder."""
    monkeypatch.setenv("GRPO_CACHE", str(tmp_path))
    monkeypatch.delenv("GRPO_SERVER_KEY", raising=False)
    return tmp_path / "serve" / "key"


def test_the_key_is_made_once_and_only_for_its_owner(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        server_key.read_key()
    key = server_key.make_key()
    assert len(key) >= 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert [*path.parent.iterdir()] == [path]
    assert server_key.make_key() == server_key.read_key() == key
    assert server_key.source() == str(path)


def test_the_variable_comes_first(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server_key.make_key() != KEY
    monkeypatch.setenv("GRPO_SERVER_KEY", f" {KEY}\n")
    assert server_key.read_key() == server_key.make_key() == KEY
    assert server_key.source() == "$GRPO_SERVER_KEY"


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (KEY, 0o640, r"key: has mode 640, so others may read the server's key; chmod 600 it"),
        ("", 0o600, "has at least 16 characters and no spaces"),
        (f"{KEY} {KEY}", 0o600, "and no spaces"),
    ],
)
def test_unsafe_key_file(path: Path, content: str, mode: int, said: str) -> None:
    path.parent.mkdir()
    path.write_text(content)
    path.chmod(mode)
    for function in (server_key.read_key, server_key.make_key):
        with pytest.raises(UserError, match=said):
            function()


# The check in the server.


class Served:
    """An application behind the check: notes which requests and bodies reach it."""

    def __init__(self) -> None:
        self.reached: list[str] = []
        self.bodies: list[bytes] = []
        self.read = 0  # messages of a request
        self.middleware = server_key.KeyMiddleware(self.app)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(scope.get("path", scope["type"]))
        if scope["type"] == "http":
            body, more = b"", True
            while more:
                message = await receive()
                body, more = body + message["body"], message["more_body"]
            self.bodies.append(body)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})

    def ask(self, path: str, key: str | None, body: bytes = b"", **scope: Any) -> int:
        """Returns the status of the answer."""
        sent: list[Any] = []
        parts = [body[i : i + 7] for i in range(0, len(body), 7)] or [b""]  # as the wire splits it

        async def receive() -> Any:
            self.read += 1
            part = parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(parts)}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [] if key is None else [(b"authorization", key.encode())]
        known = {"type": "http", "path": path, "headers": headers, "client": ("10.0.0.7", 5)}
        asyncio.run(self.middleware({**known, **scope}, receive, send))
        if known["type"] != scope.get("type", "http"):
            assert [m["type"] for m in sent] in ([], ["websocket.close"])
            return len(sent)
        status: int = sent[0]["status"]
        if status != 200:
            assert list(json.loads(sent[1]["body"])["error"]) == ["message"]
            assert KEY.encode() not in sent[1]["body"]
        return status


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    monkeypatch.setenv("GRPO_SERVER_KEY", KEY)
    return Served()


ROUTES = ("/health", "/collective_rpc", INIT, "")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("key", [None, f"Bearer {KEY}x", f"Basic {KEY}", KEY])
def test_no_route_runs_without_the_key(served: Served, path: str, key: str | None) -> None:
    pickled = b'{"update_info": {"ipc_handles_pickled": "gASVHQ=="}}'
    assert served.ask(path, key, pickled) == 401
    assert (served.reached, served.read) == ([], 0)  # nothing was read, so nothing unpickled


def test_with_the_key_a_request_passes_unchanged(served: Served) -> None:
    path = "/collective_rpc"
    body = b'{"some": "body of more than one message"}'
    assert served.ask(path, f"Bearer {KEY}", body) == 200
    assert (served.reached, served.bodies) == ([path], [body])


def test_a_websocket_is_closed_without_the_key_and_the_start_passes(served: Served) -> None:
    assert served.ask("/v1/realtime", None, type="websocket") == 1
    assert served.reached == []
    assert served.ask("/v1/realtime", f"Bearer {KEY}", type="websocket") == 0
    asyncio.run(served.middleware({"type": "lifespan"}, _none, _none))
    assert served.reached == ["/v1/realtime", "lifespan"]


async def _none(*_: Any) -> Any:
    raise AssertionError("nothing is sent or received")


def test_a_server_does_not_start_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPO_SERVER_KEY", raising=False)
    with pytest.raises(KeyError):
        Served()
    monkeypatch.setenv("GRPO_SERVER_KEY", "")
    with pytest.raises(KeyError):
        Served()


# Handles of CUDA memory.


def test_handles_travel_as_json() -> None:
    """Arguments as torch's `reduce_tensor` returns them for a CUDA tensor."""
    rest = (0, b"\x00handle\xff", 4096, 512, False, b"counter", 3, b"event", True)
    size, stride = torch.Size([2, 3]), (3, 1)
    given = (torch.Tensor, size, stride, 7, torch.storage.TypedStorage, torch.bfloat16, *rest)
    sent = json.dumps(ipc_wire.to_json(given))
    assert ipc_wire.from_json(json.loads(sent), torch.bfloat16) == given
