"""How a reward function is called: with a whole batch, in a killable worker, or on an event loop.

A function with a timeout, and every async one, gets one completion at a time and starts on it as
soon as the completion is there. Any other gets a step's completions in one call, in this process.
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
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grpo_cli.config import Scoring
from grpo_cli.pool import Call, Done, Pool, overrun
from grpo_cli.pool_worker import answer, blame, recorders
from grpo_cli.registry import STANDARD, RewardFunction, Signature, TrainerState

if TYPE_CHECKING:
    from grpo_cli.rollouts import Rollout

REMEMBERED = 100_000  # results kept for completions that come again


@dataclass(frozen=True)
class Sample:
    """What reward functions are told of one completion."""

    row: int  # of the data set
    prompt: Any  # a string, or messages where the data set is a chat
    text: str
    ids: Sequence[int] | None  # tokens as sampled, where they are known
    columns: Mapping[str, Any]

    @classmethod
    def of(cls, rollout: Rollout) -> Sample:
        prompt, completion = rollout.prompt, rollout.completion
        return cls(prompt.row, prompt.text, rollout.text, completion.ids, prompt.columns)


@dataclass(frozen=True)
class Term:
    """One reward of a recipe, ready to be called."""

    name: str
    path: str  # module:function
    function: RewardFunction
    signature: Signature
    args: Mapping[str, Any]
    weight: float
    positions: str  # what it counts the ends of steps in
    is_async: bool
    timeout: float | None  # seconds for one completion; None: called with a batch, in this process
    timeout_value: float | None
    on_error: str
    cache: bool
    concurrency: int  # completions at once, of an async function
    preload: tuple[str, ...] = ()

    def arguments(self, samples: Sequence[Sample], state: TrainerState) -> dict[str, Any]:
        """What the function is called with, but for log_metric and log_extra, which are None."""
        chat = isinstance(samples[0].prompt, list)
        standard: dict[str, Any] = {
            "prompts": [s.prompt for s in samples],
            "completions": [
                [{"role": "assistant", "content": s.text}] if chat else s.text for s in samples
            ],
            "trainer_state": state,
            "log_metric": None,
            "log_extra": None,
        }
        if all(s.ids is not None for s in samples):
            standard["completion_ids"] = [list(s.ids or ()) for s in samples]
        # What is remembered must not depend on the step, nor on a name that nothing asked for.
        named = self.signature.standard if self.cache else STANDARD
        arguments = {
            name: value
            for name, value in standard.items()
            if name in named and self.signature.takes_standard(name)
        }
        for column in samples[0].columns:
            if column not in STANDARD and self.signature.takes(column):
                arguments[column] = [s.columns[column] for s in samples]
        return {**arguments, **self.args}

    def call(self, samples: Sequence[Sample], state: TrainerState) -> Done:
        """Calls it here and now."""
        return answer(self.function, self.arguments(samples, state))


@dataclass
class Crew:
    """The worker processes, the event loop and the memory that a run's rewards share."""

    config: Scoring
    preload: set[str] = field(default_factory=set)
    _pool: Pool | None = None
    _loop: Loop | None = None
    # Calls under way, and what has come of others: a bare future of each would fill the memory.
    _known: collections.OrderedDict[bytes, Future[Done] | Done] = field(
        default_factory=collections.OrderedDict
    )
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, term: Term, sample: Sample, state: TrainerState) -> tuple[Future[Done], bool]:
        """Has a function called with one completion.

        Returns:
            (a future that always ends, with a `Done`; whether it was known already).
        """
        assert term.timeout is not None
        arguments = term.arguments([sample], state)
        key = digest(term.path, arguments) if term.cache else None
        if key is not None:
            with self._lock:
                if (known := self._known.get(key)) is not None:
                    self._known.move_to_end(key)
                    return known if isinstance(known, Future) else _done(known), True
        if term.is_async:
            self._loop = self._loop or Loop()
            future = self._loop.start(term, arguments)
        else:
            future = self.pool.submit(Call(term.path, arguments, term.timeout))
        if key is not None:
            with self._lock:
                self._known[key] = future
                if len(self._known) > REMEMBERED:
                    self._known.popitem(last=False)
            future.add_done_callback(functools.partial(self._remember, key))
        return future, False

    def _remember(self, key: bytes, future: Future[Done]) -> None:
        with self._lock:
            if self._known.get(key) is not future:
                return
            done = None if future.cancelled() else future.result()
            if done is None or done.error is not None:  # the next time may end better
                del self._known[key]
            else:
                self._known[key] = done

    def forget(self) -> None:
        """Everything is computed anew from here on."""
        with self._lock:
            self._known.clear()

    @property
    def pool(self) -> Pool:
        """The worker processes, started when first needed."""
        if self._pool is None:
            self._pool = Pool(self.workers, self.config.worker_memory_gb, sorted(self.preload))
        return self._pool

    @property
    def workers(self) -> int:
        """Worker processes of this process: its share of the machine's cores, unless set."""
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return self.config.workers or max(1, (cores or 1) // local)

    def close(self) -> None:
        """Ends the workers and the event loop."""
        if self._pool is not None:
            self._pool.close()
        if self._loop is not None:
            self._loop.close()
        self._pool = self._loop = None


def _done(done: Done) -> Future[Done]:
    future: Future[Done] = Future()
    future.set_result(done)
    return future


def digest(path: str, arguments: Mapping[str, Any]) -> bytes | None:
    """What a call is remembered by; None for arguments that have no bytes."""
    try:
        return hashlib.blake2b(pickle.dumps((path, arguments)), digest_size=16).digest()
    except Exception:  # whatever a value's own pickling raises
        return None


class Loop:
    """One event loop in a thread of its own, on which async functions wait together."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="reward-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # of a task that someone made
                self._loop.run_forever()
        self._loop.close()

    def start(self, term: Term, arguments: dict[str, Any]) -> Future[Done]:
        return asyncio.run_coroutine_threadsafe(self._call(term, arguments), self._loop)

    async def _call(self, term: Term, arguments: dict[str, Any]) -> Done:
        slot = self._slots.setdefault(term.name, asyncio.Semaphore(term.concurrency))
        metrics, extras = recorders(arguments)
        async with slot:
            start = time.perf_counter()
            try:
                coroutine: Coroutine[Any, Any, Any] = term.function(**arguments)  # type: ignore[assignment]
                task = asyncio.ensure_future(_staying(coroutine))
                ended, _ = await asyncio.wait({task}, timeout=term.timeout)
                if not ended:
                    task.cancel()  # and not waited for: it may not let itself be cancelled
                    assert term.timeout is not None
                    late = time.perf_counter() - start
                    return Done(timed_out=True, seconds=late, error=overrun(term.timeout))
                values, error = task.result(), None
            except asyncio.CancelledError:
                if self._closing:
                    raise
                values, error = None, "CancelledError"  # of what it waited for
            except Exception as raised:
                values, error = None, blame(raised)
        return Done(values, metrics, extras, time.perf_counter() - start, error)

    def close(self) -> None:
        """Cancels what is under way and ends the thread."""
        self._closing = True

        async def cancel() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        try:
            asyncio.run_coroutine_threadsafe(cancel(), self._loop).result(timeout=5)
        except Exception:  # a function that does not let itself be cancelled: a daemon thread's end
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)


async def _staying(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What the coroutine returns. A SystemExit would end the loop, and with it everyone's calls."""
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
