"""Sessions: the environments of rollouts, in worker processes that are killed after a deadline.

    sessions = Sessions(settings, {"multiply": "my_module:multiply"})
    session = sessions.open("", row, seed)
    session.reset().result()        # an Observation, or an EnvironmentFailure is raised
    session.step({"role": "assistant", "content": "I guess 7."}).result()
    session.finish().result()       # the rewards of the episode

A session stays in one worker, and a worker has many sessions. If a worker is killed, all its
sessions fail; the failure tells whether the session's own call was at fault. Tools without an
environment have no state. Their sessions move to another worker, and only the call that ended the
worker is answered with an error.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from grpo_cli.config.schema import EnvironmentSettings
from grpo_cli.environments.adapters import Spec
from grpo_cli.environments.deadlines import BEAT_SECONDS, GRACE, Deadlines, Mark, overrun
from grpo_cli.environments.functions import (
    Answer,
    calls_of,
    clean_text,
    failure,
    name_of,
    shortened,
)
from grpo_cli.environments.protocol import Message, Observation, ToolCall
from grpo_cli.environments.session_worker import (
    READ_BYTES,
    Host,
    Reader,
    Reply,
    Request,
    packed,
)
from grpo_cli.errors import UserError
from grpo_cli.scoring import processes
from grpo_cli.scoring.calls import own_cores

CHECK_SECONDS = 1.0  # interval between checks of a worker in which no call holds the thread
CLOSE_SECONDS = 2.0  # time for workers to close their environments at the end
TEXT_LIMIT = 2000  # maximum characters of a failure's message
MAX_MOVES = 3  # maximum moves of a call to another worker, each after the loss of a worker


class EnvironmentFailure(Exception):  # noqa: N818
    """Raised if an environment failed. Its rollout can be replayed in a fresh environment.

    Args:
        stop_reason: "env_error" or "env_timeout".
        own: whether the session's own call was at fault, not another session's in its worker.
    """

    def __init__(self, stop_reason: str, text: str, own: bool = True) -> None:
        super().__init__(clean_text(text, TEXT_LIMIT))
        self.stop_reason, self.own = stop_reason, own


class Session:
    """The environment of one rollout. One call at a time; each future completes by a deadline.

    A future may raise an `EnvironmentFailure`, after which the session is over.
    """

    def __init__(
        self, home: _Home, number: int, name: str, row: Mapping[str, Any], seed: int
    ) -> None:
        self._home, self.number = home, number
        self._begin = name, dict(row), seed
        self.failure: EnvironmentFailure | None = None
        self.worker: _Worker | None = None  # its worker; used only in the home's thread

    def reset(self) -> Future[Observation]:
        """Makes the environment and begins the episode."""
        return self._call("reset", self._begin)

    def step(self, message: Message) -> Future[Observation]:
        """Passes a turn of the model to the environment."""
        return self._call("step", message)

    def finish(self) -> Future[Observation]:
        """Requests the rewards of the episode and releases the environment."""
        return self._call("finish", None)

    def abandon(self) -> None:
        """Releases the environment, even in the middle of a call, which then fails."""
        self._home.submit(_Call("abandon", self, None))

    def _call(self, kind: str, payload: Any) -> Future[Observation]:
        call = _Call(kind, self, payload)
        self._home.submit(call)
        return call.future


class Sessions:
    """Opens sessions in worker processes or, without isolation, in a thread of this process.

    Args:
        settings: the recipe's `environment`.
        tools: the recipe's `tools`.
    """

    def __init__(
        self, settings: EnvironmentSettings, tools: Mapping[str, str] | None = None
    ) -> None:
        self.spec = Spec(
            path=settings.path,
            args=dict(settings.args),
            by_name=dict(settings.by_name),
            mcp=settings.mcp,
            tools=dict(tools or {}),
            seconds=settings.seconds,
        )
        self._numbers = itertools.count(1)
        # Without isolation nothing else detects a call that hangs; imports have no deadline.
        self._patience = None if settings.isolate else processes.START_SECONDS + settings.seconds
        self._home: _Home = (
            _Workers(self.spec, settings.workers or own_cores(), settings.memory_gb)
            if settings.isolate
            else _Thread(self.spec)
        )

    def open(self, name: str, row: Mapping[str, Any], seed: int) -> Session:
        """Returns a new session, whose first call must be `reset`.

        Args:
            name: key in `environment.by_name`; "" if there is only one environment.
            row: the columns of the data set's row.
            seed: the environment's seed, the same for all rollouts of a group.
        """
        return Session(self._home, next(self._numbers), name, row, seed)

    def schemas(self, name: str = "") -> list[dict[str, Any]]:
        """Returns the JSON schemas of an environment's tools that are known before `reset`.

        Raises:
            UserError: a tool or a class cannot be used.
        """
        return self._ask("schemas", name)  # type: ignore[no-any-return]

    def try_out(self, name: str, row: Mapping[str, Any], seed: int = 0) -> Observation:
        """Makes, resets and closes an environment; returns its first observation.

        An error in `close` is only printed, as in a run.

        Raises:
            UserError: the constructor or `reset` fails.
        """
        return self._ask("try", (name, dict(row), seed))  # type: ignore[no-any-return]

    def _ask(self, kind: str, payload: Any) -> Any:
        call = _Call(kind, None, payload)
        self._home.submit(call)
        what = self.spec.path or self.spec.mcp or "tools"
        name = payload if isinstance(payload, str) else payload[0]
        what = self.spec.by_name.get(name, what)
        try:
            return call.future.result(self._patience)
        except EnvironmentFailure as failed:
            raise UserError(f"the environment {what} cannot be used: {failed}.") from failed
        except TimeoutError as late:
            raise UserError(
                f"the environment {what} cannot be used: {call.request().called} has not ended in "
                f"{self._patience:g} s, and with environment.isolate = false nothing ends it."
            ) from late

    def close(self) -> None:
        """Ends all sessions; pending calls fail."""
        self._home.close()


@dataclass(eq=False)
class _Call:
    """A call and its future."""

    kind: str
    session: Session | None  # None for schemas and try
    payload: Any
    future: Future[Any] = field(default_factory=Future)
    number: int = 0
    answers: list[Answer] = field(default_factory=list)  # tools' answers from the current worker
    kept: list[Answer] = field(default_factory=list)  # tools' answers from lost workers
    moves: int = 0  # number of moves to another worker

    def request(self) -> Request:
        """Returns the call in the form that workers receive."""
        payload = (self.payload, len(self.kept)) if self.kind == "step" else self.payload
        return Request(self.number, self.session.number if self.session else 0, self.kind, payload)

    def take(self, reply: Reply) -> None:
        """Completes the future with a reply."""
        if reply.status == "ok":
            self.succeed(reply.payload)
        elif reply.status == "mistake" and self.session is None:
            self._set(UserError(reply.payload))
        else:
            is_late = reply.status == "env_timeout"
            self.fail(EnvironmentFailure("env_timeout" if is_late else "env_error", reply.payload))

    def succeed(self, result: Any) -> None:
        """Sets the result, including the answers from lost workers."""
        if self.kept:
            result = replace(
                result,
                messages=[*(m for m, _ in self.kept), *result.messages],
                calls=[*(c for _, c in self.kept), *result.calls],
            )
        if not self.future.done():
            self.future.set_result(result)

    def fail(self, failed: EnvironmentFailure) -> None:
        """Sets a failure, which ends the session."""
        if self.session is not None and self.session.failure is None:
            self.session.failure = failed
        self._set(failed)

    def _set(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class _Home(Protocol):
    """Runs sessions, in a thread or in workers."""

    def submit(self, call: _Call) -> None:
        """Queues a call; its future always completes. Thread-safe."""

    def close(self) -> None: ...


class _Thread:
    """Runs all sessions in a thread of this process, where a call that hangs cannot be ended."""

    def __init__(self, spec: Spec) -> None:
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._host = Host(spec, Deadlines(spec.seconds), self._reply)
        self._thread = threading.Thread(target=self._run, name="environments", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._is_closed:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # from an environment's task
                self._loop.run_forever()

    def submit(self, call: _Call) -> None:
        with self._lock:
            if self._is_closed:
                call.fail(_closed())
                return
            self._loop.call_soon_threadsafe(self._take, call)

    def _take(self, call: _Call) -> None:
        session = call.session
        call.number = next(self._numbers)
        if call.kind == "abandon":
            assert session is not None
            self._abandon(session, call)
        elif session is not None and session.failure is not None:
            call.fail(session.failure)
            return
        else:
            self._calls[call.number] = call
        self._host.take(call.request())

    def _abandon(self, session: Session, call: _Call) -> None:
        session.failure = session.failure or _abandoned()
        for number, sent in list(self._calls.items()):
            if sent.session is session:
                del self._calls[number]
                sent.fail(session.failure)
        call.future.set_result(None)

    def _reply(self, reply: Reply) -> None:
        if reply.status != "partial" and reply.number in self._calls:
            self._calls.pop(reply.number).take(reply)

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True

        async def leave() -> None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._host.close(), CLOSE_SECONDS)
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(leave(), self._loop)
        self._thread.join(timeout=2 * CLOSE_SECONDS)  # if it hangs: daemon threads end at exit
        for call in self._calls.values():
            call.fail(_closed())


@dataclass(eq=False)
class _Worker:
    """A worker process. Its fields are used only in the thread of `_Workers`."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    mark: Mark
    deadline: float  # time by which it must be ready
    reader: Reader = field(default_factory=Reader)
    ready: bool = False
    outgoing: bytearray = field(default_factory=bytearray)
    queue: list[_Call] = field(default_factory=list)  # calls to send
    calls: dict[int, _Call] = field(default_factory=dict)  # pending calls by number
    sessions: set[Session] = field(default_factory=set)
    asked: float = 0.0  # time of the last message to it


