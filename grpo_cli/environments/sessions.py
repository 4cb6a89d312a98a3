"""Sessions: the environments of rollouts, in worker processes that are killed after a deadline.

    sessions = Sessions(settings, {"multiply": "my_module:multiply"})
    session = sessions.open("", row, seed)
    session.reset().result()        # an Observation, or an EnvironmentFailure is raised
    session.step({"role": "assistant", "content": "I guess 7."}).result()
    session.finish().result()       # the rewards of the episode

A session stays in one worker, and a worker has many sessions. If a worker is killed, all its
sessions fail; the failure tells whether the session's own call was at fault. Tools without an
environment have no state. Their sessions move to another worker, and only the turn that ended the
worker is answered with errors.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from grpo_cli.environments.adapters import Spec
from grpo_cli.environments.deadlines import BEAT_SECONDS, GRACE, Mark
from grpo_cli.environments.functions import (
    EnvironmentFailure,
    answer_to,
    as_observation,
    calls_of,
    failure,
)
from grpo_cli.environments.protocol import Message, Observation
from grpo_cli.environments.session_worker import Reply, SessionCall
from grpo_cli.environments.settings import EnvironmentSettings
from grpo_cli.errors import UserError
from grpo_cli.scoring.calls import own_cores
from grpo_cli.scoring.processes import Worker, WorkerProcesses, overrun

CHECK_SECONDS = 1.0  # interval between checks of a worker in which no call holds the thread
CLOSE_SECONDS = 2.0  # time for workers to close their environments at the end
MAX_MOVES = 3  # maximum moves of a call to another worker, each after the loss of a worker


class EnvironmentSession:
    """The environment of one rollout. One call at a time; each future completes by a deadline.

    A future may raise an `EnvironmentFailure`, after which the session is over.
    """

    def __init__(
        self, sessions: Sessions, number: int, name: str, row: Mapping[str, Any], seed: int
    ) -> None:
        self._sessions, self.number = sessions, number
        self._begin = name, dict(row), seed
        self.failure: EnvironmentFailure | None = None
        self.worker: _Worker | None = None  # used only in the thread of the workers

    def reset(self) -> Future[Observation]:
        """Makes the environment and begins the episode."""
        return self._sessions.submit("reset", self, self._begin)

    def step(self, message: Message) -> Future[Observation]:
        """Passes a turn of the model to the environment."""
        return self._sessions.submit("step", self, message)

    def finish(self) -> Future[Observation]:
        """Requests the rewards of the episode and releases the environment."""
        return self._sessions.submit("finish", self, None)

    def abandon(self) -> None:
        """Releases the environment, even in the middle of a call, which then fails."""
        self._sessions.submit("abandon", self, None)


@dataclass(eq=False)
class _Call:
    """A call and its future."""

    session: EnvironmentSession
    request: SessionCall
    future: Future[Any] = field(default_factory=Future)
    moves: int = 0  # number of moves to another worker

    def fail(self, failed: EnvironmentFailure) -> None:
        """Sets a failure, which ends the session."""
        self.session.failure = self.session.failure or failed
        if not self.future.done():
            self.future.set_exception(failed)


@dataclass(eq=False)
class _Worker(Worker):
    mark: Mark = field(init=False)
    queue: list[_Call] = field(default_factory=list)  # calls to send
    calls: dict[int, _Call] = field(default_factory=dict)  # pending calls by number
    sessions: set[EnvironmentSession] = field(default_factory=set)
    asked: float = 0.0  # time of the last message to it
    running: int = 0  # number of the call that held the thread when it was killed; 0: none


class Sessions(WorkerProcesses[_Worker]):
    """Opens sessions in worker processes.

    Args:
        settings: the recipe's `environment`.
        tools: the recipe's `tools`.
        memory_gb: address space of each worker process, in GiB; None: no limit.
    """

    module = "grpo_cli.environments.session_worker"
    worker_type = _Worker

    def __init__(
        self,
        settings: EnvironmentSettings,
        tools: Mapping[str, str] | None = None,
        memory_gb: float | None = 4.0,
    ) -> None:
        self.spec = Spec(**vars(settings), tools=dict(tools or {}))
        self._numbers = itertools.count(1)
        super().__init__("environments", settings.workers or own_cores(), memory_gb)

    def open(self, name: str, row: Mapping[str, Any], seed: int) -> EnvironmentSession:
        """Returns a new session, whose first call must be `reset`.

        Args:
            name: key in `environment.by_name`; "" if there is only one environment.
            row: the columns of the data set's row.
            seed: the environment's seed, the same for all rollouts of a group.
        """
        return EnvironmentSession(self, next(self._numbers), name, row, seed)

    def schemas(self, name: str = "") -> list[dict[str, Any]]:
        """Returns the JSON schemas of an environment's tools that are known before `reset`.

        Raises:
            UserError: a tool or a class cannot be used.
        """
        with self._mistakes(name):
            return self.submit("schemas", self.open(name, {}, 0), name).result()  # type: ignore[no-any-return]

    def try_out(self, name: str, row: Mapping[str, Any]) -> None:
        """Makes and resets an environment.

        Raises:
            UserError: the constructor or `reset` fails.
        """
        session = self.open(name, row, 0)
        with self._mistakes(name):
            session.reset().result()
        session.abandon()

    @contextlib.contextmanager
    def _mistakes(self, name: str) -> Iterator[None]:
        """Raises an environment's failure as the user's mistake."""
        try:
            yield
        except EnvironmentFailure as failed:
            what = self.spec.by_name.get(name, self.spec.path or self.spec.mcp or "tools")
            raise UserError(f"the environment {what} cannot be used: {failed}.") from failed

    def submit(self, kind: str, session: EnvironmentSession, payload: Any) -> Future[Any]:
        """Queues a call; its future always completes. Thread-safe."""
        call = _Call(session, SessionCall(next(self._numbers), session.number, kind, payload))
        self.hand_over(call)
        return call.future

    def close(self) -> None:
        """Ends all sessions; pending calls fail."""
        self.end("the environments were closed")

    def leave(self) -> None:
        """Lets idle workers close their environments, then ends all workers."""
        idle = [w for w in self.workers if w.ready and not w.calls]
        for worker in idle:
            with contextlib.suppress(OSError):
                worker.pipe.send("close")
        end = time.monotonic() + CLOSE_SECONDS
        for worker in idle:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, end - time.monotonic()))
        super().leave()

    # Sending calls to workers

    def take_calls(self) -> None:
        """Assigns the new calls to workers, and sends each worker its calls."""
        with self.lock:
            calls, self.inbox = self.inbox, []
        for call in calls:
            if call.request.kind == "abandon":
                self._abandon(call.session, call)
            elif call.session.failure is not None:
                call.fail(call.session.failure)
            else:
                self._assign(call)
        for worker in list(self.workers):
            if worker.ready:
                self._send(worker)

    def _assign(self, call: _Call) -> None:
        worker = call.session.worker or self._least_loaded()
        if worker is None:
            with self.lock:
                self.inbox.append(call)  # until a worker can be started
            return
        call.session.worker = worker
        worker.sessions.add(call.session)
        worker.queue.append(call)

    def _abandon(self, session: EnvironmentSession, call: _Call) -> None:
        session.failure = session.failure or EnvironmentFailure(
            "env_error", "the session was abandoned", own=False
        )
        if (worker := session.worker) is not None:
            for other in [*worker.queue, *worker.calls.values()]:
                if other.session is session:
                    other.fail(session.failure)
            worker.queue = [c for c in worker.queue if c.session is not session]
            worker.calls = {n: c for n, c in worker.calls.items() if c.session is not session}
            worker.sessions.discard(session)
            worker.queue.append(call)

    def _least_loaded(self) -> _Worker | None:
        """Returns the worker with the fewest sessions; starts one if none is idle."""
        found = min(self.workers, key=lambda w: len(w.sessions) + len(w.queue), default=None)
        is_idle = found is not None and not (found.sessions or found.queue or found.calls)
        if is_idle or len(self.workers) == self.size:
            return found
        try:
            with tempfile.TemporaryFile() as shared:
                shared.truncate(Mark.SIZE)
                mark = Mark(shared.fileno())
                worker = self.start_worker(self.spec, [shared.fileno()])
        except OSError as error:  # a full /tmp, or too many open files
            if not self.workers:
                self.start_error = str(error)
            return found
        if worker is not None:
            worker.mark = mark
        return worker or found

    def _send(self, worker: _Worker) -> None:
        queue, worker.queue = worker.queue, []
        for number, call in enumerate(queue):
            try:
                worker.pipe.send(call.request)
            except OSError:  # it died, or a call that holds the GIL keeps it from reading
                worker.queue = queue[number:]
                running, until, _ = worker.mark.read()
                is_late = running != 0 and time.monotonic() > until
                self.dismiss(worker, overrun(self.spec.seconds) if is_late else None, late=is_late)
                return
            except Exception as error:  # a row that cannot be pickled
                text = f"its row or message cannot be sent: {type(error).__name__}: {error}"
                call.fail(EnvironmentFailure("env_error", text))
                continue
            if call.request.kind != "abandon":
                worker.calls[call.request.number] = call
            worker.asked = time.monotonic()

    # Replies

    def received(self, worker: _Worker, message: Reply) -> None:
        """Completes a call, unless it was abandoned."""
        if (call := worker.calls.pop(message.number, None)) is None:
            return
        result = message.result
        if isinstance(result, Exception) or call.request.kind in ("finish", "schemas"):
            worker.sessions.discard(call.session)
        if isinstance(result, EnvironmentFailure):
            call.fail(result)
        elif isinstance(result, UserError):
            call.future.set_exception(result)
        else:
            call.future.set_result(result)

    def unreadable(self, worker: _Worker, error: Exception) -> None:
        """Ends a worker in which an environment has written into the pipe."""
        self.dismiss(worker, f"it sent what cannot be read ({type(error).__name__})")

    def next_check(self, worker: _Worker) -> float:
        """Returns the deadline of the call that holds the thread, at most `CHECK_SECONDS` away."""
        if not worker.calls:
            return math.inf
        number, until, _ = worker.mark.read()
        soon = time.monotonic() + CHECK_SECONDS
        return min(until, soon) if number else soon

    def check(self, worker: _Worker) -> None:
        """Ends a worker whose call is past its deadline, and handles one that has died."""
        if not worker.calls:
            return
        now = time.monotonic()
        number, until, beat = worker.mark.read()
        patience = self.spec.seconds + GRACE + 4 * BEAT_SECONDS
        is_late = now > until if number else now - max(beat, worker.asked) > patience
        if is_late and number:  # read twice: another process's stores may appear out of order
            time.sleep(0.001)
            is_late = worker.mark.read()[:2] == (number, until)
        if is_late:
            self.dismiss(worker, overrun(self.spec.seconds), late=True)
        elif worker.process.poll() is not None:  # a child process may keep its socket open
            self.dismiss(worker)

    def dismiss(self, worker: _Worker, reason: str | None = None, *, late: bool = False) -> None:
        """Notes which call holds the thread, then kills the worker."""
        worker.running = worker.mark.read()[0]  # before the kill, during which another may begin
        super().dismiss(worker, reason, late=late)

    def lost(self, worker: _Worker, reason: str, *, late: bool) -> None:
        """Moves or fails the calls of a worker that has been killed."""
        running = worker.running
        # Between slices the culprit is unknown, so every pending call is a suspect.
        suspects = {running} if running in worker.calls else set(worker.calls)
        for session in worker.sessions:
            session.worker = None
        for call in [*worker.calls.values(), *worker.queue]:
            if self.ended is not None:
                call.fail(EnvironmentFailure("env_error", self.ended, own=False))
            elif call.request.kind != "abandon":
                number = call.request.number
                self._move(call, number in suspects, number == running, late, reason)
        for session in worker.sessions:
            if self.spec.has_state and session.worker is None and session.failure is None:
                session.failure = _bystander(reason)

    def _move(self, call: _Call, is_suspect: bool, is_known: bool, late: bool, text: str) -> None:
        """Repeats a lost worker's call in another worker if no state is lost, else fails it.

        Args:
            is_suspect: whether the call may have ended the worker.
            is_known: whether it certainly has.
        """
        needs_no_state = not self.spec.has_state or call.request.kind in ("reset", "schemas")
        call.moves += 1
        if not self.spec.has_state and call.request.kind == "step" and is_known:
            calls = calls_of(call.request.payload)
            answers = [answer_to(c, failure(text), failed=True, timed_out=late) for c in calls]
            call.future.set_result(as_observation(answers))
        elif call.moves <= MAX_MOVES and not is_known and needs_no_state:
            self._assign(call)
        elif is_suspect or needs_no_state:
            stop_reason = "env_timeout" if late else "env_error"
            call.fail(EnvironmentFailure(stop_reason, f"{call.request.called}: {text}"))
        else:
            call.fail(_bystander(text))

    def fail(self, call: _Call, reason: str) -> None:
        """Fails a call that no worker has taken."""
        call.fail(EnvironmentFailure("env_error", reason, own=self.ended is None))

    def fail_waiting(self, reason: str) -> None:
        """Fails the calls that no worker has taken yet."""
        for worker in self.workers:
            if not worker.ready:
                queue, worker.queue = worker.queue, []
                for call in queue:
                    self.fail(call, reason)
        super().fail_waiting(reason)


def _bystander(text: str) -> EnvironmentFailure:
    said = f"another environment in the same worker process failed: {text}"
    return EnvironmentFailure("env_error", said, own=False)
