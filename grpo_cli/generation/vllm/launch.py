"""Starts vLLM's OpenAI server as a process, watches it, and ends it with all child processes.

The processes:

    grpo serve          checks, starts, reports; ends the others when it gets a signal
    └ keep()            leads a session of its own; ends the session when grpo has ended
      └ vLLM's server   with vLLM's engine and workers as children
"""

from __future__ import annotations

import http.client
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_cli import IMPORT_ROOT
from grpo_cli.config.knob import knob
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.generation.vllm import lora, server_key
from grpo_cli.generation.vllm.checks import START_SECONDS, of_head
from grpo_cli.generation.vllm.server_log import failure, last_lines, log_path, text_of

MODULE = "vllm.entrypoints.openai.api_server"
GIB = 2**30

POLL_SECONDS = 0.2  # interval between checks of the server
REPORT_SECONDS = 5.0  # interval between progress lines while it starts
TERM_SECONDS = 10.0  # time between SIGTERM and SIGKILL


@dataclass
class ServerSettings:
    """The settings of `grpo serve`; all other arguments compose the recipe."""

    model: str | None = knob(
        None,
        "Folder or hub name of the model to serve; with recipe=NAME the recipe's model is served.",
    )
    host: str = knob("127.0.0.1", "Address to listen at; 0.0.0.0: all addresses of this machine.")
    port: int = knob(8000, "Port to listen at.", ge=1, le=65535)
    tensor_parallel: int = knob(1, "Number of GPUs that share one copy of the model.", ge=1)
    data_parallel: int = knob(1, "Number of copies of the model.", ge=1)
    dtype: str | None = knob(
        None,
        "Type of weights and arithmetic; null: the type of the recipe, without a recipe the type "
        "of the model on a GPU and float32 on a CPU.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    max_model_len: int | None = knob(
        None,
        "Longest sequence of prompt and completion, in tokens; null: the longest prompt and "
        "completion of the recipe, without a recipe the model's own length.",
        ge=2,
    )
    memory: float = knob(
        0.9, "Share of each GPU's memory that vLLM uses; only read on GPUs.", gt=0, le=1
    )
    eager: bool | None = knob(
        None, "Whether to run without compilation and CUDA graphs; null: only on a CPU."
    )
    max_lora_rank: int | None = knob(
        None,
        "Largest rank of an adapter that the server applies itself (adapter.sync=adapter); null: "
        "the rank of the recipe's adapter if it has adapter.sync=adapter, else none is applied.",
        ge=1,
        le=lora.RANKS[-1],
    )
    transfer: str = knob(
        "auto",
        "How the trainer sends weights; auto: nccl on GPUs, gloo on CPUs or if the recipe's device "
        "is cpu.",
        choices=("auto", "nccl", "ipc", "gloo", "disk"),
    )
    log: str | None = knob(None, "File for the server's log; null: a file in grpo's cache folder.")
    engine_args: dict[str, Any] = knob(
        {}, "Any other argument of vLLM's server, such as engine_args.max_num_seqs=512."
    )


@dataclass(frozen=True)
class ServerPlan:
    """The complete settings of a server."""

    settings: ServerSettings
    path: str  # the model's folder or hub name
    dtype: str
    max_model_len: int | None  # None: the model's own
    transfer: str
    gpus: int
    revision: str | None = None
    trust_remote_code: bool = False
    max_lora_rank: int | None = None  # None: the server applies no adapters
    head_dtype: str = "auto"  # auto: the engine's dtype
    key: str = field(default="", repr=False)  # secret that requests must carry

    @property
    def backend(self) -> str:
        """Returns vLLM's name of the weight transfer; for `disk`, any that the platform has."""
        if self.transfer == "disk":
            return "nccl" if self.gpus else "gloo"
        return self.transfer

    def command(self) -> list[str]:
        """Returns the server's command line."""
        s, on_cpu = self.settings, not self.gpus
        flags = {
            "model": self.path,
            "host": s.host,
            "port": s.port,
            "dtype": self.dtype,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "enable_scale_out": True,
            "worker_extension_cls": "grpo_cli.generation.vllm.worker.WorkerExtension",
            "middleware": "grpo_cli.generation.vllm.server_key.KeyMiddleware",
            "weight_transfer_config": {"backend": self.backend},
            "disable_uvicorn_access_log": True,  # keeps the log short, for errors
            "max_model_len": self.max_model_len,
            "tensor_parallel_size": s.tensor_parallel,
            "data_parallel_size": s.data_parallel,
            "gpu_memory_utilization": None if on_cpu else s.memory,
            "kv_cache_memory_bytes": GIB if on_cpu else None,
            "enable_chunked_prefill": False if on_cpu else None,  # see `colocate.engine_args`
            "enforce_eager": (on_cpu if s.eager is None else s.eager) or None,
            "revision": self.revision,
            "trust_remote_code": self.trust_remote_code or None,
        }
        if self.max_lora_rank is not None:
            rank = lora.max_rank(self.max_lora_rank)
            flags |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
        flags |= {**s.engine_args, **of_head(self.head_dtype, s.engine_args)}
        # -P: a random.py in the working folder must not shadow Python's own.
        return [sys.executable, "-P", "-m", MODULE, *_flags(flags)]

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Returns the server's environment: `inherited` and the server's own variables."""
        path = os.pathsep.join(filter(None, [str(IMPORT_ROOT), inherited.get("PYTHONPATH")]))
        out = {**inherited, "PYTHONPATH": path, "VLLM_SERVER_DEV_MODE": "1"}
        out[server_key.KEY] = self.key
        if self.max_lora_rank is not None:
            out["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if not self.gpus:
            # Saves half a minute of g++ at the first request, and one process.
            out.setdefault("TORCH_COMPILE_DISABLE", "1")
            out.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        return out


def _flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif value is not None:
            yield f"--{flag}"
            yield json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def check_port(host: str, port: int) -> None:
    """Raises a UserError if no server could listen at this address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise UserError(
            f"host = {host}, port = {port}: cannot be listened at: {error.strerror}; choose "
            "another with port=N or host=ADDRESS."
        ) from error


