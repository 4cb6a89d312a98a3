"""Headless Chromium, driven over its DevTools protocol: pages as a person sees them.

with Browser.start() as browser:
    page = browser.open(path, width=400)
    page.evaluate("document.title")
    page.click("#tab-curves")
    page.problems                       # errors of the console, requests to a network
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
    "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--remote-debugging-port=0",
)  # fmt: skip


def program() -> str:
    """Returns the path of Chromium; without it the test is skipped, and fails in CI."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        why = "Chromium is not installed (apt-get install chromium)"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    return found


class Page:
    """A page in a window of a size."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session
        self.problems: list[str] = []
        self.requests: list[str] = []

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.send(method, self.session, **parameters)

    def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression; of a promise, what it comes to."""
        found = self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = 20) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(f"Boolean({expression})")):
            assert time.monotonic() < end, f"{expression} is still {value!r}"
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """Scrolls to an element and clicks in its middle; fails if it is covered."""
        found = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "if (!e) return null; e.scrollIntoView({block: 'center', inline: 'center'});"
            "const r = e.getBoundingClientRect();"
            "const [x, y] = [r.x + r.width / 2, r.y + r.height / 2];"
            "const hit = document.elementFromPoint(x, y);"
            "return [x, y, e === hit || e.contains(hit)]; })()"
        )
        assert found is not None, f"there is no {selector}"
        x, y, is_free = found
        assert is_free, f"{selector} is covered"
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, clickCount=1, button="left")

    def type(self, selector: str, text: str, event: str = "input") -> None:
        """Replaces the text of a field."""
        self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.focus();"
            f"e.value = {json.dumps(text)}; e.dispatchEvent(new Event('{event}')); }})()"
        )

    def text(self, selector: str) -> str:
        found = self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return str(found)


class Browser:
    """A running Chromium."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.number = 0
        self.pages: dict[str, Page] = {}

    @classmethod
    @contextlib.contextmanager
    def start(cls) -> Iterator[Browser]:
        with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
            process = subprocess.Popen(
                [program(), *FLAGS, f"--user-data-dir={folder}", "about:blank"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "HOME": folder},
            )
            try:
                address = _address(Path(folder) / "DevToolsActivePort", process)
                with connect(address, max_size=None) as socket:
                    yield cls(socket)
            finally:
                process.terminate()
                process.wait(20)

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        self.socket.send(json.dumps(message))
        while True:
            answer = json.loads(self.socket.recv(timeout=60))
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                found: dict[str, Any] = answer["result"]
                return found
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        page = self.pages.get(event.get("sessionId", ""))
        if page is None:
            return
        method, given = event["method"], event["params"]
        if method == "Runtime.exceptionThrown":
            page.problems.append(f"exception: {given['exceptionDetails']}")
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning"):
            page.problems.append(f"console: {given['args']}")
        elif method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            page.problems.append(f"log: {given['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            page.requests.append(given["request"]["url"][:80])

    def open(self, path: Path, width: int = 1280) -> Page:
        """Opens a file in a window of a size, and waits until the report is drawn."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        page = Page(self, attached["sessionId"])
        self.pages[page.session] = page
        for domain in ("Runtime", "Log", "Network", "Page"):
            page.send(f"{domain}.enable")
        page.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        page.send("Page.navigate", url=path.resolve().as_uri())
        page.wait("document.documentElement?.dataset.opened")
        return page


def _address(path: Path, process: subprocess.Popen[bytes]) -> str:
    """Returns where the browser listens, which it writes into a file: the port, then the path."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        assert process.poll() is None, "Chromium has ended"
        with contextlib.suppress(FileNotFoundError, ValueError):
            port, place = path.read_text().split()
            return f"ws://127.0.0.1:{port}{place}"
        time.sleep(0.05)
    raise AssertionError("Chromium opened no port")
