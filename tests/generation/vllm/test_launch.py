"""Ports and logs of a vLLM server. tests/commands/test_serve.py starts and ends one."""

import socket
from pathlib import Path

import pytest

from grpo_cli.errors import UserError
from grpo_cli.generation.vllm import server_log
from grpo_cli.generation.vllm.launch import ServerSettings, check_port, prepare_log


def test_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(UserError, match=f"port = {port}: cannot be listened at: Addr"):
                check_port(host, port)
    check_port("127.0.0.1", port)
    with pytest.raises(UserError, match=r"host = 192\.0\.2\.1, .*: Cannot assign"):
        check_port("192.0.2.1", port)


def test_tail_of_this_machines_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(socket, "gethostname", lambda: "Node1.example.org")
    assert server_log.tail_of("http://127.0.0.1:81") is None
    log = prepare_log(ServerSettings(port=81))
    assert log == server_log.log_path(81) == tmp_path / "cache/serve/Node1.example.org-81.log"
    log.write_text("\n".join(f"line {i}\n" for i in range(10)))
    for host in ("127.0.0.1", "localhost", "0.0.0.0", "[::1]", "node1", "node1.example.org"):
        assert server_log.tail_of(f"http://{host}:81", 2) == "line 8\nline 9"
    assert server_log.tail_of("http://node2:81") is None
    assert server_log.tail_of("http://node1:82") is None
    own = prepare_log(ServerSettings(port=81, log=str(tmp_path / "logs" / "own.log")))
    own.write_text("of one's own")
    assert server_log.tail_of("http://node1:81") == "of one's own"
    assert prepare_log(ServerSettings(port=81)) == log
    assert (own.read_text(), log.read_text()) == ("of one's own", "")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"log = .*file/x: cannot be written: "):
        prepare_log(ServerSettings(port=81, log=str(tmp_path / "file" / "x")))
