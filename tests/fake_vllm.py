"""A server as `grpo serve` starts it, in a thread of the test: vLLM 0.32's routes, no engine.

It keeps what a trainer can tell of a server: its workers' weights, their version, whether it is
paused or in the middle of an update. Completions are drawn from a seed, and what it says of a
prompt follows from its weights alone (`toy_logprobs`).
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from grpo_cli.config.recipe import Recipe
from grpo_cli.distributed.workers import Workers
from grpo_cli.generation.base import EngineSetup
from grpo_cli.generation.vllm import gloo_wire, server_key
from grpo_cli.generation.vllm.server import ServerGenerator
from grpo_cli.generation.vllm.weight_check import WeightCheck
from grpo_cli.generation.vllm.weights import WeightInfo, buckets, unflattened
from grpo_cli.records import Prompt
from grpo_cli.scoring.settings import Reward

EOS = 2
GENERATE = "/inference/v1/generate"
Drawn = list[tuple[list[int], list[float], str]]  # ids, log-probabilities, finish reason


class Refused(Exception):  # noqa: N818
    """What the server answers instead: a status and a message."""


class Listening(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # with 5 a burst of connections waits for a second


class FakeVllm:
    """One server. What `faults` holds is called in place of a route or of a worker's method."""

    def __init__(
        self,
        config: dict[str, Any],
        weights: Mapping[str, Tensor] | None = None,
        *,
        workers: int = 1,
        **state: Any,
    ) -> None:
        self.state = {
            "model": "some/model", "config": config, "dtype": "float32",
            "max_model_len": 64, "quantization": None,
            "transfer": "gloo", "max_lora_rank": None, "has_own_weights": True,
        } | state  # fmt: skip
        self.workers = workers
        self.first = {n: w.detach().clone() for n, w in (weights or {}).items()}  # to start with
        self.faults: dict[str, Callable[[], Any]] = {}
        self.complete: Callable[[list[int], dict[str, Any]], Drawn] = toy_completions
        self.score: Callable[[list[int]], list[float]] = lambda ids: toy_logprobs(self.held[0], ids)
        self.reads = True  # the trainer's files
        self.versions: Callable[[], list[str]] = lambda: [self.version]
        self.deaf = 0  # updates that it will take and not use
        self.key = server_key.make_key()  # in the session's cache folder
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """The first time, or again with nothing left of its life before."""
        self.worker_id = uuid.uuid4().hex
        self.version = "default"
        self.held: list[dict[str, Tensor]] = [dict(self.first) for _ in range(self.workers)]
        self.adapters: dict[str, dict[str, Tensor]] = {}  # by name
        self.groups: list[Any] = []
        self.receiving: list[dict[str, Tensor]] | None = None
        self.updating = self.paused = False
        self.calls: list[str] = []  # routes, and methods of workers
        self.asked: list[dict[str, Any]] = []  # bodies of generation
        self.pauses: list[str] = []  # modes
        self.inits: list[dict[str, Any]] = []  # of the transfer
        self.under_way = 0  # completions
        self.changed, self.pausing = threading.Condition(), threading.Event()
        self.over = threading.Event()
        self.connections: list[socket.socket] = []
        self.http = Listening(("127.0.0.1", self.port), handler_of(self))
        self.port = self.http.server_port
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def end(self) -> None:
        """As a process that is killed: connections break, nothing listens."""
        if self.over.is_set():
            return
        self.over.set()
        self.groups.clear()
        with self.changed:
            self.changed.notify_all()
        self.http.shutdown()
        self.http.server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    # Faults.

    def hang(self) -> None:
        """Answers nothing as long as the server lives."""
        self.over.wait(60)
        raise ConnectionAbortedError

    def die(self) -> None:
        self.end()
        raise ConnectionAbortedError

    def fail(self) -> None:
        raise Refused(500, "EngineCore encountered an issue")

    def after(self, number: int, fault: Callable[[], None]) -> Callable[[], None]:
        """The fault, from the call after so many good ones on."""
        calls = iter(range(number))

        def act() -> None:
            if next(calls, None) is None:
                fault()

        return act

    # Routes.

    def answer(self, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> Any:
        name = body["method"] if path == "/collective_rpc" else path
        self.calls.append(name)
        if name in self.faults and (found := self.faults[name]()) is not None:
            return found
        if path == "/collective_rpc":
            return {"results": getattr(self, name)(*body["args"])}
        route = "generate" if path == GENERATE else path.rpartition("/")[2]
        return getattr(self, route)(**{k: v[0] for k, v in query.items()}, **body)

    def health(self) -> None: ...

    def get_world_size(self) -> dict[str, int]:
        return {"world_size": self.workers}

    def grpo_state(self) -> list[dict[str, Any]]:
        here = {"updating": self.updating}
        return [
            self.state | here | {"worker_id": f"{self.worker_id}-{i}"} for i in range(self.workers)
        ]

    def grpo_begin_update(self, what: str) -> list[None]:
        self.state["has_own_weights"] &= what == "adapter"
        self.updating = True
        return [None] * self.workers

    def grpo_end_update(self) -> list[None]:
        self.updating = False
        return [None] * self.workers

    def grpo_load(self, folder: str) -> list[None]:
        weights = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            weights |= load_file(file)
        self.take([dict(weights) for _ in range(self.workers)])
        return [None] * self.workers

    def grpo_can_read(self, folder: str) -> list[bool]:
        return [self.reads and Path(folder).is_dir()] * self.workers

    def grpo_load_adapter(self, folder: str) -> list[None]:
        (name,) = self.adapters
        self.take_adapter(name, folder)
        return [None] * self.workers

    def load_lora_adapter(self, lora_name: str, lora_path: str) -> str:
        if lora_name in self.adapters:
            raise Refused(400, f"The lora adapter '{lora_name}' has already been loaded.")
        self.adapters.clear()  # of its one slot
        self.take_adapter(lora_name, lora_path)
        return f"Success: LoRA adapter '{lora_name}' added successfully."

    def unload_lora_adapter(self, lora_name: str) -> str:
        if lora_name not in self.adapters:
            raise Refused(404, f"The lora adapter '{lora_name}' cannot be found.")
        del self.adapters[lora_name]
        return f"Success: LoRA adapter '{lora_name}' removed successfully."

    def take_adapter(self, name: str, folder: str) -> None:
        tensors = load_file(Path(folder) / "adapter_model.safetensors")
        assert (Path(folder) / "adapter_config.json").is_file()
        self.adapters[name] = {key: tensor.clone() for key, tensor in tensors.items()}

    def pause(self, mode: str) -> dict[str, str]:
        self.pauses.append(mode)
        with self.changed:
            self.paused = True
            self.pausing.set()
            self.changed.wait_for(
                lambda: mode == "keep" or not self.under_way or self.over.is_set(), 60
            )
        return {"status": "paused"}

    def resume(self) -> dict[str, str]:
        with self.changed:
            self.paused = False
            self.changed.notify_all()
        return {"status": "resumed"}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> dict[str, str]:
        i = init_info
        self.inits.append(i)
        self.bucket_bytes = i["bucket_bytes"]

        def join(rank: int) -> Any:
            return gloo_wire.join(i["address"], i["port"], rank, i["size"], i["timeout"])

        self.groups = self.each(join, range(1, self.workers + 1))
        return {"message": "Weight transfer initialized"}

    def shutdown_weight_transfer_engine(self) -> None:
        self.groups = []

    def start_weight_update(self) -> None:
        if not self.groups:
            raise Refused(500, "Weight transfer not configured")
        self.receiving = []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if self.receiving is None:
            raise Refused(500, "no weight update was started")
        infos = [
            WeightInfo(name, tuple(shape), getattr(torch, dtype))
            for name, dtype, shape in zip(
                update_info["names"], update_info["dtype_names"], update_info["shapes"], strict=True
            )
        ]

        def receive(group: Any) -> dict[str, Tensor]:
            weights: dict[str, Tensor] = {}
            for bucket in buckets(infos, self.bucket_bytes):
                size = sum(torch.Size(info.shape).numel() for info in bucket)
                flat = torch.empty(size, dtype=bucket[0].dtype)
                gloo_wire.broadcast(group, flat, 30.0).wait()
                weights |= unflattened(flat, bucket)
            return weights

        self.receiving = self.each(receive, self.groups)

    def finish_weight_update(self, weight_version: str) -> None:
        if not self.receiving:
            raise Refused(500, "no weights came")
        self.take(self.receiving)
        self.version, self.receiving = weight_version, None

    def update_weight_version(self, new_version: str) -> dict[str, Any]:
        self.version = new_version
        return {"success": True, "new_version": new_version}

    def reset_prefix_cache(self) -> dict[str, bool]:
        return {"success": True}

    def generate(
        self,
        token_ids: list[int],
        sampling_params: dict[str, Any],
        cache_salt: str | None = None,
        model: str | None = None,
    ) -> dict[str, Any]:
        params = sampling_params
        if model is not None and model not in self.adapters:
            raise Refused(404, f"The model `{model}` does not exist.")
        if "prompt_logprobs" in params:
            applied = None if model is None else toy_logprobs(self.adapters[model], token_ids)
            scores = self.score(token_ids) if applied is None else applied
            rows = [
                {str(t): {"logprob": x, "rank": 1, "decoded_token": None}}
                for t, x in zip(token_ids[1:], scores, strict=True)
            ]
            return {"prompt_logprobs": [None, *rows], "choices": []}
        named = {} if model is None else {"model": model}
        self.asked.append({"token_ids": token_ids, "cache_salt": cache_salt, **named, **params})
        with self.changed:
            self.changed.wait_for(lambda: not self.paused or self.over.is_set(), 60)
            self.under_way += 1
        try:
            if self.updating:
                raise Refused(500, "EngineCore encountered an issue")
            choices = [
                {
                    "index": i, "token_ids": ids, "finish_reason": reason,
                    "logprobs": {"content": [{"token": "", "logprob": x} for x in logprobs]},
                    "weight_versions": [
                        {"version": v, "start": 0, "end": len(ids)} for v in self.versions()
                    ],
                }
                for i, (ids, logprobs, reason) in enumerate(self.complete(token_ids, params))
            ]  # fmt: skip
        finally:
            with self.changed:
                self.under_way -= 1
                self.changed.notify_all()
        return {"request_id": "r", "choices": choices[::-1], "prompt_logprobs": None}

    def take(self, weights: list[dict[str, Tensor]]) -> None:
        if self.deaf:
            self.deaf -= 1
        else:
            self.held = weights

    def each(self, do: Callable[[Any], Any], over: Sequence[Any]) -> list[Any]:
        """As workers, at the same time."""
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(do, over))


