"""The key of a vLLM server: `grpo serve` makes it, and trainers send it with every request.

Some of vLLM's routes change weights and run code, and its own `--api-key` protects only some of
them. `KeyMiddleware` runs inside the server, before any route and before a body is read.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import tempfile
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_cli.config.cache import cache_dir
from grpo_cli.errors import UserError

KEY = "GRPO_SERVER_KEY"  # environment variable with the key

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def headers(key: str) -> dict[str, str]:
    """Returns the headers that carry the key; {} without a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def source() -> str:
    """Returns the source of the key, for messages: the variable's name, or the path of a file."""
    return f"${KEY}" if KEY in os.environ else str(cache_dir() / "serve" / "key")


def read_key() -> str:
    """Returns the key from $GRPO_SERVER_KEY, or from grpo's cache folder.

    Raises:
        FileNotFoundError: the file does not exist. UserError: other users may read the file, or
            it contains no key.
    """
    where = source()
    if where == f"${KEY}":
        key = os.environ[KEY].strip()
    else:
        try:
            with open(where, encoding="utf-8") as file:
                mode, key = os.fstat(file.fileno()).st_mode & 0o777, file.read(1000).strip()
        except FileNotFoundError:
            raise
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{where}: the key of a server cannot be read: {error}.") from error
        if mode & 0o077:
            raise UserError(
                f"{where}: has mode {mode:o}, so others may read the server's key; chmod 600 it, "
                "or delete it to have a new key made."
            )
    if not re.fullmatch(r"[!-~]{16,}", key):
        raise UserError(f"{where}: the key of a server has at least 16 characters and no spaces.")
    return key


def make_key() -> str:
    """Returns the key as `read_key`; makes the file, with mode 600, if it does not exist.

    Raises:
        UserError: as `read_key`, or the file cannot be written.
    """
    with suppress(FileNotFoundError):
        return read_key()
    path = Path(source())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mode 600
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        try:
            with suppress(FileExistsError):  # another server was faster: use its key
                os.link(part, path)
        finally:
            os.unlink(part)
    except OSError as error:
        raise UserError(f"{path}: the server's key cannot be written: {error.strerror}.") from error
    return read_key()


class KeyMiddleware:
    """Refuses every request that lacks the key, before a route runs or a body is read.

    vLLM creates it in the server's process (`--middleware`). `/health` needs the key as well.
    Anyone with the key can change the weights and run code: there is no further protection.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        self.expected = headers(os.environ[KEY])["Authorization"].encode()  # KeyError without one

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, self.expected):
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        why = "the key of the server is missing or is another one (grpo: docs/security.md)"
        body = json.dumps({"error": {"message": why}}).encode()
        kind = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 401, "headers": kind})
        await send({"type": "http.response.body", "body": body})
