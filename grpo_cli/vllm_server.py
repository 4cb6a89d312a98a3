"""vLLM servers as the generator: prompts spread over them, weights sent, the dead left out.

Each training process asks the servers for its own prompts. Process 0 alone sends weights: with
`Workers` it tells the others which servers have them. A server that fails is left out, its prompts
go to the others; one that is back is given the weights with the next update.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import httpx2
from transformers import PreTrainedModel

from grpo_cli import heartbeat, weight_links
from grpo_cli.canary import Canary, timed
from grpo_cli.config import Recipe
from grpo_cli.distributed import Workers
from grpo_cli.drafts import OnGroup, ignore
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.rollouts import Completion
from grpo_cli.sampling import Sampling
from grpo_cli.vllm_client import QUICK, Server, ServerLost, wait_for
from grpo_cli.vllm_requests import check_lengths, repeated, sampling_params
from grpo_cli.vllm_settings import dtype_of, structured_outputs
from grpo_cli.weight_links import Link
from grpo_cli.weights import Weights

IN_FLIGHT = 2048  # completions asked of a server at a time, where generation.max_rows says nothing
BEAT = 1.0  # seconds between two looks whether the run has to end
SOON = 0.1  # seconds until a batch looks again whether a server has room
SOCKETS = 256  # requests of a process to a server at a time; many systems allow 1,024 files in all


class Load:
    """What is being asked of each server, by all batches of this process at once."""

    def __init__(self, most_rows: int) -> None:
        self.most_rows = most_rows
        self.rows: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.lock = threading.Lock()  # batches that are begun ahead are sampled in threads

    def take(self, live: Sequence[Server], rows: int) -> Server | None:
        """The server with the least to do, which a request of `rows` now counts for; None: wait."""
        with self.lock:
            server = min(live, key=lambda s: self.rows[s.url])
            busy = self.rows[server.url]
            full = self.requests[server.url] >= SOCKETS or (busy and busy + rows > self.most_rows)
            if full:
                return None
            self.rows[server.url] += rows
            self.requests[server.url] += 1
            return server

    def give_back(self, server: Server, rows: int) -> None:
        """The request is over, whichever way."""
        with self.lock:
            self.rows[server.url] -= rows
            self.requests[server.url] -= 1


class ServerGenerator:
    """Samples from servers that `grpo serve` has started."""

    samples_from_policy = False
    computes_here = False
    cache_tokens: int | None = None

    def __init__(
        self,
        recipe: Recipe,
        policy: PreTrainedModel,
        longest_prompt: int,
        eos_ids: Sequence[int],
        workers: Workers,
        canary: Canary | None,
        say: Callable[[str], None],
    ) -> None:
        """Waits for the servers; every process does it.

        Raises:
            UserError: one is not up in time, serves another model, or is too short for the data.
        """
        self.config = recipe.generation.vllm
        self.policy, self.workers, self.canary, self.say = policy, workers, canary, say
        self.eos_ids = list(eos_ids)
        self.structured = structured_outputs(self.config)
        self.load = Load(recipe.generation.max_rows or IN_FLIGHT)
        self.dtype = dtype_of(recipe)
        self.needed = longest_prompt + recipe.longest_completion
        self.servers = [Server(url.rstrip("/"), say) for url in self.config.servers]
        self.architecture = policy.config.get_text_config().to_dict()
        with workers.together():
            wait_for(self.servers, self.architecture, self.config.start_timeout, say)
            for server in self.servers:
                self._check(server)
        dtypes = {server.dtype for server in self.servers}
        for dtype in dtypes - {self.dtype}:
            say(
                f"note: servers compute in {dtype}, the trainer in {self.dtype}: their "
                "log-probabilities differ by more than they need"
            )
        if canary is not None:
            canary.dtype = min(dtypes)  # bfloat16 before float32
        # Another run's versions are not taken for this one's.
        self.run = workers.gather(uuid.uuid4().hex[:8])[0]
        self.versions: dict[str, int] = {}  # by what servers report, the step they are of
        self.step = 0
        self.links: dict[str, Link] = {}  # of process 0, by address
        self.live: set[str] = set()  # servers with the newest weights
        self.why_lost: dict[str, str] = {}  # by address, of those that are not among them

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_generations: int,
        sampling: Sampling,
        seeds: Sequence[int],
        on_group: OnGroup = ignore,
    ) -> list[list[Completion]]:
        if not prompts:
            return []
        shortest = min((s.max_model_len for s in self._live()), default=self.needed)
        check_lengths(prompts, sampling.max_tokens, shortest, "the servers (max_model_len)")
        requests = [
            (
                list(ids),
                sampling_params(
                    sampling,
                    num_generations,
                    self.eos_ids,
                    seed if self.config.seeded else None,
                    self.structured,
                ),
            )
            for ids, seed in zip(prompts, seeds, strict=True)
        ]
        groups: dict[int, list[Completion]] = {}

        def take(number: int, found: list[Completion]) -> None:
            groups[number] = repeated(found, num_generations)
            on_group(number, groups[number])

        asyncio.run(self._sample(requests, num_generations, take))
        return [groups[n] for n in range(len(prompts))]

    def update_weights(self, policy: PreTrainedModel, step: int) -> dict[str, float]:
        self.policy = policy
        begin = time.monotonic()
        version = f"{self.run}:{step}"
        self.versions[version] = step
        # A server that any process has lost is looked at anew.
        told = self.workers.gather((self.live, self.why_lost))
        known = set.intersection(*(live for live, _ in told))
        for rank, (live, why_lost) in enumerate(told[1:], 1):
            for url in self.live - live:
                self.say(f"note: process {rank}: {why_lost.get(url, url)}")
        self._send(version, known)
        self.step = step  # what is asked from here on has the new weights
        metrics = {"weights/sync_seconds": time.monotonic() - begin}
        if self.canary is not None:
            metrics |= timed(lambda: self._canary(step, version))
        return metrics | {"weights/servers": float(len(self.live))}

    def rest(self) -> None:
        pass

    def close(self) -> None:
        for link in self.links.values():
            with contextlib.suppress(ServerLost, TrainingError):
                link.server.call("/shutdown_weight_transfer_engine", {})
            link.close()
        self.links = {}

    async def _sample(
        self,
        requests: Sequence[tuple[list[int], dict[str, Any]]],
        num_generations: int,
        take: Callable[[int, list[Completion]], None],
    ) -> None:
        """Every request to the server with the least to do; those of a lost one to the others."""
        oldest = self.step
        waiting = deque(range(len(requests)))
        tasks: dict[asyncio.Task[list[Completion]], tuple[Server, int]] = {}
        watches: dict[asyncio.Task[ServerLost], Server] = {}
        ended: list[asyncio.Task[Any]] = []  # of servers that were given up
        retried: set[int] = set()

        def steps(version: str) -> int:
            found = self.versions.get(version, -1)
            return found if found >= oldest else -1

        def again(task: asyncio.Task[list[Completion]]) -> None:
            server, number = tasks.pop(task)
            self.load.give_back(server, num_generations)
            waiting.appendleft(number)
            ended.append(task)

        def give_up(server: Server) -> None:
            """Its requests are others' now."""
            for task in [t for t, (s, _) in tasks.items() if s is server]:
                again(task)
            for watch in [w for w, s in watches.items() if s is server]:
                ended.append(watch)
                del watches[watch]
            for task in ended:
                task.cancel()

        # A connection for each request: servers close those that they keep when they please.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx2.Timeout(None, connect=QUICK)
        async with httpx2.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as client:
            try:
                while waiting or tasks:
                    heartbeat.beat_of_main()
                    live = self._live()
                    for server in {id(s): s for s, _ in tasks.values()}.values():
                        if server not in live:  # an update has lost it meanwhile
                            give_up(server)
                    if not live:
                        raise TrainingError(self._all_lost(), alone=True)
                    for server in live:
                        if server not in watches.values():
                            watches[asyncio.create_task(server.watch(client))] = server
                    while waiting and (chosen := self.load.take(live, num_generations)):
                        number = waiting.popleft()
                        request = chosen.generate(
                            client,
                            *requests[number],
                            f"{self.run}:{self.step}",
                            steps,
                            self.config.request_timeout,
                        )
                        tasks[asyncio.create_task(request)] = (chosen, number)
                    # Others of this process may have all there is of the servers.
                    patience = BEAT if tasks else SOON
                    await asyncio.wait(
                        [*tasks, *watches],
                        timeout=patience,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                    for watch, server in [(w, s) for w, s in watches.items() if w.done()]:
                        self._lose(server, str(watch.result()))
                        give_up(server)
                    for task in [t for t in tasks if t.done()]:
                        if task not in tasks:  # of a server that was just given up
                            continue
                        server, number = tasks[task]
                        try:
                            group = task.result()
                        except ServerLost as error:
                            if error.is_passing and number not in retried:
                                retried.add(number)
                                again(task)
                                continue
                            self._lose(server, str(error))
                            give_up(server)
                            continue
                        del tasks[task]
                        self.load.give_back(server, num_generations)
                        take(number, group)
            finally:
                for server, _ in tasks.values():
                    self.load.give_back(server, num_generations)
                ended += [*tasks, *watches]
                for task in ended:
                    task.cancel()
                await asyncio.gather(*ended, return_exceptions=True)

    def _live(self) -> list[Server]:
        """Servers with the newest weights, each process with another first."""
        live = [s for s in self.servers if s.url in self.live]
        first = self.workers.rank % len(live) if live else 0
        return live[first:] + live[:first]

    def _lose(self, server: Server, why: str) -> None:
        if server.url not in self.live:
            return
        self.live.discard(server.url)
        self.why_lost[server.url] = why
        if self.live:
            self.say(f"note: {why}\nThe other servers go on; it joins again once it is back.")

    def _all_lost(self) -> str:
        return "no server is left. " + "\n".join(self.why_lost.values())

    def _send(self, version: str, known: set[str]) -> None:
        """Process 0 sends; the others gather along and learn which servers have the weights.

        Args:
            known: addresses of servers that no process has lost.
        """
        weights = Weights(self.policy)
        with self.workers.together():  # before the others begin to gather
            if self.workers.is_main:
                self._connect(known)
        with self.workers.together():
            if self.workers.is_main:
                pause = "keep" if self.config.in_flight else "wait"
                links = list(self.links.values())
                lost = weight_links.send(links, weights, version, self.config, pause)
                for url, why in lost.items():
                    self._drop(url, str(why))
                self.live = set(self.links)
                if not self.live:
                    raise TrainingError(self._all_lost())
            else:
                for _ in weights:  # a sharded policy is gathered by all
                    pass
        self.live = set(self.workers.gather(self.live)[0])

    def _check(self, server: Server) -> None:
        """Raises a UserError if a server that was greeted has too little room."""
        if self.needed > server.max_model_len:
            raise UserError(
                f"generation.vllm.servers: {server.url} was started with max_model_len = "
                f"{server.max_model_len}; the longest prompt with its completion takes "
                f"{self.needed} tokens: start it with max_model_len={self.needed}."
            )

    def _connect(self, known: set[str]) -> None:
        """Greets servers that are new, back, or were lost by some process, and links to them."""
        for number, server in enumerate(self.servers):
            born = list(server.born)
            if server.url in self.links and server.url in known:
                continue
            is_first = len(self.versions) == 1
            try:
                if not server.greet(self.architecture, timeout=2.0):
                    why = "one was broken off; it has to be started again"
                    raise server.lost("weight update", why)
                self._check(server)
                if self.canary is not None and server.dtype < self.canary.dtype:
                    why = (
                        f"computes in {server.dtype} now, and the run began in {self.canary.dtype}"
                    )
                    raise UserError(f"{server.url} {why}")
                if server.url in self.links and server.born == born:
                    continue  # it is the same, and was only slow
                if (stale := self.links.pop(server.url, None)) is not None:
                    stale.close()
                self.links[server.url] = weight_links.connect(server, self.config, self.run, number)
                self.why_lost.pop(server.url, None)
                if not is_first:
                    self.say(f"{server.url} is back, and has the weights from now on")
            except (ServerLost, UserError) as error:
                if is_first:
                    raise UserError(str(error)) from error
                self._drop(server.url, str(error))

    def _drop(self, url: str, why: str) -> None:
        """Forgets the link to a server that is lost."""
        if (link := self.links.pop(url, None)) is not None:
            link.close()
        if url in self.live:
            self._lose(next(s for s in self.servers if s.url == url), why)
        elif self.why_lost.get(url) != why:  # said once, not at every step
            self.why_lost[url] = why
            self.say(f"note: {why}")

    def _canary(self, step: int, version: str) -> float:
        """The largest difference of a server; sends once more if it is too large."""
        assert self.canary is not None
        trainer = self.canary.of_trainer()
        for is_last in (False, True):
            found: dict[str, float] = {}
            agreed: dict[str, bool] = {}
            with self.workers.together():
                if self.workers.is_main:
                    found = self._differences(trainer)
                    # Of each, also after one that does not: the first is what it is held to.
                    agreed = {u: self.canary.agrees(f"server {u}", d) for u, d in found.items()}
                    if is_last and not all(agreed.values()):
                        worst = max((u for u in found if not agreed[u]), key=found.__getitem__)
                        raise self.canary.stale(f"server {worst}", found[worst], step)
            self.live, agreed = self.workers.gather((self.live, agreed))[0]
            if all(agreed.values()):
                return max(found.values(), default=0.0)
            self._send(version, set(self.live))
        raise AssertionError("the second try has raised or agreed")

    def _differences(self, trainer: list[list[float]]) -> dict[str, float]:
        """By address, how far each server is from what the trainer says."""
        assert self.canary is not None
        found = {}
        for server in self._live():
            score = partial(server.score, self.canary.rows, self.config.update_timeout)
            try:
                found[server.url] = self.canary.difference(trainer, score())
            except ServerLost as error:
                self._drop(server.url, str(error))
        if not found:
            raise TrainingError(self._all_lost())
        return found
