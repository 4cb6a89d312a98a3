"""vLLM servers as the generator: prompts spread over them, weights sent, the dead left out.

Each training process asks the servers for its own prompts. Process 0 alone sends weights: with
`Workers` it tells the others which servers have them. A server that fails is left out, its prompts
go to the others; one that is back is given the weights with the next update.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import httpx2
from transformers import PreTrainedModel

from grpo_cli import weight_links
from grpo_cli.canary import Canary
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
        self.rows = recipe.generation.max_rows or IN_FLIGHT
        self.servers = [Server(url.rstrip("/"), say) for url in self.config.servers]
        self.architecture = policy.config.get_text_config().to_dict()
        with workers.together():
            wait_for(self.servers, self.architecture, self.config.start_timeout, say)
            longest = max(
                recipe.generation.max_completion_tokens, recipe.eval.max_completion_tokens or 0
            )
            for server in self.servers:
                if longest_prompt + longest > server.max_model_len:
                    raise UserError(
                        f"generation.vllm.servers: {server.url} was started with max_model_len = "
                        f"{server.max_model_len}; the longest prompt has {longest_prompt} tokens, "
                        f"a completion up to {longest}: start it with {longest_prompt + longest}."
                    )
                if server.dtype != dtype_of(recipe):
                    say(
                        f"note: {server.url} computes in {server.dtype}, the trainer in "
                        f"{dtype_of(recipe)}: their log-probabilities differ by more than they need"
                    )
        if canary is not None:
            canary.dtype = min(s.dtype for s in self.servers)  # bfloat16 before float32
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
        shortest = min(s.max_model_len for s in self.servers)
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
        known = set.intersection(*self.workers.gather(self.live))
        self._send(version, known)
        synced = time.monotonic()
        difference = self._canary(step, version) if self.canary is not None else None
        self.step = step
        metrics = {
            "weights/sync_seconds": synced - begin,
            "weights/servers": float(len(self.live)),
        }
        if difference is not None:
            metrics |= {
                "weights/canary_difference": difference,
                "weights/canary_seconds": time.monotonic() - synced,
            }
        return metrics

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
        """Every request to the server with the fewest; those of a lost one to the others."""
        oldest = self.step
        waiting = deque(range(len(requests)))
        tasks: dict[asyncio.Task[list[Completion]], tuple[Server, int]] = {}
        watches: dict[asyncio.Task[ServerLost], Server] = {}
        ended: list[asyncio.Task[Any]] = []  # of servers that were given up
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx2.Timeout(None, connect=QUICK)

        def steps(version: str) -> int:
            found = self.versions.get(version, -1)
            return found if found >= oldest else -1

        def give_up(server: Server, error: ServerLost) -> None:
            self._lose(server, str(error))
            for task in [t for t, (s, _) in tasks.items() if s is server]:
                ended.append(task)
                waiting.appendleft(tasks.pop(task)[1])
            for watch in [w for w, s in watches.items() if s is server]:
                ended.append(watch)
                del watches[watch]
            for task in ended:
                task.cancel()

        async with httpx2.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as client:
            try:
                while waiting or tasks:
                    live = self._live()
                    if not live:
                        raise TrainingError(self._all_lost(), alone=True)
                    for server in live:
                        if server not in watches.values():
                            watches[asyncio.create_task(server.watch(client))] = server
                    while waiting:
                        load = {id(s): 0 for s in live}
                        for server, _ in tasks.values():
                            load[id(server)] = load.get(id(server), 0) + num_generations
                        server = min(live, key=lambda s: load[id(s)])
                        busy = load[id(server)]
                        if busy and busy + num_generations > self.rows:
                            break
                        number = waiting.popleft()
                        request = server.generate(
                            client,
                            *requests[number],
                            f"{self.run}:{self.step}",
                            steps,
                            self.config.request_timeout,
                        )
                        tasks[asyncio.create_task(request)] = (server, number)
                    await asyncio.wait([*tasks, *watches], return_when=asyncio.FIRST_COMPLETED)
                    for watch in [w for w in watches if w.done()]:
                        if watch in watches:
                            give_up(watches[watch], watch.result())
                    for task in [t for t in tasks if t.done()]:
                        if task not in tasks:  # of a server that was just given up
                            continue
                        server, number = tasks[task]
                        try:
                            group = task.result()
                        except ServerLost as error:
                            give_up(server, error)
                            continue
                        del tasks[task]
                        take(number, group)
            finally:
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
        error: Exception | None = None
        if self.workers.is_main:
            try:
                self._connect(known)
                pause = "keep" if self.config.in_flight else "wait"
                lost = weight_links.send(
                    list(self.links.values()), weights, version, self.config, pause
                )
                for url, why in lost.items():
                    self._drop(url, str(why))
                self.live = set(self.links)
            except (TrainingError, UserError) as caught:
                error = caught
        else:
            for _ in weights:  # a sharded policy is gathered by all
                pass
        with self.workers.together():
            if error is not None:
                raise error
            if self.workers.is_main and not self.live:
                raise TrainingError(self._all_lost())
        self.live = set(self.workers.gather(self.live)[0])

    def _connect(self, known: set[str]) -> None:
        """Greets servers that are new, back, or were lost by some process, and links to them."""
        for number, server in enumerate(self.servers):
            born = list(server.born)
            if server.url in self.links and server.url in known:
                continue
            is_first = not self.versions or len(self.versions) == 1
            try:
                whole = server.greet(self.architecture, timeout=2.0)
                if not whole:
                    raise server.lost(
                        "weight update", "one was broken off; it has to be started again"
                    )
                if server.url in self.links and server.born == born:
                    continue  # it is the same, and was only slow
                if (stale := self.links.pop(server.url, None)) is not None:
                    stale.close()
                self.links[server.url] = weight_links.connect(server, self.config, number)
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
            error: Exception | None = None
            if self.workers.is_main:
                try:
                    found = self._differences(trainer)
                    # Of each, also after one that does not: the first is what it is held to.
                    agreed = {u: self.canary.agrees(f"server {u}", d) for u, d in found.items()}
                    if is_last and not all(agreed.values()):
                        worst = max(found, key=found.__getitem__)
                        error = self.canary.stale(f"server {worst}", found[worst], step)
                except TrainingError as caught:
                    error = caught
            with self.workers.together():
                if error is not None:
                    raise error
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
