"""Conversations with an engine: each completion is followed by a reply of random tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from grpo_cli.generation.base import Generator, Request
from grpo_cli.generation.sampling import Sampling
from grpo_cli.random_streams import derive_seed
from grpo_cli.records import Completion
from tests.conftest import as_prompts


class Conversations:
    """Continues every conversation `turns` times; notes how many requests were made of each."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        num_generations: int,
        sampling: Sampling,
        turns: int,
        *,
        is_repeatable: bool = True,
        held: int | None = None,
    ) -> None:
        """held: a conversation whose first reply comes once all the others are over."""
        self.is_repeatable = is_repeatable
        self.held, self.late = held, list[int]()
        seeds = [11 + n for n in range(len(prompts))]
        numbers = range(len(prompts) * num_generations)
        self.first = Request(as_prompts(prompts), num_generations, sampling, seeds, numbers)
        self.ids = [list(p) for p in prompts for _ in range(num_generations)]
        self.sampled: list[list[tuple[int, float]]] = [[] for _ in self.ids]  # place, log-prob
        self.left = [turns] * len(self.ids)
        self.ready: list[int] = []
        self.log: list[tuple[str, int]] = []  # what was asked and answered, by conversation

    def run(self, generator: Generator) -> None:
        with generator.session() as session:
            session.submit(self.first)
            while session.unfinished or self.ready:
                joins = session.joins_requests and not self.is_repeatable
                if joins or not session.unfinished:
                    session.submit(self._next_turns())
                if not session.unfinished:
                    continue
                for request, number, completions in session.poll(0.02):
                    start = number * len(completions)
                    for j, c in enumerate(completions):
                        self._put(request.conversations[start + j], c)

    def _put(self, n: int, c: Completion) -> None:
        self.log.append(("sampled", n))
        start = len(self.ids[n])
        self.sampled[n] += [(start + i, lp) for i, lp in enumerate(c.sampling_logprobs)]
        self.ids[n] += c.ids
        self.left[n] -= 1
        if self.left[n]:
            stream = random.Random(derive_seed(n, self.left[n]))
            self.ids[n] += [stream.randrange(40, 120) for _ in range(stream.randrange(1, 9))]
            (self.late if n == self.held else self.ready).append(n)
        if not self._others_go_on():
            self.ready, self.late = self.ready + self.late, []

    def _others_go_on(self) -> bool:
        return any(left for n, left in enumerate(self.left) if n != self.held)

    def _next_turns(self) -> Request:
        taken, self.ready = sorted(self.ready), []
        self.log += [("asked", n) for n in taken]
        seeds = [derive_seed(n, self.left[n]) for n in taken]
        prompts = as_prompts([self.ids[n] for n in taken])
        return replace(
            self.first, prompts=prompts, num_generations=1, seeds=seeds, conversations=taken
        )