def handler_of(server: FakeVllm) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def setup(self) -> None:
            super().setup()
            server.connections.append(self.connection)

        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length) or b"{}")
            parts = urlsplit(self.path)
            status = 200
            try:
                if self.headers.get("Authorization") != f"Bearer {server.key}":
                    raise Refused(401, "the key of the server is missing or is another one")
                found = server.answer(parts.path, parse_qs(parts.query), body)
            except ConnectionAbortedError:
                return
            except Refused as refused:
                status, found = refused.args[0], {"error": {"message": refused.args[1]}}
            except Exception as error:
                status, found = 500, {"error": {"message": repr(error)}}
            if server.over.is_set():
                return
            with contextlib.suppress(OSError):  # who asked has not waited
                self.send_response(status)
                self.end_headers()
                text = found if isinstance(found, str) else json.dumps(found)
                self.wfile.write(b"" if found is None else text.encode())

        do_POST = do_GET  # noqa: N815

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


def toy_completions(token_ids: list[int], params: dict[str, Any]) -> Drawn:
    """Completion j is a function of (prompt, seed, j); half of them end with an eos."""
    drawn: Drawn = []
    for j in range(params["n"]):
        dice = random.Random(f"{token_ids} {params.get('seed')} {j}")
        ids = [dice.randrange(3, 250) for _ in range(params["max_tokens"])]
        ends = dice.random() < 0.5
        ids = [*ids[: dice.randrange(len(ids))], EOS] if ends else ids
        drawn.append((ids, [-dice.random() for _ in ids], "stop" if ends else "length"))
    return drawn


