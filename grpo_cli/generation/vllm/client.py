"""The HTTP client of one vLLM server: every call has a deadline, every error names its call.

Every request carries the server's key (`server_key.py`).

The routes are vLLM's own; `grpo serve` enables its development routes. `/collective_rpc` calls the
methods of `worker.WorkerExtension`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx2

from grpo_cli.errors import TrainingError, UserError
from grpo_cli.generation.vllm import server_key
from grpo_cli.generation.vllm.checks import START_SECONDS
from grpo_cli.generation.vllm.prompts import ComparedPrompt, check_ids, encoded, over_http
from grpo_cli.generation.vllm.requests import completion, prompt_logprobs
from grpo_cli.generation.vllm.server_log import tail_of
from grpo_cli.records import Completion, Prompt

QUICK = 20.0  # timeout in seconds of a call that computes nothing
# Timeout of one prompt's completions: 32,000 tokens at 10 per second. Probes detect a lost server;
# this is for a request that hangs on a healthy one.
REQUEST_SECONDS = 3600.0
UPDATE_SECONDS = 300.0  # timeout of a bucket of weights, or of a call that handles all weights
PROBE = 5.0  # seconds between two probes of a server
MORE_ABOUT_KEYS = f"set ${server_key.KEY} to the key of its `grpo serve`"
# Fields in which the configs of server and policy must agree; the weight check finds the rest.
SHAPE = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "tie_word_embeddings", "rms_norm_eps",
    "rope_theta",
)  # fmt: skip
MAX_MISSES = 3  # consecutive probes without an answer after which a server counts as lost


class ServerLost(Exception):  # noqa: N818 - what happened to the server
    """Raised when a server fails a call; the message names the server and the call."""

    status: int | None = None  # HTTP status; None: no answer
    is_passing = False  # whether it may be transient, as a broken connection


@dataclass
class Server:
    """Holds a server's address and the settings that it has reported."""

    url: str
    key: str = field(default="", repr=False)  # read by `greet`
    worker_ids: list[str] = field(default_factory=list)  # as of the last `greet`
    world_size: int = 0
    max_model_len: int = 0
    dtype: str = ""
    transfer: str = ""
    max_lora_rank: int | None = None  # largest adapter rank; None: it applies no adapters
    has_own_weights: bool = True  # whether no run has sent it weights
    adapter: str | None = None  # adapter to sample and score with; None: the model itself

    def __post_init__(self) -> None:
        no_reuse = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        self.http = httpx2.Client(limits=no_reuse, trust_env=False)

    @property
    def headers(self) -> dict[str, str]:
        """Returns the headers of every request."""
        return server_key.headers(self.key)

    def call(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: float = QUICK,
        *,
        is_json: bool = True,
    ) -> Any:
        """Sends a POST, or a GET if `body` is None, and returns the answer.

        Each call opens a new connection, since the server closes its connections after an error.

        Args:
            is_json: whether the answer is JSON; if not, it is not returned.
        """
        method, url = "GET" if body is None else "POST", self.url + path
        try:
            answer = self.http.request(
                method, url, json=body or None, headers=self.headers, timeout=timeout
            )
        except (httpx2.HTTPError, OSError) as error:
            raise self.lost(path, failure(error, timeout)) from error
        return self._content(path, answer, is_json=is_json)

    def _content(self, path: str, answer: httpx2.Response, *, is_json: bool = True) -> Any:
        if answer.status_code == 400:
            said = f"server {self.url}: {path} was refused: {reason(answer)}"
            raise TrainingError(said, alone=True)
        if answer.status_code != 200:
            lost = self.lost(path, f"answered {answer.status_code}: {reason(answer)}")
            lost.status = answer.status_code
            raise lost
        try:
            return answer.json() if is_json and answer.content else None
        except ValueError as error:
            raise self.lost(path, "answered something else than JSON") from error

    def lost(self, path: str, why: str) -> ServerLost:
        """Returns the error for a failed call, with the end of the server's log if it is local."""
        log = tail_of(self.url)
        end = "" if log is None else "\nThe last lines of its log:\n" + log
        return ServerLost(f"server {self.url}: {path} failed: {why}.{end}")

    def rpc(self, method: str, *args: str, timeout: float = QUICK) -> list[Any]:
        """Calls a method of every worker; returns a list of their results."""
        answer = self.call(
            "/collective_rpc", {"method": method, "args": list(args), "timeout": timeout}, timeout
        )
        found: list[Any] = [] if answer is None else answer["results"]
        return found

    def greet(self, architecture: dict[str, Any], timeout: float = QUICK) -> bool:
        """Checks that the server is up and can take weights.

        Args:
            architecture: the policy's config as a dict.

        Returns:
            False if a weight update was interrupted: the server has to be restarted.

        Raises:
            ServerLost: the server is not up, or there is no key here yet. UserError: it serves
                another model, was not started by `grpo serve`, or has another key.
        """
        where, has_key = server_key.source(), True
        try:
            self.key = server_key.read_key()
        except FileNotFoundError:  # the server may not have made the file yet
            self.key, has_key = "", False
        try:
            self.call("/health", timeout=timeout)
            states = self.rpc("grpo_state")
            self.world_size = int(self.call("/get_world_size")["world_size"])
        except ServerLost as error:
            if error.status == 401 and not has_key:
                why = f"asks for a key, and there is no {where}; {MORE_ABOUT_KEYS}"
                raise ServerLost(f"server {self.url}: {why}.") from error
            if error.status == 401:
                raise UserError(
                    f"generation.vllm.servers: {self.url} refuses the key of {where}; "
                    f"{MORE_ABOUT_KEYS}."
                ) from error
            if error.status not in (403, 404, 500):  # these: no such routes, or methods
                raise
            raise UserError(
                f"generation.vllm.servers: {self.url} is up, and was not started by `grpo serve` "
                f"of this version ({error})"
            ) from error
        state = states[0]
        self.worker_ids = [s["worker_id"] for s in states]
        self.dtype, self.transfer = state["dtype"], state["transfer"]
        self.max_model_len = int(state["max_model_len"])
        self.max_lora_rank, self.has_own_weights = state["max_lora_rank"], state["has_own_weights"]
        for key in SHAPE:
            own, other = (
                (config.get("rope_parameters") or {}).get(key, config.get(key))
                for config in (architecture, state["config"])
            )
            if None not in (own, other) and own != other:
                raise UserError(
                    f"generation.vllm.servers: {self.url} serves another model than the policy, "
                    f"{state['model']}: {key} is {other} there and {own} here."
                )
        if state["quantization"]:
            raise UserError(
                f"generation.vllm.servers: {self.url} serves {state['model']} quantized "
                f"({state['quantization']}); it cannot take weights that are trained."
            )
        return not any(s["updating"] for s in states)

    async def generate(
        self,
        client: httpx2.AsyncClient,
        prompt: Prompt,
        params: dict[str, Any],
        version: str,
        steps: Callable[[str], int],
    ) -> list[Completion]:
        """Returns a group of completions of a prompt.

        Args:
            version: version of the newest weights; prefix caches of older weights are not used.
            steps: maps a version that the server reports to its step; -1 for a version not in use.

        Raises:
            ServerLost: the server failed, or has another run's weights. TrainingError: it refuses.
        """
        path = "/inference/v1/generate"
        body: dict[str, Any] = {
            **await encoded(prompt),
            "sampling_params": {**params, "output_kind": 2},
            # So that prefix-cache entries of older weights are not used.
            "cache_salt": version,
            **self._model(),
        }
        try:
            asked = client.post(self.url + path, json=body, headers=self.headers)
            answer = await asyncio.wait_for(asked, REQUEST_SECONDS)
        except (httpx2.HTTPError, OSError, TimeoutError) as error:
            lost = self.lost(path, failure(error, REQUEST_SECONDS))
            lost.is_passing = isinstance(error, (httpx2.NetworkError, httpx2.ProtocolError))
            raise lost from error
        found = self._content(path, answer)
        check_ids(prompt, found.get("prompt_token_ids"))
        choices = found["choices"]
        if len(choices) != params["n"]:
            raise self.lost(path, f"{params['n']} completions were due, {len(choices)} came")
        group = []
        for choice in sorted(choices, key=lambda c: int(c["index"])):
            if choice["finish_reason"] not in ("stop", "length"):
                raise self.lost(path, f"a completion was broken off ({choice['finish_reason']})")
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            spans = choice["weight_versions"] or []
            oldest = min((steps(span["version"]) for span in spans), default=-1)
            if oldest < 0:
                found = sorted({span["version"] for span in spans})
                raise self.lost(
                    path,
                    f"it sampled with weights {found}, which this run has not sent in time; it was "
                    "restarted, or another run sends it weights too",
                )
            group.append(completion(choice["token_ids"], logprobs, choice["finish_reason"], oldest))
        return group

    def score(self, rows: Sequence[ComparedPrompt]) -> list[list[float]]:
        """Returns the server's log-probabilities of each row's scored tokens."""
        params = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        params |= {"repetition_penalty": 1.0, "prompt_logprobs": 0, "detokenize": False, "n": 1}
        params["output_kind"] = 2
        how: dict[str, Any] = {"sampling_params": params, **self._model()}

        def score_one(row: ComparedPrompt) -> list[float]:
            body = {**over_http(row.prompt), **how}
            found = self.call("/inference/v1/generate", body, UPDATE_SECONDS)
            check_ids(row.prompt, found.get("prompt_token_ids"))
            plain = [
                {int(t): entry["logprob"] for t, entry in of_token.items()} if of_token else None
                for of_token in found["prompt_logprobs"] or []
            ]
            return prompt_logprobs(row.prompt.ids, plain)[-row.num_tokens :]

        with ThreadPoolExecutor(len(rows)) as pool:
            return list(pool.map(score_one, rows))

    def _model(self) -> dict[str, str]:
        """Returns the field of a request that names the adapter."""
        return {} if self.adapter is None else {"model": self.adapter}

    async def watch(self, client: httpx2.AsyncClient) -> ServerLost:
        """Probes the server every few seconds; returns the error once it counts as lost."""
        misses, path = 0, "/health"
        while True:
            try:
                answer = await client.get(self.url + path, headers=self.headers, timeout=QUICK)
                why = None if answer.status_code == 200 else f"answered {answer.status_code}"
            except (httpx2.HTTPError, OSError) as error:
                why = failure(error, QUICK)
            misses = 0 if why is None else misses + 1
            if misses == MAX_MISSES:
                return self.lost(path, f"{why}, {MAX_MISSES} times in a row")
            await asyncio.sleep(PROBE)


