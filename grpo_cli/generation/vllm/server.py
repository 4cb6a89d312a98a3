"""Samples from vLLM servers: spreads prompts over them, sends weights, drops servers that fail.

Each training process sends its own prompts to the servers. Only process 0 sends weights; it then
broadcasts which servers have them. If a server fails, it is dropped and its prompts go to the
others. A server that is back gets the weights with the next update.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx2
from transformers import PreTrainedModel

from grpo_cli.config.recipe import Recipe
from grpo_cli.distributed import heartbeat
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.generation.base import EngineSetup, Finished, Request, Session
from grpo_cli.generation.vllm import lora, weight_transfer
from grpo_cli.generation.vllm.base import VllmGenerator
from grpo_cli.generation.vllm.checks import contradictions_of_servers, dtype_of
from grpo_cli.generation.vllm.client import QUICK, Server, ServerLost, wait_for
from grpo_cli.generation.vllm.requests import check_lengths, repeated
from grpo_cli.generation.vllm.weight_check import WeightCheck
from grpo_cli.generation.vllm.weight_transfer import Link
from grpo_cli.records import Completion

IN_FLIGHT = 2048  # default of generation.max_num_seqs: completions in flight per server
BEAT = 1.0  # seconds between checks for an interrupt of the run
SOON = 0.1  # seconds between checks for a server with room
SOCKETS = 256  # requests in flight per process and server; many systems allow 1,024 open files


class ServerLoad:
    """Counts the requests in flight on each server, over all batches of this process."""

    def __init__(self, most_rows: int) -> None:
        self.most_rows = most_rows
        self.rows: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.lock = threading.Lock()  # prefetched batches are sampled in threads

    def take(self, live: Sequence[Server], rows: int, home: str | None = None) -> Server | None:
        """Reserves a server for a request of `rows` completions; returns None if all are full.

        Args:
            home: address of the preferred server; if it is full, the least busy one is used.
        """
        with self.lock:
            for server in sorted(live, key=lambda s: (s.url != home, self.rows[s.url])):
                busy, requests = self.rows[server.url], self.requests[server.url]
                if requests < SOCKETS and not (busy and busy + rows > self.most_rows):
                    self.rows[server.url] += rows
                    self.requests[server.url] += 1
                    return server
            return None

    def give_back(self, server: Server, rows: int) -> None:
        """Releases the server from a finished request."""
        with self.lock:
            self.rows[server.url] -= rows
            self.requests[server.url] -= 1


@dataclass(eq=False)
class Ask:
    """One prompt of a request, which is sent to a server."""

    request: Request
    number: int  # index of the prompt in the request
    is_again: bool = False  # whether a server has failed on it before

    @property
    def rows(self) -> int:
        """Number of completions."""
        return self.request.num_generations

    @property
    def conversations(self) -> Sequence[int]:
        """The conversation numbers of its completions; empty without later turns."""
        first = self.number * self.rows
        return self.request.conversations[first : first + self.rows]


class ServerGenerator(VllmGenerator):
    """Samples from servers that `grpo serve` has started."""

    is_repeatable = False

    @classmethod
    def contradictions(cls, recipe: Recipe) -> Iterator[str]:
        return contradictions_of_servers(recipe)

    def __init__(self, setup: EngineSetup, weight_check: WeightCheck | None) -> None:
        """Waits for the servers. Every process calls it.

        Raises:
            UserError: a server is not up in time, serves another model, or has too small a limit.
        """
        super().__init__(setup, weight_check)
        self.in_flight = ServerLoad(setup.recipe.generation.max_num_seqs or IN_FLIGHT)
        self.servers = [Server(url.rstrip("/")) for url in self.config.servers]
        self.architecture = setup.model.config.get_text_config().to_dict()
        with self.workers.raise_together():
            wait_for(self.servers, self.architecture, self.say)
            for server in self.servers:
                self._check(server)
        dtypes, own = {server.dtype for server in self.servers}, dtype_of(setup.recipe)
        for dtype in dtypes - {own}:
            self.say(
                f"note: servers compute in {dtype}, the trainer in {own}: their "
                "log-probabilities differ by more than they need"
            )
        if weight_check is not None:
            weight_check.dtype = min(dtypes)  # bfloat16 before float32
        # A run id, so that another run's weight versions are not mistaken for this one's.
        self.run = self.workers.gather(uuid.uuid4().hex[:8])[0]
        if self.lora_rank is not None:
            for server in self.servers:
                server.adapter = self.run
        self.versions: dict[str, int] = {}  # version that servers report -> step
        self.prefetch_steps = self.config.prefetch_steps
        self.links: dict[str, Link] = {}  # by address; only on process 0
        self.live: set[str] = set()  # addresses of servers with the newest weights
        self.why_lost: dict[str, str] = {}  # error of each lost server, by address

    @contextlib.contextmanager
    def session(self) -> Iterator[Session]:
        with asyncio.Runner() as runner:
            session = ServerSession(self, runner)
            try:
                yield session
            finally:
                session.close()

    def update_weights(self, policy: PreTrainedModel, step: int) -> dict[str, float]:
        metrics = super().update_weights(policy, step)
        return metrics | {"weights/servers": float(len(self.live))}

    def load(self, step: int) -> None:
        version = f"{self.run}:{step}"
        self.versions[version] = step
        # A server that any process has lost is checked again.
        told = self.workers.gather((self.live, self.why_lost))
        known = set.intersection(*(live for live, _ in told))
        for rank, (live, why_lost) in enumerate(told[1:], 1):
            for url in self.live - live:
                self.say(f"note: process {rank}: {why_lost.get(url, url)}")
        self._send(version, known)
        self.step = step  # later requests use the new weights

    def close(self) -> None:
        for link in self.links.values():
            with contextlib.suppress(ServerLost, TrainingError):
                link.release()
            link.close()
        self.links = {}
        with contextlib.suppress(OSError):  # it does not exist, or another server's files are in it
            self.folder.rmdir()

    def live_servers(self) -> list[Server]:
        """Returns the servers with the newest weights, rotated by rank to spread the load."""
        live = [s for s in self.servers if s.url in self.live]
        first = self.workers.rank % len(live) if live else 0
        return live[first:] + live[:first]

    def lose(self, url: str, why: str) -> None:
        """Notes that a server has failed, whose prompts then go to the others."""
        if url not in self.live:
            return
        self.live.discard(url)
        self.why_lost[url] = why
        if self.live:
            self.say(f"note: {why}\nThe other servers go on; it joins again once it is back.")

    def all_lost(self) -> str:
        return "no server is left. " + "\n".join(self.why_lost.values())

    def _send(self, version: str, known: set[str]) -> None:
        """Sends the weights from process 0; the others join in gathering them.

        Args:
            known: addresses of the servers that no process has lost.
        """
        weights = self.weights()
        with self.workers.raise_together():  # before the others begin to gather
            if self.workers.is_main:
                self._connect(known)
        with self.workers.raise_together():
            if self.workers.is_main:
                pause = "keep" if self.config.in_flight else "wait"
                links = list(self.links.values())
                lost = weight_transfer.send(links, weights, version, pause)
                for url, why in lost.items():
                    self._drop(url, str(why))
                self.live = set(self.links)
                if not self.live:
                    raise TrainingError(self.all_lost())
            else:
                for _ in weights:  # gathering a sharded policy is collective
                    pass
        self.live = set(self.workers.gather(self.live)[0])

    def _check(self, server: Server) -> None:
        """Raises a UserError if a server's length limit, adapters or weights do not fit the run."""
        if self.longest > server.max_model_len:
            raise UserError(
                f"generation.vllm.servers: {server.url} was started with max_model_len = "
                f"{server.max_model_len}; the longest prompt with its completion takes "
                f"{self.longest} tokens: start it with max_model_len={self.longest}."
            )
        if self.lora_rank is not None and self.lora_rank > (server.max_lora_rank or 0):
            found = server.max_lora_rank
            applies = f"adapters up to rank {found}" if found else "no adapter"
            raise UserError(
                f"generation.vllm.servers: {server.url} applies {applies}, and "
                f"adapter.sync = adapter needs rank {self.lora_rank}; start it with "
                f"max_lora_rank={self.lora_rank}, or {lora.OTHER_WAY}."
            )
        if self.lora_rank is not None and not server.has_own_weights:
            raise UserError(
                f"generation.vllm.servers: {server.url} has the weights of an earlier run, and "
                "adapter.sync = adapter needs the base model's; start it again, or "
                f"{lora.OTHER_WAY}."
            )

    def _connect(self, known: set[str]) -> None:
        """Connects to servers that are new, are back, or were lost by a process."""
        for number, server in enumerate(self.servers):
            worker_ids = server.worker_ids
            if server.url in self.links and server.url in known:
                continue
            is_first = len(self.versions) == 1
            try:
                if not server.greet(self.architecture, timeout=2.0):
                    why = "one was broken off; it has to be started again"
                    raise server.lost("weight update", why)
                self._check(server)
                if self.weight_check is not None and server.dtype < self.weight_check.dtype:
                    began = self.weight_check.dtype
                    why = f"computes in {server.dtype} now, and the run began in {began}"
                    raise UserError(f"{server.url} {why}")
                if server.url in self.links and server.worker_ids == worker_ids:
                    continue  # the same server process, which was only slow
                if (stale := self.links.pop(server.url, None)) is not None:
                    stale.close()
                self.links[server.url] = weight_transfer.connect(
                    server,
                    self.config.transfer,
                    self.run,
                    self.folder / f"server-{number}",
                    None if self.lora_rank is None else self.policy,
                )
                self.why_lost.pop(server.url, None)
                if not is_first:
                    self.say(f"{server.url} is back, and has the weights from now on")
            except (ServerLost, UserError) as error:
                if is_first:
                    raise UserError(str(error)) from error
                self._drop(server.url, str(error))

    def _drop(self, url: str, why: str) -> None:
        """Closes the link to a lost server, and reports the reason."""
        if (link := self.links.pop(url, None)) is not None:
            link.close()
        if url in self.live:
            self.lose(url, why)
        elif self.why_lost.get(url) != why:  # report it once, not at every step
            self.why_lost[url] = why
            self.say(f"note: {why}")

    def differences(self, trainer: list[list[float]]) -> dict[str, float]:
        assert self.weight_check is not None
        found = {}
        with self.workers.raise_together():
            for server in self.live_servers() if self.workers.is_main else ():
                try:
                    scores = server.score(self.weight_check.rows)
                    found[f"server {server.url}"] = self.weight_check.difference(trainer, scores)
                except ServerLost as error:
                    self._drop(server.url, str(error))
            if self.workers.is_main and not found:
                raise TrainingError(self.all_lost())
        self.live, found = self.workers.gather((self.live, found))[0]
        return found


