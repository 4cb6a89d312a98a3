"""A server on this machine that speaks the part of the hub's API that pushes use.

It keeps model repositories in memory, and can refuse or be slow.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_the_tests"
LARGE = 1000  # bytes from which a file is uploaded as an LFS object, besides *.safetensors

COMMIT = "0" * 40


class FakeHub:
    """The repositories, and what the server is to do wrong."""

    def __init__(self) -> None:
        self.private: dict[str, bool] = {}  # by repository
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: list[tuple[str, str]] = []  # repository, message
        self.objects: dict[str, bytes] = {}  # LFS, by sha256
        self.may_write = True
        self.is_broken: Callable[[str], bool] = lambda path: False  # answers with 500
        self.slow = 0.0  # seconds that an upload of an object takes
        self.uploading = threading.Event()  # an object is on its way
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    @contextlib.contextmanager
    def running(self) -> Iterator[FakeHub]:
        thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.server.shutdown()
            self.server.server_close()

    def environment(self) -> dict[str, str]:
        """That of a program which pushes here."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",  # which has a server of its own
            "HF_TOKEN": TOKEN,
        }

    def handler(hub) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def answer(self, status: int, content: Any = None, **headers: str) -> None:
                data = content if isinstance(content, bytes) else json.dumps(content or {}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            def body(self) -> bytes:
                if self.headers.get("Transfer-Encoding") == "chunked":
                    data = b""
                    while size := int(self.rfile.readline(), 16):
                        data += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                    return data
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))

            def serve(self) -> None:
                path = self.path.partition("?")[0]
                if path.startswith("/lfs/"):
                    self.upload(path.removeprefix("/lfs/"))
                    return
                data = self.body()
                if hub.is_broken(path):
                    self.answer(500, {"error": "broken for the test"})
                elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    self.answer(401, {"error": "Invalid credentials"}, X_Error_Message="Invalid")
                else:
                    self.route(path, data)

            do_GET = do_HEAD = do_POST = do_PUT = serve  # noqa: N815

            def upload(self, oid: str) -> None:
                hub.uploading.set()
                data = self.body()
                time.sleep(hub.slow)
                if hashlib.sha256(data).hexdigest() != oid:  # the program was ended
                    self.close_connection = True
                    return
                hub.objects[oid] = data
                self.answer(200)

            def route(self, path: str, data: bytes) -> None:
                if path == "/api/repos/create":
                    self.create(json.loads(data))
                elif path == "/api/validate-yaml":  # the metadata of a README.md
                    self.answer(200, {"warnings": [], "errors": []})
                elif path.endswith(".git/info/lfs/objects/batch"):
                    self.batch(json.loads(data)["objects"])
                elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/?([^/]*).*", path):
                    if match[1] not in hub.private:
                        self.answer(404, {"error": "no repo"}, X_Error_Code="RepoNotFound")
                    else:
                        self.api(match[1], match[2], data)
                else:
                    self.answer(404)

            def create(self, asked: dict[str, Any]) -> None:
                name = f"{asked.get('organization') or 'me'}/{asked['name']}"
                if name in hub.private:
                    self.answer(409, {"url": f"{hub.url}/{name}"})
                elif not hub.may_write:
                    self.forbidden()
                else:
                    hub.private[name] = asked.get("visibility") == "private"
                    hub.files[name] = {".gitattributes": b""}
                    self.answer(200, {"url": f"{hub.url}/{name}"})

            def forbidden(self) -> None:
                said = "You don't have the rights to write there"
                self.answer(403, {"error": said}, X_Error_Message=said)

            def batch(self, objects: list[dict[str, Any]]) -> None:
                found = []
                for asked in objects:
                    known = asked["oid"] in hub.objects
                    upload = {"upload": {"href": f"{hub.url}/lfs/{asked['oid']}"}}
                    found.append(asked | ({} if known else {"actions": upload}))
                self.answer(200, {"transfer": "basic", "objects": found})

            def api(self, repo: str, what: str, data: bytes) -> None:
                files = hub.files[repo]
                if what == "auth-check":
                    self.answer(200) if hub.may_write else self.forbidden()
                elif what == "preupload":
                    modes = [
                        {
                            "path": file["path"],
                            "uploadMode": "lfs" if is_large(file) else "regular",
                            "shouldIgnore": False,
                            "oid": git_hash(files.get(file["path"])),
                        }
                        for file in json.loads(data)["files"]
                    ]
                    self.answer(200, {"files": modes})
                elif what == "commit" and hub.may_write:
                    self.commit(repo, [json.loads(x) for x in data.splitlines()])
                elif what == "commit":
                    self.forbidden()
                elif what == "tree":
                    tree = [
                        {"type": "file", "path": p, "size": len(d), "oid": git_hash(d)}
                        for p, d in files.items()
                    ]
                    self.answer(200, json.dumps(tree).encode())
                else:  # information on the repository
                    siblings = [{"rfilename": p} for p in files]
                    found = {"id": repo, "sha": COMMIT, "siblings": siblings}
                    self.answer(200, found | {"private": hub.private[repo], "tags": []})

            def commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
                files = dict(hub.files[repo])
                for line in lines:
                    value = line["value"]
                    if line["key"] == "file":
                        files[value["path"]] = base64.b64decode(value["content"])
                    elif line["key"] == "lfsFile":
                        files[value["path"]] = hub.objects[value["oid"]]
                    elif line["key"] == "deletedFile":
                        del files[value["path"]]
                hub.files[repo] = files
                hub.commits.append((repo, lines[0]["value"]["summary"]))
                url = f"{hub.url}/{repo}/commit/{COMMIT}"
                self.answer(200, {"commitOid": COMMIT, "commitUrl": url, "success": True})

        return Handler


def is_large(file: dict[str, Any]) -> bool:
    return file["size"] > LARGE or file["path"].endswith(".safetensors")


def git_hash(data: bytes | None) -> str | None:
    """The hash by which git knows a file's contents."""
    if data is None:
        return None
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