class _Workers:
    """Runs sessions in worker processes, which one thread of this process supervises."""

    def __init__(self, spec: Spec, size: int, memory_gb: float | None) -> None:
        self.spec, self.size, self.memory_gb = spec, size, memory_gb
        self._inbox: collections.deque[_Call] = collections.deque()
        self._numbers = itertools.count(1)
        self._workers: list[_Worker] = []
        self._failed_starts = 0  # consecutive failed starts of workers
        self._has_worked = False  # whether a call has succeeded
        broken = "the thread of the environments broke"
        self._watch = processes.Watch("environments", self._turn, self._leave, broken)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._watch.bell, selectors.EVENT_READ, None)
        self._watch.start()

    def submit(self, call: _Call) -> None:
        with self._watch.lock:
            if self._watch.ended is None:
                is_first = not self._inbox
                self._inbox.append(call)
            else:
                call.fail(_closed(self._watch.ended))
                return
        if is_first:
            self._watch.wake()

    def close(self) -> None:
        self._watch.end("the environments were closed")
        self._watch.join(CLOSE_SECONDS + 10)

    def _turn(self) -> None:
        self._take_calls()
        for worker in list(self._workers):
            self._send(worker)
        self._wait()
        for worker in list(self._workers):
            self._check(worker)

    def _leave(self) -> None:
        reason = self._watch.ended or ""
        idle = [w for w in self._workers if w.ready and not w.calls]
        for worker in idle:
            with contextlib.suppress(OSError):
                worker.connection.send(packed("close"))
        end = time.monotonic() + CLOSE_SECONDS
        for worker in idle:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, end - time.monotonic()))
        for worker in list(self._workers):
            self._kill(worker)
            for call in [*worker.calls.values(), *worker.queue]:
                call.fail(_closed(reason))
        with self._watch.lock:
            left, self._inbox = self._inbox, collections.deque()
        for call in left:
            call.fail(_closed(reason))
        self._selector.close()

    # Sending calls to workers

    def _take_calls(self) -> None:
        while True:
            with self._watch.lock:
                if not self._inbox:
                    return
                calls, self._inbox = self._inbox, collections.deque()
            for call in calls:
                self._take(call)

    def _take(self, call: _Call) -> None:
        session = call.session
        if call.kind == "abandon":
            assert session is not None
            self._abandon(session, call)
        elif session is not None and session.failure is not None:
            call.fail(session.failure)
        else:
            self._queue(call)

    def _queue(self, call: _Call) -> None:
        worker = call.session.worker if call.session is not None else None
        if worker is None:
            worker = self._least_loaded()
            if worker is None:
                call.fail(EnvironmentFailure("env_error", "no worker process could be started"))
                return
        if call.session is not None:
            call.session.worker = worker
            worker.sessions.add(call.session)
        worker.queue.append(call)

    def _abandon(self, session: Session, call: _Call) -> None:
        session.failure = session.failure or _abandoned()
        if (worker := session.worker) is not None:
            for queued in [c for c in worker.queue if c.session is session]:
                worker.queue.remove(queued)
                queued.fail(session.failure)
            for number, sent in list(worker.calls.items()):
                if sent.session is session:
                    del worker.calls[number]
                    sent.fail(session.failure)
            worker.sessions.discard(session)
            worker.queue.append(call)
        call.future.set_result(None)

    def _least_loaded(self) -> _Worker | None:
        """Returns the worker with the fewest sessions; starts one if none is idle."""
        found = min(self._workers, key=lambda w: len(w.sessions) + len(w.queue), default=None)
        if found is not None and not (found.sessions or found.queue or found.calls):
            return found
        if len(self._workers) >= self.size:
            return found
        while self._failed_starts < processes.MAX_FAILED_STARTS:
            try:
                self._workers.append(self._start())
                return self._workers[-1]
            except OSError:  # the system allows no more processes
                if found is not None:
                    return found
                self._failed_starts += 1
                time.sleep(processes.RETRY_SECONDS)
        self._failed_starts = 0
        return found

    def _start_all(self) -> None:
        """Starts the remaining workers after the first success, while the model loads."""
        with contextlib.suppress(OSError):  # the existing workers suffice
            while len(self._workers) < self.size:
                self._workers.append(self._start())

    def _start(self) -> _Worker:
        with tempfile.TemporaryFile() as shared:
            shared.truncate(Mark.SIZE)
            mark = Mark(shared.fileno())
            process, connection = processes.start(
                "grpo_cli.environments.session_worker", [shared.fileno()]
            )
        connection.setblocking(False)
        worker = _Worker(process, connection, mark, time.monotonic() + processes.START_SECONDS)
        path = list(map(str, sys.path))
        worker.outgoing += packed((os.getpid(), self.memory_gb, path, self.spec))
        self._selector.register(connection, selectors.EVENT_READ, worker)
        self._push(worker)
        return worker

    def _send(self, worker: _Worker) -> None:
        """Sends the queued calls of a worker as one message."""
        if not worker.ready or not worker.queue:
            return
        requests = []
        for call in worker.queue:
            call.number = next(self._numbers)
            requests.append(call.request())
            if call.kind != "abandon":
                worker.calls[call.number] = call
        calls, worker.queue = worker.queue, []
        try:
            message = packed(requests)
        except Exception:  # a row that cannot be pickled
            message = packed([r for c in calls if (r := self._packable(worker, c)) is not None])
        worker.asked = time.monotonic()
        worker.outgoing += message
        self._push(worker)

    def _packable(self, worker: _Worker, call: _Call) -> Request | None:
        try:
            packed(call.request())
        except Exception as error:
            worker.calls.pop(call.number, None)
            text = f"its row or message cannot be sent: {type(error).__name__}: {error}"
            call.fail(EnvironmentFailure("env_error", text))
            return None
        return call.request()

    def _push(self, worker: _Worker) -> None:
        """Writes as much as the socket accepts, since a busy worker does not read."""
        try:
            while worker.outgoing:
                sent = worker.connection.send(worker.outgoing)
                del worker.outgoing[:sent]
        except BlockingIOError:
            pass
        except OSError:  # it died; the next read returns end of file
            worker.outgoing.clear()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.outgoing else 0)
        self._selector.modify(worker.connection, events, worker)

    # Replies

    def _wait(self) -> None:
        """Waits for replies, calls, or the time of the next check of a worker."""
        with self._watch.lock:
            if self._inbox:
                return
        for key, events in self._selector.select(self._patience()):
            if key.data is None:
                self._watch.quiet()
                continue
            worker: _Worker = key.data
            if events & selectors.EVENT_WRITE:
                self._push(worker)
            if events & selectors.EVENT_READ:
                self._receive(worker)

    def _patience(self) -> float | None:
        now = time.monotonic()
        ends = []
        for worker in self._workers:
            if not worker.ready:
                ends.append(worker.deadline)
            elif worker.calls:
                number, until, _ = worker.mark.read()
                ends.append(min(until, now + CHECK_SECONDS) if number else now + CHECK_SECONDS)
        return max(0.0, min(ends) - now) + 0.001 if ends else None

    def _receive(self, worker: _Worker) -> None:
        try:
            data = worker.connection.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost(worker)
            return
        try:
            messages = worker.reader.feed(data)
        except Exception as error:  # an environment has written into the socket
            self._lost(worker, text=f"it sent what cannot be read ({type(error).__name__})")
            return
        for message in messages:
            if message == ["ready"]:
                worker.ready, self._failed_starts = True, 0
                continue
            for reply in message:
                self._reply(worker, reply)

    def _reply(self, worker: _Worker, reply: Reply) -> None:
        call = worker.calls.get(reply.number)
        if call is None:  # it was abandoned
            return
        if reply.status == "partial":
            call.answers.append(reply.payload)
            return
        del worker.calls[reply.number]
        if reply.status == "ok" and not self._has_worked:
            self._has_worked = True
            self._start_all()
        if call.session is not None and (reply.status != "ok" or call.kind == "finish"):
            worker.sessions.discard(call.session)
        call.take(reply)

    def _check(self, worker: _Worker) -> None:
        """Ends a worker whose call is past its deadline, and handles one that has died."""
        now = time.monotonic()
        if not worker.ready:
            if now > worker.deadline:
                text = f"its worker process was not ready after {processes.START_SECONDS:g} s"
                self._lost(worker, text=text)
            return
        if not worker.calls:
            return
        number, until, beat = worker.mark.read()
        patience = self.spec.seconds + GRACE + 4 * BEAT_SECONDS
        is_late = now > until if number else now - max(beat, worker.asked) > patience
        if is_late and number:  # read twice: another process's stores may appear out of order
            time.sleep(0.001)
            is_late = worker.mark.read()[:2] == (number, until)
        if is_late:
            self._lost(worker, late=True)
        elif worker.process.poll() is not None:  # a child process may keep its socket open
            self._lost(worker)

    def _kill(self, worker: _Worker) -> int:
        """Ends a worker and its child processes; returns its exit status."""
        self._workers.remove(worker)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(worker.connection)
        worker.connection.close()
        processes.kill_tree(worker.process.pid)
        return worker.process.wait()

    def _lost(self, worker: _Worker, late: bool = False, text: str | None = None) -> None:
        """Ends a worker, and moves or fails its calls.

        Args:
            late: whether a call is past its deadline.
            text: reason for ending it; None: it is late, or has ended by itself.
        """
        if worker not in self._workers:
            return
        if not late and text is None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # to get its own exit status
                worker.process.wait(0.5)
        running = worker.mark.read()[0]
        status = self._kill(worker)
        if text is None:
            ended = f"its worker process ended ({processes.ending(status)})"
            text = overrun(self.spec.seconds) if late else ended
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= processes.MAX_FAILED_STARTS:
                self._failed_starts = 0
                for call in worker.queue:
                    failed = f"no worker process could be started: {text}"
                    call.fail(EnvironmentFailure("env_error", failed))
                worker.queue = []
        # Between slices the culprit is unknown, so every pending call is a suspect.
        suspects = {running} if running in worker.calls else set(worker.calls)
        for session in worker.sessions:
            session.worker = None
        for number, call in worker.calls.items():
            self._move(call, number in suspects, number == running, late, text)
        for call in worker.queue:
            if call.kind != "abandon":
                self._move(call, False, False, late, text)
        for session in worker.sessions:
            if self.spec.has_state and session.worker is None and session.failure is None:
                session.failure = _bystander(text)

    def _move(self, call: _Call, is_suspect: bool, is_known: bool, late: bool, text: str) -> None:
        """Repeats a lost worker's call in another worker if no state is lost, else fails it.

        Args:
            is_suspect: whether the call may have ended the worker.
            is_known: whether it certainly has.
        """
        call.moves += 1
        call.kept += call.answers
        call.answers = []
        if not self.spec.has_state and call.kind == "step" and is_known:
            calls = calls_of(call.payload)
            if len(call.kept) < len(calls):  # a tool is at fault: the model gets an error
                call.kept.append(_lost_answer(calls[len(call.kept)], late, text))
            call.moves = 0
            if len(call.kept) == len(calls):
                call.succeed(Observation())
            else:
                self._queue(call)
        elif call.moves <= MAX_MOVES and not is_known and self._begins_anew(call):
            self._queue(call)
        elif is_suspect or self._begins_anew(call):
            stop_reason = "env_timeout" if late else "env_error"
            call.fail(EnvironmentFailure(stop_reason, f"{call.request().called}: {text}"))
        else:
            call.fail(_bystander(text))

    def _begins_anew(self, call: _Call) -> bool:
        """Returns whether a call needs no state of its worker."""
        return not self.spec.has_state or call.kind in ("reset", "schemas", "try")


def _lost_answer(call: Mapping[str, Any], late: bool, text: str) -> Answer:
    """Returns the answer to a tool call that has ended its worker."""
    name = shortened(name_of(call), 200)
    message: Message = {"role": "tool", "name": name, "content": failure(text)}
    if isinstance(call.get("id"), str):
        message["tool_call_id"] = call["id"]
    return message, ToolCall(name, failed=True, timed_out=late)


def _bystander(text: str) -> EnvironmentFailure:
    said = f"another environment in the same worker process failed: {text}"
    return EnvironmentFailure("env_error", said, own=False)


def _abandoned() -> EnvironmentFailure:
    return EnvironmentFailure("env_error", "the session was abandoned", own=False)


def _closed(reason: str = "the environments were closed") -> EnvironmentFailure:
    return EnvironmentFailure("env_error", reason, own=False)
