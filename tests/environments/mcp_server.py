"""A small MCP server on standard input and output, for tests: `python mcp_server.py`.

Its tools: add, count (how often this process was called), and fault, which does what it is told.
"""

import json
import os
import sys
import time
from typing import Any

NUMBER = {"type": "integer"}
TOOLS = [
    {
        "name": "add",
        "description": "Adds.",
        "inputSchema": {
            "type": "object",
            "properties": {"a": NUMBER, "b": NUMBER},
            "required": ["a", "b"],
        },
    },
    {"name": "count", "inputSchema": {"type": "object", "properties": {}}},
    {
        "name": "fault",
        "inputSchema": {"type": "object", "properties": {"what": {"type": "string"}}},
    },
]
COUNT = 0


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": said}], **more}


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    global COUNT
    if name == "add":
        return text(str(arguments["a"] + arguments["b"]))
    if name == "count":
        COUNT += 1
        return text(f"{os.getpid()} {COUNT}")
    what = arguments["what"]
    if what == "end":
        sys.exit(3)
    if what == "sleep":
        time.sleep(3600)
    if what == "error":
        return text("on purpose", isError=True)
    if what == "image":
        image = {"type": "image", "data": "", "mimeType": "image/png"}
        return {"content": [image, {"type": "text", "text": "seen"}]}
    if what == "structured":
        return {"content": [], "structuredContent": {"n": 1}}
    raise ValueError(what)


def ask(message: dict[str, Any]) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message or "method" not in message:
            continue
        method, params = message["method"], message.get("params", {})
        if method == "initialize":
            result: dict[str, Any] = {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "test", "version": "1"},
            }
        elif method == "tools/list":  # two pages
            result = {"tools": TOOLS[2:]} if params else {"tools": TOOLS[:2], "nextCursor": "2"}
        elif method == "tools/call" and params["name"] in ("add", "count", "fault"):
            result = call(params["name"], params["arguments"])
        else:
            ask({"id": message["id"], "error": {"code": -32601, "message": f"no {method}"}})
            continue
        ask({"id": message["id"], "result": result})


if __name__ == "__main__":
    main()