def toy_logprobs(weights: Mapping[str, Tensor], ids: Sequence[int]) -> list[float]:
    """Log-probabilities of tokens but the first, each a function of all weights."""
    moved = sum(float(w.detach().double().abs().mean()) for w in weights.values())
    return [-moved - t / 100 for t in ids[1:]]


@contextlib.contextmanager
def serving(*servers: FakeVllm) -> Iterator[None]:
    try:
        yield
    finally:
        for server in servers:
            server.end()


def recipe_for(servers: Sequence[FakeVllm], **of_vllm: Any) -> Recipe:
    """A recipe with these servers; nothing in it waits for long."""
    recipe = Recipe(device="cpu", reward={"length": Reward(function="length")})
    recipe.generation.engine, recipe.generation.max_completion_tokens = "vllm_server", 6
    known = {
        "servers": [s.url for s in servers], "transfer": "gloo", "check_weights": False,
    }  # fmt: skip
    for name, value in (known | of_vllm).items():
        setattr(recipe.generation.vllm, name, value)
    return recipe


def generator_for(
    servers: Sequence[FakeVllm],
    policy: PreTrainedModel,
    weight_check: WeightCheck | None = None,
    process: Process | None = None,
    say: Callable[[str], None] = print,
    recipe: Recipe | None = None,
    **of_vllm: Any,
) -> ServerGenerator:
    recipe = recipe or recipe_for(servers, **of_vllm)
    prompts = [Prompt.from_ids([0] * 10)]
    setup = EngineSetup(recipe, policy, None, [EOS], process or Process(), prompts, say)
    return ServerGenerator(setup, weight_check)


class Process(Workers):
    """One of several processes of a run, each in a thread of its own."""

    def __init__(self, rank: int = 0, board: list[Any] | None = None) -> None:
        self.rank, self.board = rank, board or [None]
        self.size = len(self.board)
        self.meeting = threading.Barrier(self.size)

    @classmethod
    def several(cls, size: int) -> list[Process]:
        board, meeting = [None] * size, threading.Barrier(size, timeout=60)
        processes = [cls(rank, board) for rank in range(size)]
        for process in processes:
            process.meeting = meeting
        return processes

    def gather(self, value: Any) -> list[Any]:
        self.board[self.rank] = value
        self.meeting.wait()
        everyones = list(self.board)
        self.meeting.wait()
        return everyones
