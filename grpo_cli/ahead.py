"""Completions that are begun ahead, while the policy is updated (generation.vllm.overlap = k).

While step n is trained on, those of steps n+1 … n+k are being sampled, with the weights that the
servers have: at most k optimizer steps lie between sampling and use. They are sampled in a thread
and scored when their step takes them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from grpo_cli import heartbeat
from grpo_cli.rollouts import Group, Rollout

LOOK_SECONDS = 1.0  # between two looks whether the run has to end

Arrived = Callable[[list[Rollout]], None]


class Batch:
    """One step's completions of this process, under way or done."""

    def __init__(self, sample: Callable[[Arrived], list[Group]]) -> None:
        """Begins it. Args: sample: as `generation.sample`, but for what `arrived` is."""
        self._arrived: queue.Queue[list[Rollout] | None] = queue.Queue()
        self._groups: list[Group] = []
        self._error: BaseException | None = None
        self.seconds = 0.0  # that sampling took, once it is done
        self._thread = threading.Thread(target=self._run, args=(sample,), daemon=True)
        self._thread.start()

    def _run(self, sample: Callable[[Arrived], list[Group]]) -> None:
        begin = time.monotonic()
        try:
            self._groups = sample(self._arrived.put)
        except BaseException as error:
            self._error = error
        self.seconds = time.monotonic() - begin
        self._arrived.put(None)

    @property
    def is_done(self) -> bool:
        """Whether `groups` returns or raises at once."""
        return not self._thread.is_alive()

    def has_failed(self) -> bool:
        """Waits for the end; True if `groups` will raise."""
        self._wait()
        return self._error is not None

    def groups(self) -> list[Group]:
        """Waits until all are there. Raises what sampling raised."""
        self._wait()
        if self._error is not None:
            raise self._error
        return self._groups

    def take(self, arrived: Arrived) -> list[Group]:
        """The same, and each group's rollouts to `arrived` as soon as they are there; once."""
        while True:
            heartbeat.beat()
            try:
                rollouts = self._arrived.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                continue
            if rollouts is None:
                return self.groups()
            arrived(rollouts)

    def _wait(self) -> None:
        while self._thread.is_alive():
            self._thread.join(LOOK_SECONDS)
            heartbeat.beat()


def done(groups: list[Group]) -> Batch:
    """A batch that a checkpoint has kept."""

    def sample(arrived: Arrived) -> list[Group]:
        for group in groups:
            arrived(group.rollouts)
        return groups

    return Batch(sample)
