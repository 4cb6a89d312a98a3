"""A feed of conversations: each completion is followed by a reply of random tokens."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from grpo_cli.generation.base import Generator, Request, Work
from grpo_cli.generation.sampling import Sampling
from grpo_cli.random_streams import derive_seed
from grpo_cli.records import Completion
from tests.conftest import as_prompts


class Conversations:
    """Continues every conversation `turns` times; notes how many requests were made of each."""

    seconds_waited = 0.0

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        num_generations: int,
        sampling: Sampling,
        turns: int,
        *,
        is_repeatable: bool = True,
        delay: Callable[[int], float] = lambda conversation: 0.0,
    ) -> None:
        """delay: seconds that a conversation's replies take."""
        self.is_repeatable, self.turns, self.delay, self.sampling = (
            is_repeatable,
            turns,
            delay,
            sampling,
        )
        self.size, self.num_generations = len(prompts) * num_generations, num_generations
        self.seeds = [11 + n for n in range(len(prompts))]
        self.first = Request(
            as_prompts(prompts), num_generations, sampling, self.seeds, range(self.size)
        )
        self.ids = [list(p) for p in prompts for _ in range(num_generations)]
        self.sampled: list[list[tuple[int, float]]] = [[] for _ in self.ids]  # place, log-prob
        self.left = [turns] * self.size
        self.ready: list[int] = []
        self.waiting = 0
        self.notified: Callable[[], None] = lambda: None
        self.lock = threading.Lock()
        self.log: list[tuple[str, int]] = []  # what was asked and answered, by conversation

    def run(self, generator: Generator) -> None:
        generator.converse(self.first, self.begun, self)

    def begun(self, number: int, group: list[Completion]) -> None:
        for j, c in enumerate(group):
            self._put(number * self.num_generations + j, c)

    def _put(self, n: int, c: Completion) -> None:
        self.log.append(("sampled", n))
        start = len(self.ids[n])
        self.sampled[n] += [(start + i, lp) for i, lp in enumerate(c.sampling_logprobs)]
        self.ids[n] += c.ids
        self.left[n] -= 1
        if not self.left[n]:
            return
        stream = random.Random(derive_seed(n, self.left[n]))
        reply = [stream.randrange(40, 120) for _ in range(stream.randrange(1, 9))]

        def answer() -> None:
            with self.lock:
                self.ids[n] += reply
                self.ready.append(n)
                self.waiting -= 1
            self.notified()

        with self.lock:
            self.waiting += 1
        if self.delay(n):
            threading.Timer(self.delay(n), answer).start()
        else:
            answer()

    def take(self, *, exact: bool = False) -> list[Work]:
        with self.lock:
            taken, self.ready = sorted(self.ready), []
        return [self._work(taken)] if taken else []

    def _work(self, taken: list[int]) -> Work:
        self.log += [("asked", n) for n in taken]
        seeds = [derive_seed(n, self.left[n]) for n in taken]
        request = replace(
            self.first,
            prompts=as_prompts([self.ids[n] for n in taken]),
            num_generations=1,
            seeds=seeds,
            conversations=taken,
        )
        return request, partial(self._followed, taken)

    def _followed(self, taken: list[int], i: int, group: list[Completion]) -> None:
        self._put(taken[i], group[0])

    def take_round(self) -> Work:
        works = self.take()
        return works[0] if works else self._work([])

    def wait(self, patience: float) -> bool:
        end = time.monotonic() + 30
        while self.waiting and (self.is_repeatable or not self.ready):
            assert time.monotonic() < end, "it waits for ever"
            time.sleep(0.005)
        return bool(self.ready)

    def is_waiting(self) -> bool:
        with self.lock:
            return bool(self.waiting or self.ready)

    def is_open(self, conversation: int) -> bool:
        return self.left[conversation] > 0

    def notify(self, call: Callable[[], None]) -> None:
        self.notified = call
