"""Samples completions of later steps while the policy is updated (prefetch_steps = k).

While step n is trained on, the completions of steps n+1 … n+k are sampled with the weights that the
servers have: at most k steps lie between sampling and use. A thread samples them, and they are
scored when their step takes them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

from grpo_cli.distributed import heartbeat
from grpo_cli.records import Group

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
