"""The judge asks a real vLLM server, whose random model writes a score because it must."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from grpo_cli.rewards.judge import judge
from tests.programs import free_port
from tests.vllm_engines import save_model

pytestmark = pytest.mark.vllm

START_SECONDS = 300
CPU_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


@pytest.fixture(scope="module")
def address(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast
) -> Iterator[str]:
    """The base_url of a server with a tiny random Qwen2, called `judge`."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("judge")
    save_model(folder, tokenizer, tied=False, positions=4096)
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "judge", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "4096", "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", str(64 << 20)]
    environment = {**os.environ, **({} if torch.cuda.is_available() else CPU_SETTINGS)}
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_for(server, port, folder / "server.log")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # its own session: the engine's process with it
        server.wait()


def wait_for(server: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
        except OSError:
            said = f"\n{log.read_text('utf-8', 'replace')[-3000:]}"
            assert server.poll() is None, f"the server ended with {server.returncode}:{said}"
            assert time.monotonic() < deadline, f"the server was not up in time:{said}"
            time.sleep(0.5)
        else:
            return


def ask(address: str, completions: list[Any], **args: Any) -> list[float | None]:
    async def call() -> list[float | None]:
        found: list[float | None] = await judge(
            prompts=["What is 2+2?"] * len(completions),
            completions=completions,
            base_url=address,
            **{"model": "judge", **args},
        )
        return found

    return asyncio.run(call())


def test_a_judge_that_must_write_a_score(address: str) -> None:
    replies: list[list[str]] = []
    regex = {"structured_outputs": {"regex": "Score: [0-9]"}}
    forced: dict[str, Any] = {"extra_body": regex, "pattern": "Score: ([0-9])", "reask": 0}
    args: dict[str, Any] = {"answer": ["4", "4"], **forced}
    values = ask(
        address,
        ["It is 4.", "It is {5} 🙂."],
        log_extra=lambda _, column: replies.append(column),
        **args,
    )
    (written,) = replies
    assert values == [int(reply.removeprefix("Score: ")) / 10 for reply in written]
    chat = [[{"role": "assistant", "content": "It is 4."}]]
    assert ask(address, chat, answer=["4"], **forced) == values[:1]


def test_a_random_model_left_alone_gives_no_score(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_cli.rewards.judge._have_scored", set())
    with pytest.raises(RuntimeError, match="gave no score from 0 to 10, asked 2 times; its last"):
        ask(address, ["It is 4."], max_tokens=20)


def test_a_server_that_refuses(address: str) -> None:
    with pytest.raises(RuntimeError, match=r"answered 404: .*`?nobody`? does not exist"):
        ask(address, ["It is 4."], model="nobody")
    with pytest.raises(RuntimeError, match=r"answered 400: .*4096"):
        ask(address, ["x" * 5000])