def wait_for(
    servers: Sequence[Server], architecture: dict[str, Any], say: Callable[[str], None]
) -> None:
    """Waits until every server is up, and prints which ones it waits for.

    Raises:
        UserError: a server is not up in time, or serves another model.
    """
    deadline, told = time.monotonic() + START_SECONDS, time.monotonic()
    waiting = list(servers)
    while waiting:
        server = waiting[0]
        try:
            if not server.greet(architecture):
                raise UserError(
                    f"generation.vllm.servers: {server.url} was left in the middle of a weight "
                    "update, by a run that ended; start it again."
                )
            waiting.pop(0)
            continue
        except ServerLost as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"generation.vllm.servers: {server.url} is not up after "
                    f"{START_SECONDS:g} s. {error}"
                ) from error
        if time.monotonic() - told > PROBE:
            told = time.monotonic()
            left = deadline - time.monotonic()
            say(f"waiting for {', '.join(s.url for s in waiting)}, {left:.0f} s more at most")
        time.sleep(0.5)


def failure(error: BaseException, timeout: float) -> str:
    """Returns the reason of a failed request, for a message."""
    if isinstance(error, (httpx2.TimeoutException, TimeoutError)):
        return f"no answer within {timeout:g} s"
    if isinstance(error, httpx2.ConnectError):
        cause = str(error)
        return (
            f"no connection ({cause})"
            if "Too many open files" in cause
            else "nothing listens there"
        )
    return f"the connection broke ({str(error) or type(error).__name__})"


def reason(answer: httpx2.Response) -> str:
    """Returns a server's error message as one line."""
    try:
        body = answer.json()
    except ValueError:
        body = answer.text
    if isinstance(body, dict):
        inner = body.get("error") or body.get("detail") or body
        body = inner.get("message", inner) if isinstance(inner, dict) else inner
    return " ".join(str(body).split())[:400]
