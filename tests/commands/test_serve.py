"""`grpo serve`, with a small script in place of vLLM's server."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_cli import IMPORT_ROOT, cli
from grpo_cli.commands import serve
from grpo_cli.config import parsing
from grpo_cli.config.recipe import Recipe
from grpo_cli.errors import UserError
from grpo_cli.generation.vllm import launch, server_log
from grpo_cli.generation.vllm.launch import ServerPlan, ServerSettings
from tests.composed import composed as composed_with
from tests.programs import free_port, gone

# In place of vllm.entrypoints.openai.api_server. Does what $FAKE says, and notes how it was called.
FAKE = """
import http.server, json, os, signal, subprocess, sys, time

say = lambda text: print(text, flush=True)
ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
below = subprocess.Popen(
    [sys.executable, "-c", ignores + "print(flush=True); time.sleep(600)"], stdout=subprocess.PIPE
)
below.stdout.readline()  # now it ignores
pids = [os.getppid(), os.getpid(), below.pid]
with open(os.environ["NOTES"] + ".part", "w") as file:
    json.dump({"argv": sys.argv[1:], "environment": dict(os.environ), "pids": pids}, file)
os.rename(os.environ["NOTES"] + ".part", os.environ["NOTES"])
say("(EngineCore pid=7) INFO 11-21 22:10:20 [cpu_model_runner.py:68] Starting to load model m...")
if os.environ["FAKE"] == "is stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *args: (say("ends as it was asked to"), sys.exit()))


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        has_key = self.headers["Authorization"] == "Bearer " + os.environ["GRPO_SERVER_KEY"]
        healthy = self.path == "/health" and has_key
        self.send_response(200 if healthy else 404)
        self.end_headers()

    def log_message(self, *args):
        pass


