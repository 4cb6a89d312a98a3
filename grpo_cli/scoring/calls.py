"""Calls reward functions that have a timeout or are async, with each completion as it arrives.

A worker that can be killed calls them, or an event loop. Any other function is called in this
process, with all completions of a step; see `bound_reward.BoundReward.call`.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import hashlib
import os
import pickle
import threading
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from grpo_cli.data.sample import Sample
from grpo_cli.scoring.bound_reward import BoundReward, TrainerState
from grpo_cli.scoring.guards import CallResult, blame, contained, no_exit, recorders, with_opened
from grpo_cli.scoring.pool import Call, Pool
from grpo_cli.scoring.processes import overrun
from grpo_cli.scoring.settings import Scoring

CACHE_SIZE = 100_000  # results kept for repeated completions


@dataclass
class RewardExecutor:
    """The worker processes, the event loop and the cache shared by a run's rewards."""

    config: Scoring
    preload: set[str] = field(default_factory=set)
    _pool: Pool | None = None
    _loop: Loop | None = None
    # Pending calls and results; keeping a future per result would take too much memory.
    _known: collections.OrderedDict[bytes, Future[CallResult] | CallResult] = field(
        default_factory=collections.OrderedDict
    )
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(
        self, reward: BoundReward, sample: Sample, state: TrainerState
    ) -> tuple[Future[CallResult], bool]:
        """Starts a function's call with one completion.

        Returns:
            (a future that always completes with a `CallResult`; whether it was cached).
        """
        assert reward.timeout is not None
        arguments = reward.arguments([sample], state)
        key = digest(reward.path, arguments) if reward.cache else None
        if key is not None:
            with self._lock:
                if (known := self._known.get(key)) is not None:
                    self._known.move_to_end(key)
                    return known if isinstance(known, Future) else _done(known), True
        if reward.is_async:
            self._loop = self._loop or Loop()
            future = self._loop.start(reward, arguments)
        else:
            future = self.pool.submit(Call(reward.path, arguments, reward.timeout))
        if key is not None:
            with self._lock:
                self._known[key] = future
                if len(self._known) > CACHE_SIZE:
                    self._known.popitem(last=False)
            future.add_done_callback(functools.partial(self._remember, key))
        return future, False

    def _remember(self, key: bytes, future: Future[CallResult]) -> None:
        with self._lock:
            if self._known.get(key) is not future:
                return
            done = None if future.cancelled() else future.result()
            if done is None or done.error is not None:  # a repeated call may succeed
                del self._known[key]
            else:
                self._known[key] = done

    @property
    def pool(self) -> Pool:
        """The worker processes, started on first use."""
        if self._pool is None:
            self._pool = Pool(self.workers, self.config.worker_memory_gb, sorted(self.preload))
        return self._pool

    @property
    def workers(self) -> int:
        """The number of worker processes: scoring.workers, or this process's share of the cores."""
        return self.config.workers or own_cores()

    def close(self) -> None:
        """Stops the workers and the event loop."""
        if self._pool is not None:
            self._pool.close()
        if self._loop is not None:
            self._loop.close()
        self._pool = self._loop = None


def _done(done: CallResult) -> Future[CallResult]:
    future: Future[CallResult] = Future()
    future.set_result(done)
    return future


def digest(path: str, arguments: Mapping[str, Any]) -> bytes | None:
    """Returns the cache key of a call; None for arguments that cannot be pickled."""
    try:
        return hashlib.blake2b(pickle.dumps((path, arguments)), digest_size=16).digest()
    except Exception:  # pickling a value may raise anything
        return None


def own_cores() -> int:
    """Returns the number of cores in this process's share of the machine."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // local)


class Loop:
    """An event loop in its own thread, which runs all async functions."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="reward-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing:
            # A user's own task may raise these exceptions.
            with contextlib.suppress(SystemExit, KeyboardInterrupt), no_exit():
                self._loop.run_forever()
        self._loop.close()

    def start(self, reward: BoundReward, arguments: dict[str, Any]) -> Future[CallResult]:
        """Starts a call; its future always completes with a `CallResult`."""
        return asyncio.run_coroutine_threadsafe(self._call(reward, arguments), self._loop)

    async def _call(self, reward: BoundReward, arguments: dict[str, Any]) -> CallResult:
        slot = self._slots.setdefault(reward.name, asyncio.Semaphore(reward.concurrency))
        metrics, extras = recorders(arguments)
        async with slot:
            start = time.perf_counter()
            try:
                coroutine: Coroutine[Any, Any, Any] = with_opened(reward.function, arguments)
                task = asyncio.ensure_future(contained(coroutine))
                ended, _ = await asyncio.wait({task}, timeout=reward.timeout)
                if not ended:
                    task.cancel()  # not awaited, since it may ignore the cancellation
                    assert reward.timeout is not None
                    late = time.perf_counter() - start
                    return CallResult(timed_out=True, seconds=late, error=overrun(reward.timeout))
                values, error = task.result(), None
            except asyncio.CancelledError:
                if self._closing:
                    raise
                values, error = None, "CancelledError"  # a coroutine that it awaited was cancelled
            except Exception as raised:
                values, error = None, blame(raised)
        return CallResult(values, metrics, extras, time.perf_counter() - start, error)

    def close(self) -> None:
        """Cancels the pending calls and ends the thread."""
        self._closing = True

        async def cancel() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        try:
            asyncio.run_coroutine_threadsafe(cancel(), self._loop).result(timeout=5)
        except Exception:  # a function ignores its cancellation: the daemon thread ends at exit
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
