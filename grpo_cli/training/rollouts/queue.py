"""The order of prompts in a run, and the groups that wait for a later step.

With `prefetch_steps = k`, the completions of steps n+1 … n+k are sampled while step n is trained
on, with the weights that the servers have: at most k steps lie between sampling and use. A thread
samples them, and they are scored when their step takes them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_cli.config.recipe import Recipe
from grpo_cli.data.prompts import PromptStream
from grpo_cli.distributed import heartbeat
from grpo_cli.distributed.balance import split_balanced
from grpo_cli.distributed.workers import Workers
from grpo_cli.environments.rollouter import Rollouter
from grpo_cli.generation.base import Generator
from grpo_cli.generation.sampling import Sampling
from grpo_cli.records import Group, Prompt

POLL_SECONDS = 1.0  # between two heartbeats while waiting


class PrefetchedGroups:
    """This process's groups of one later step, complete or still being sampled."""

    def __init__(self, sampled: AbstractContextManager[Iterator[Group]]) -> None:
        """Starts a thread that takes the groups as they are sampled."""
        self._arrived: queue.Queue[Group | None] = queue.Queue()
        self._groups: list[Group] = []
        self._error: BaseException | None = None
        self.seconds = 0.0  # time of sampling, once it is complete
        self._thread = threading.Thread(target=self._run, args=(sampled,), daemon=True)
        self._thread.start()

    def _run(self, sampled: AbstractContextManager[Iterator[Group]]) -> None:
        begin = time.monotonic()
        try:
            with sampled as groups:
                for group in groups:
                    self._groups.append(group)
                    self._arrived.put(group)
        except BaseException as error:
            self._error = error
        self.seconds = time.monotonic() - begin
        self._arrived.put(None)

    @property
    def is_done(self) -> bool:
        """Whether `groups` returns or raises without waiting."""
        return not self._thread.is_alive()

    def has_failed(self) -> bool:
        """Waits until sampling has ended; returns whether `groups` will raise."""
        self._wait()
        return self._error is not None

    def groups(self) -> list[Group]:
        """Waits for the groups and returns them; raises the error if sampling failed."""
        self._wait()
        if self._error is not None:
            raise self._error
        return sorted(self._groups, key=lambda group: group.prompt_index)

    def take(self) -> Iterator[Group]:
        """Yields the groups as they arrive; raises the error if sampling failed. Used once."""
        while True:
            heartbeat.beat()
            try:
                group = self._arrived.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            if group is None:
                break
            yield group
        if self._error is not None:
            raise self._error

    def _wait(self) -> None:
        while self._thread.is_alive():
            self._thread.join(POLL_SECONDS)
            heartbeat.beat()


@dataclass(eq=False)
class RolloutQueue:
    """Takes prompts in the order of the run and samples their groups."""

    recipe: Recipe
    stream: PromptStream
    workers: Workers
    generator: Generator
    tokenizer: PreTrainedTokenizerBase
    rollouter: Rollouter = field(default_factory=Rollouter)
    position: int = 0  # prompts taken, over all processes
    signal_share: float = 1.0  # share of the last groups with a signal (dynamic sampling)
    leftover: list[Group] = field(default_factory=list)  # own scored groups, for the next step
    prefetched: deque[PrefetchedGroups] = field(default_factory=deque)  # groups of the next steps
    lengths: dict[int, float] = field(default_factory=dict)  # mean tokens of rows' last completions

    @property
    def epoch(self) -> float:
        """Passes over the data set; prefetched prompts do not count yet."""
        prefetched = len(self.prefetched) * self.recipe.prompts_per_step
        return self.stream.epoch_at(self.position - prefetched)

    @property
    def prefetch_steps(self) -> int:
        """Number of steps whose completions are prefetched."""
        return self.generator.prefetch_steps

    def take_prompts(self, number: int) -> list[tuple[int, Prompt]]:
        """Returns (prompt index, prompt) of this process's share of the next `number` prompts."""
        first = self.position
        self.position += number
        prompts = list(self.stream.take(first, number))
        if self.workers.size == 1:
            return [(position, self.stream.prompt_at(position)) for position, _ in prompts]
        known = self.lengths.values()
        typical = sum(known) / len(known) if known else self.recipe.longest_completion / 2
        group = self.recipe.generation.num_generations
        works = [len(p.ids) + group * self.lengths.get(p.row, typical) for _, p in prompts]
        own = split_balanced(works, self.workers.size)[self.workers.rank]
        return [(prompts[i][0], self.stream.prompt_at(prompts[i][0])) for i in own]

    def sample(self, number: int) -> AbstractContextManager[Iterator[Group]]:
        """Takes the next `number` prompts; returns the groups of this process's share."""
        of = self.recipe.generation
        how = (of.num_generations, Sampling.of(of), self.recipe.seed)
        return self.rollouter.groups(
            self.generator, self.tokenizer, self.take_prompts(number), *how
        )

    def prefetch(self, step: int) -> None:
        """Starts to sample the `prefetch_steps` steps after `step`."""
        while len(self.prefetched) < self.prefetch_steps:
            later = step + len(self.prefetched) + 1
            if later >= self.recipe.steps:
                return
            self.prefetched.append(PrefetchedGroups(self.sample(self.recipe.prompts_per_step)))

    def snapshot(self) -> tuple[Any, ...]:
        """Returns the state that sampling a step changes, for `rollback`."""
        return self.position, self.signal_share, list(self.leftover), deque(self.prefetched)

    def rollback(self, snapshot: tuple[Any, ...]) -> None:
        """Restores a snapshot."""
        self.position, self.signal_share, self.leftover, self.prefetched = snapshot