class ServerSession(Session):
    """Sends each prompt to the least busy server; prompts of a lost server go to the others.

    A conversation stays on its server, which has its KV cache.
    """

    generator: ServerGenerator
    joins_requests = True
    rounds_lengths = False

    def __init__(self, generator: ServerGenerator, runner: asyncio.Runner) -> None:
        super().__init__(generator)
        self.runner = runner
        self.client: httpx2.AsyncClient | None = None  # made with the first poll
        self.oldest = generator.step  # completions may not be of older weights
        self.waiting: deque[Ask] = deque()
        self.tasks: dict[asyncio.Task[list[Completion]], tuple[Server, Ask]] = {}
        self.watches: dict[str, asyncio.Task[ServerLost]] = {}  # by address
        self.homes: dict[int, str] = {}  # conversation -> address of its server

    def submit(self, request: Request) -> None:
        engine = self.generator
        engine.check_prompts(request.prompts)
        if request.prompts:
            shortest = min((s.max_model_len for s in engine.live_servers()), default=engine.longest)
            longest = max(len(p.ids) for p in request.prompts)
            whose = "the servers (max_model_len)"
            check_lengths(longest, request.sampling.max_tokens, shortest, whose)
        self.unfinished += len(request.prompts)
        self.waiting.extend(Ask(request, n) for n in range(len(request.prompts)))

    def poll(self, timeout: float = 1.0) -> list[Finished]:
        heartbeat.beat_of_main()
        found = self.runner.run(self._poll(min(timeout, BEAT)))
        self.unfinished -= len(found)
        return found

    def close(self) -> None:
        """Cancels the requests in flight."""
        if self.client is not None:
            self.runner.run(self._close(self.client))

    async def _poll(self, timeout: float) -> list[Finished]:
        engine = self.generator
        if self.client is None:
            # A new connection per request, since servers close kept connections at any time.
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
            no_limit = httpx2.Timeout(None, connect=QUICK)
            self.client = httpx2.AsyncClient(limits=limits, timeout=no_limit, trust_env=False)
        live = engine.live_servers()
        if not live:
            raise TrainingError(engine.all_lost(), alone=True)
        while self.waiting:
            ask = self.waiting[0]
            home = next((self.homes[c] for c in ask.conversations if c in self.homes), None)
            server = engine.in_flight.take(live, ask.rows, home)
            if server is None:
                break
            self.waiting.popleft()
            self.homes |= dict.fromkeys(ask.conversations, server.url)
            self.tasks[asyncio.create_task(self._answer(server, ask, self.client))] = server, ask
            if server.url not in self.watches:
                self.watches[server.url] = asyncio.create_task(server.watch(self.client))
        if not self.tasks:  # other batches of this process occupy all servers
            await asyncio.sleep(min(timeout, SOON))
            return []
        both = [*self.tasks, *self.watches.values()]
        await asyncio.wait(both, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for url, watch in [*self.watches.items()]:
            if watch.done():
                del self.watches[url]
                engine.lose(url, str(watch.result()))
        found = []
        for task, (server, ask) in [*self.tasks.items()]:
            if not task.done() and server.url in engine.live:
                continue
            del self.tasks[task]
            try:
                if not task.done():  # another request or an update has lost the server
                    task.cancel()
                    raise ServerLost(engine.why_lost.get(server.url, server.url))
                group = repeated(task.result(), ask.rows)
                found.append(Finished(ask.request, ask.number, group))
            except ServerLost as error:
                self.waiting.appendleft(ask)
                if not error.is_passing or ask.is_again:
                    engine.lose(server.url, str(error))
                ask.is_again = True
        return found

    async def _answer(
        self, server: Server, ask: Ask, client: httpx2.AsyncClient
    ) -> list[Completion]:
        """Returns a server's completions of a prompt."""
        engine, n = self.generator, ask.number

        def steps(version: str) -> int:
            found = engine.versions.get(version, -1)
            return found if found >= self.oldest else -1

        params = engine.params(ask.request, ask.request.seeds[n])
        version = f"{engine.run}:{engine.step}"
        try:
            return await server.generate(client, ask.request.prompts[n], params, version, steps)
        finally:
            engine.in_flight.give_back(server, ask.rows)

    async def _close(self, client: httpx2.AsyncClient) -> None:
        left = [*self.tasks, *self.watches.values()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await client.aclose()