word = dict(zip(sys.argv[1::2], sys.argv[2::2]))
http.server.HTTPServer((word["--host"], int(word["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model's."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("")
    return folder


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, Any]]:
    """Puts the script where vLLM's server would be; returns what reads its notes."""
    inside = tmp_path / "path" / "vllm" / "entrypoints" / "openai"
    inside.mkdir(parents=True)
    for folder in (inside, inside.parent, inside.parent.parent):
        (folder / "__init__.py").write_text("")
    (inside / "api_server.py").write_text(FAKE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    monkeypatch.setenv("NOTES", str(tmp_path / "notes.json"))
    monkeypatch.setenv("GRPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FAKE", "serves")
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    monkeypatch.setattr(serve, "count_gpus", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["grpo"])
    return lambda: json.loads((tmp_path / "notes.json").read_text())


@pytest.fixture
def port() -> int:
    return free_port()


def once_ready(monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> list[str]:
    """Has `act` called when the server is said to be ready; the lines that are said."""
    lines: list[str] = []

    def say(text: str) -> None:
        lines.append(text)
        if text.startswith("ready"):
            act()

    monkeypatch.setattr(serve, "say", say)
    return lines


def stop(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def composed(recipe: str, *words: str) -> Recipe:
    return composed_with(f"recipe={recipe}", *words, parse=parsing.parse)


def test_words_and_the_words_of_a_recipe() -> None:
    words = ["recipe=gsm8k_qwen", "port=81", "log=a: 1", "log.report=false", "~generation.stop"]
    words += ["model.dtype=bfloat16", "dtype=float16", "eager=no", "engine_args.max-num-seqs=512"]
    words += ["engine_args.hf_overrides.rope_theta=1e4"]
    settings, rest = serve.split_words(words)
    assert rest == [
        "recipe=gsm8k_qwen",
        "log.report=false",
        "~generation.stop",
        "model.dtype=bfloat16",
    ]
    assert settings == ServerSettings(
        port=81,
        log="a: 1",
        dtype="float16",
        eager=False,
        engine_args={"max_num_seqs": 512, "hf_overrides": {"rope_theta": 1e4}},
    )


def planned(gpus: int = 0, recipe: Recipe | None = None, **words: Any) -> ServerPlan:
    return serve.make_plan(ServerSettings(**words), recipe, gpus)


def test_command_line_on_gpus(model: Path) -> None:
    settings: dict[str, Any] = {"tensor_parallel": 2, "data_parallel": 2, "max_model_len": 99}
    arguments = {"b_c": False, "d": {"e": [1]}, "f": [1, "g"], "h": None}
    plan = planned(4, model=str(model), **settings, engine_args=arguments)
    words = plan.command()
    assert words[8:] == [
        *["--port", "8000", "--dtype", "auto"],
        *["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"],
        *["--enable-scale-out"],
        *["--worker-extension-cls", "grpo_cli.generation.vllm.worker.WorkerExtension"],
        *["--middleware", "grpo_cli.generation.vllm.server_key.KeyMiddleware"],
        *["--weight-transfer-config", '{"backend": "nccl"}', "--disable-uvicorn-access-log"],
        *["--max-model-len", "99", "--tensor-parallel-size", "2", "--data-parallel-size", "2"],
        *["--gpu-memory-utilization", "0.9"],
        *["--no-b-c", "--d", '{"e": [1]}', "--f", '[1, "g"]'],
    ]
    plan = planned(4, model=str(model), eager=True, memory=0.5, dtype="float16")
    assert plan.command()[-3:] == ["--gpu-memory-utilization", "0.5", "--enforce-eager"]
    assert plan.dtype == "float16"


def test_an_adapter_that_the_server_applies(model: Path) -> None:
    assert "--enable-lora" not in planned(model=str(model)).command()
    plan = planned(model=str(model), max_lora_rank=9)
    assert plan.command()[-5:] == ["--enable-lora", "--max-loras", "1", "--max-lora-rank", "16"]
    assert plan.environment({})["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    words = ["arithmetic_tiny", "adapter=lora", "adapter.rank=5", "generation=vllm_server"]
    recipe = composed(*words, "generation.vllm.servers=[http://a:1]", "adapter.sync=adapter")
    assert planned(recipe=recipe).max_lora_rank == 5
    assert planned(recipe=recipe, max_lora_rank=8).max_lora_rank == 8
    recipe.adapter.args = {"rank_pattern": {"q_proj": 20}}
    assert planned(recipe=recipe).command()[-1] == "32"
    recipe.adapter.method = "dora"
    with pytest.raises(UserError, match=r"not apply DoRA; use adapter\.sync=merge"):
        planned(recipe=recipe)
    recipe.adapter.sync = "merge"
    assert planned(recipe=recipe).max_lora_rank is None


def test_what_a_recipe_says() -> None:
    words = ["gsm8k_qwen", "dataset.max_prompt_tokens=100", "generation.max_completion_tokens=30"]
    words += ["model.revision=abc", "model.trust_remote_code=true", "mixed_precision=no"]
    recipe = composed(*words, "model.dtype=float16", "eval.max_completion_tokens=null")
    plan = planned(1, recipe)
    assert plan.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert (plan.dtype, plan.max_model_len) == ("float16", 130)
    assert plan.command()[-3:] == ["--revision", "abc", "--trust-remote-code"]
    assert planned(1, recipe, max_model_len=77, dtype="float32").max_model_len == 77
    assert planned(1, recipe, dtype="float32").dtype == "float32"
    recipe.model.head_dtype = "float32"
    assert planned(1, recipe).command()[-2:] == ["--hf-overrides", '{"head_dtype": "float32"}']
    plan = planned(1, recipe, engine_args={"hf_overrides": {"rope_theta": 1}})
    assert plan.command()[-1] == '{"head_dtype": "float32", "rope_theta": 1}'
    recipe.mixed_precision, recipe.eval.max_completion_tokens = "bf16", 50
    assert planned(1, recipe).dtype == "bfloat16"
    recipe.mixed_precision = "fp16"
    assert planned(1, recipe).dtype == "float16"
    assert planned(1, recipe).max_model_len == 150


def test_transfer(model: Path) -> None:
    on_cpu, on_gpu = composed("arithmetic_tiny"), composed("arithmetic_tiny", "device=auto")
    assert planned(model=str(model)).transfer == "gloo"
    assert planned(1, model=str(model)).transfer == "nccl"
    assert planned(1, on_gpu).transfer == "nccl"
    assert planned(1, on_cpu).transfer == "gloo"  # that of a trainer without GPU
    assert planned(1, model=str(model), transfer="ipc").backend == "ipc"
    assert planned(1, model=str(model), transfer="disk").backend == "nccl"
    assert planned(model=str(model), transfer="disk").backend == "gloo"
    with pytest.raises(UserError, match="transfer = ipc: needs a GPU"):
        planned(model=str(model), transfer="ipc")
    on_gpu.generation.engine, on_gpu.generation.vllm.transfer = "vllm_server", "ipc"
    assert planned(1, on_gpu).transfer == "ipc"
    assert planned(1, on_gpu, transfer="gloo").transfer == "gloo"


def test_what_cannot_be_served(model: Path, tmp_path: Path) -> None:
    for words, gpus, said in (
        ({"model": str(tmp_path / "modle")}, 0, r"no such folder. Did you mean .*/model\?"),
        ({"model": str(tmp_path)}, 0, "the folder holds no model"),
        ({"tensor_parallel": 2, "data_parallel": 2}, 3, "= 4: this machine shows 3 GPUs"),
    ):
        with pytest.raises(UserError, match=said):
            planned(gpus, **{"model": str(model), **words})
    planned(4, model=str(model), tensor_parallel=2, data_parallel=2)
    recipe = composed("gsm8k_qwen", f"model.path={tmp_path}")
    with pytest.raises(UserError, match=r"model\.path = .*: the folder holds no model"):
        planned(1, recipe)
    (model / "config.json").rename(model / "adapter_config.json")
    with pytest.raises(UserError, match="is an adapter; serve its base model"):
        planned(model=str(model))


@pytest.mark.parametrize("host", ["0.0.0.0", "node1"])
def test_another_address_is_warned_of(host: str) -> None:
    assert serve.exposure("127.0.0.2") is serve.exposure("localhost") is None
    said = serve.exposure(host) or ""
    assert said.startswith(f"warning: host = {host}: others on this machine and its network reach")
    assert "change the weights and run code as you" in said


def test_the_words_that_train(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    recipe = composed("arithmetic_tiny")

    def words(*given: str, gpus: int = 0, own: Recipe | None = recipe, **settings: Any) -> str:
        return serve.training_words(planned(gpus, own, model=str(model), **settings), own, given)

    servers = "generation=vllm_server 'generation.vllm.servers=[http://127.0.0.1:8000]'"
    assert words("recipe=r", "a=b c", "generation=x", "+generation.vllm.servers=[y]") == (
        f"grpo train recipe=r 'a=b c' {servers}"
    )
    assert words(own=None) == f"grpo train ... {servers}"
    assert words(own=None, gpus=1) == f"grpo train ... {servers}"
    assert words("recipe=r", gpus=1) == f"grpo train recipe=r {servers}"  # its device is cpu
    assert words(own=None, gpus=1, transfer="ipc").endswith(" generation.vllm.transfer=ipc")
    assert words(own=None, transfer="disk").endswith(" generation.vllm.transfer=disk")
    for host, shown in (("0.0.0.0", "node1"), ("::", "node1"), ("::1", "[::1]")):
        assert f"=[http://{shown}:81]'" in words(own=None, host=host, port=81)


@pytest.mark.smoke
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_until_it_is_told_to_stop(
    number: int,
    model: Path,
    port: int,
    fake: Callable[[], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    health = []
    key_path = tmp_path / "cache" / "serve" / "key"

    def act() -> None:
        health.append(launch.is_healthy("127.0.0.1", port, key_path.read_text().strip()))
        health.append(launch.is_healthy("127.0.0.1", port, "another key of the server"))
        stop(number)()

    lines = once_ready(monkeypatch, act)
    before = signal.getsignal(number)
    assert cli.run_command(["serve", f"model={model}", f"port={port}"]) == 128 + number
    assert capsys.readouterr().err == f"grpo: the server on port {port} is stopped\n"
    assert health == [True, False]
    assert lines[1] == f"trainers need the key of {key_path}"
    assert key_path.stat().st_mode & 0o777 == 0o600
    assert not any(line.startswith("warning") for line in lines)
    log = server_log.log_path(port)
    assert lines[0] == f"starting vLLM with {model} on port {port}; its log: {log}"
    assert lines[-1].startswith("ready after ")
    assert " s: grpo train ... generation=vllm_server " in lines[-1]
    notes = fake()
    assert notes["argv"] == planned(model=str(model), port=port).command()[4:]
    assert notes["environment"]["VLLM_SERVER_DEV_MODE"] == "1"
    assert gone(*notes["pids"])  # the last of them does not heed SIGTERM
    assert signal.getsignal(number) is before
    key = key_path.read_text().strip()
    assert not any(key in text for text in [*lines, *notes["argv"], log.read_text()])
    said = server_log.tail_of(f"http://localhost:{port}") or ""
    assert "Starting to load model" in said
    assert said.endswith("ends as it was asked to")


@pytest.mark.programs
def test_a_server_that_does_not_stop_is_killed(
    model: Path, port: int, fake: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE", "is stubborn")
    monkeypatch.setattr(launch, "TERM_SECONDS", 0.3)
    once_ready(monkeypatch, stop(signal.SIGINT))
    assert cli.run_command(["serve", f"model={model}", f"port={port}"]) == 130
    assert gone(*fake()["pids"])


ALONE = """
import sys, time
from pathlib import Path
from grpo_cli.generation.vllm.launch import ServerPlan, ServerSettings, running

settings = ServerSettings(port=int(sys.argv[1]))
plan = ServerPlan(settings, "m", "auto", None, "gloo", 0, key="the key of this test")
with running(plan, Path(sys.argv[2]), []):
    time.sleep(600)
"""


def test_nothing_outlives_a_killed_grpo(
    port: int, fake: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{IMPORT_ROOT}{os.pathsep}{tmp_path / 'path'}"}
    command = [sys.executable, "-c", ALONE, str(port), str(tmp_path / "log")]
    grpo = subprocess.Popen(command, env=environment)
    try:
        while not launch.is_healthy("127.0.0.1", port, "the key of this test"):
            assert grpo.poll() is None
            time.sleep(0.02)
    finally:
        grpo.kill()
        grpo.wait()
    assert gone(*fake()["pids"])


def test_refused_before_anything_starts(
    model: Path,
    port: int,
    fake: Callable[[], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(serve, "running", lambda *args: pytest.fail("it was started"))
    with socket.create_server(("127.0.0.1", port)):
        assert cli.run_command(["serve", f"model={model}", f"port={port}"]) == 2
    assert f"port = {port}: cannot be listened at: Address already" in capsys.readouterr().err
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)
    assert cli.run_command(["serve", f"model={model}"]) == 2
    assert "vLLM is not installed; pip install 'vllm>=0.32'." in capsys.readouterr().err