def say(text: str) -> None:
    """Prints a line and flushes, so that readers of a log file see it at once."""
    print(text, flush=True)


def prepare_log(settings: ServerSettings) -> Path:
    """Creates an empty log file, linked from the trainer's default path, and returns its path.

    Raises:
        UserError: the file cannot be written.
    """
    usual = log_path(settings.port)
    log = Path(settings.log).expanduser() if settings.log else usual
    try:
        for path in (usual, log):
            path.parent.mkdir(parents=True, exist_ok=True)
        usual, log = (path.parent.resolve() / path.name for path in (usual, log))
        usual.unlink(missing_ok=True)  # an earlier server's log, or a link to it
        log.write_bytes(b"")
        if log != usual:
            usual.symlink_to(log)
    except OSError as error:
        raise UserError(f"log = {log}: cannot be written: {error.strerror}.") from error
    return log


@contextmanager
def signals_noted() -> Iterator[list[int]]:
    """Within the context, SIGINT and SIGTERM only append their number to the yielded list."""
    noted: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {n: signal.signal(n, lambda number, frame: noted.append(number)) for n in numbers}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def running(plan: ServerPlan, log: Path, noted: list[int]) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the server within the context, then ends it and all its child processes."""
    command, environment = plan.command(), plan.environment(os.environ)
    with log.open("wb") as file:
        file.write(f"{shlex.join(command)}\n".encode())
        file.flush()
        server = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-c",
                "from grpo_cli.generation.vllm.launch import keep; keep()",
                *command,
            ],
            stdin=subprocess.PIPE,  # `keep` sees end of file when this process has ended
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches only grpo; the session is killed as a whole
        )
    try:
        yield server
    finally:
        first = len(noted)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        deadline = time.monotonic() + TERM_SECONDS
        # A second signal kills the server without waiting.
        while server.poll() is None and time.monotonic() < deadline and len(noted) == first:
            time.sleep(POLL_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        assert server.stdin is not None
        server.stdin.close()


def keep() -> None:
    """Runs the command in `sys.argv` and ends all its processes.

    This process leads the session of the command. When the command or the parent has ended (stdin
    is then at end of file), the complete session is killed, including this process.
    """
    # A handler, because the command would inherit SIG_IGN.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    while server.poll() is None:
        readable, _, _ = select.select([0], [], [], POLL_SECONDS)
        if readable:
            os.killpg(0, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                server.wait(TERM_SECONDS)
            break
    else:
        if server.returncode < 0:
            say(f"killed by {signal.Signals(-server.returncode).name}")
    os.killpg(0, signal.SIGKILL)


def wait_until_ready(
    server: subprocess.Popen[bytes], plan: ServerPlan, log: Path, noted: list[int]
) -> None:
    begin = spoken = time.monotonic()
    while not noted:
        if server.poll() is not None:
            raise TrainingError(failure("the server ended while it started", log))
        if is_healthy(plan.settings.host, plan.settings.port, plan.key):
            return
        now = time.monotonic()
        if now - begin > START_SECONDS:
            raise TrainingError(failure(f"the server is not ready after {START_SECONDS:g} s", log))
        if now - spoken >= REPORT_SECONDS:
            spoken = now
            last = last_lines(text_of(log), 1).partition("] ")  # strips vLLM's [file:line]
            say(f"  {now - begin:.0f} s: {last[2] or last[0]}")
        time.sleep(POLL_SECONDS)


def is_healthy(host: str, port: int, key: str) -> bool:
    """Returns whether the server at this address is ready. Proxies are not used."""
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    connection = http.client.HTTPConnection(address, port, timeout=5)
    try:
        connection.request("GET", "/health", headers=server_key.headers(key))
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
