"""Runs the environments of many sessions in one thread of a worker process.

`sessions.Sessions` starts workers as `python -m grpo_cli.environments.session_worker SOCKET MARK`.
They receive requests and send replies in the order in which calls end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from grpo_cli.environments.adapters import Adapted, Maker, Spec
from grpo_cli.environments.deadlines import (
    BEAT_SECONDS,
    Deadlines,
    Mark,
    Overrun,
    RunningCall,
    Streams,
    seed_everything,
)
from grpo_cli.environments.functions import EnvironmentFailure
from grpo_cli.environments.observations import Broken
from grpo_cli.errors import UserError
from grpo_cli.scoring import processes
from grpo_cli.scoring.guards import blame, described
from grpo_cli.scoring.processes import overrun

# The user's method that each kind of call runs, for messages.
CALLED = {"finish": "get_reward", "schemas": "its constructor"}


class SessionCall(NamedTuple):
    """A call of a session."""

    number: int
    session: int
    kind: str  # reset, step, finish, abandon or schemas
    payload: Any = None

    @property
    def called(self) -> str:
        """The name of the environment's method, for messages."""
        return CALLED.get(self.kind, self.kind)


class Reply(NamedTuple):
    """The result of a call."""

    number: int
    result: Any  # Observation, schemas, EnvironmentFailure or UserError


@dataclass(eq=False)
class _Session:
    name: str
    environment: Adapted
    streams: Streams


@dataclass
class Host:
    """Runs sessions in one thread with an event loop.

    Args:
        reply: called with each reply, in the event loop's thread.
    """

    spec: Spec
    deadlines: Deadlines
    reply: Callable[[Reply], None]
    _sessions: dict[int, _Session] = field(default_factory=dict)
    _runs: dict[int, RunningCall] = field(default_factory=dict)  # calls under way, by session
    _idle: defaultdict[str, list[_Session]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.maker = Maker(self.spec, self.deadlines)
        self._closing: set[asyncio.Task[Any]] = set()

    def take(self, request: SessionCall) -> None:
        """Starts a call. Each call gets one reply, except `abandon`, which gets none."""
        if request.kind == "abandon":
            self._abandon(request.session)
            return
        if request.session in self._runs:
            text = f"{request.kind}: the session's call before has not ended"
            self.reply(Reply(request.number, EnvironmentFailure("env_error", text)))
            return
        known = self._sessions.get(request.session)
        streams = known.streams if known else Streams()
        run = RunningCall(request.number, streams, lambda: self._late(run, request))
        run.task = asyncio.ensure_future(self._answer(run, request))
        self._runs[request.session] = run

    def _late(self, run: RunningCall, request: SessionCall) -> None:
        """Abandons a call past its deadline and replies, since it may ignore cancellation."""
        if self._runs.get(request.session) is run:
            self._abandon(request.session)
            text = f"{request.called} {overrun(self.spec.seconds)}"
            self.reply(Reply(request.number, EnvironmentFailure("env_timeout", text)))

    def _abandon(self, number: int) -> None:
        """Releases a session; its call is cancelled first, and may take time to end."""
        session, run = self._sessions.pop(number, None), self._runs.pop(number, None)
        task = run.task if run is not None else None
        if task is not None:
            task.cancel()
        if session is None:
            return
        if task is None:
            self._release(session, is_clean=True)
        else:
            self._closing.add(task)
            task.add_done_callback(lambda _: self._release(session, is_clean=False))
            task.add_done_callback(self._closing.discard)

    def _release(self, session: _Session, is_clean: bool) -> None:
        """Keeps a session's object for reuse, or closes it in the background."""
        if is_clean and session.environment.is_reusable:
            self._idle[session.name].append(session)
            return
        run = RunningCall(0, session.streams, lambda: task.cancel())
        task = asyncio.ensure_future(self._close(run, session))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, run: RunningCall, session: _Session) -> None:
        try:
            await self.deadlines.call(run, session.environment.close())
        except (asyncio.CancelledError, Overrun, Exception, SystemExit, KeyboardInterrupt) as error:
            print(f"grpo: an environment's close failed: {described(error)}", file=sys.stderr)

    async def _answer(self, run: RunningCall, request: SessionCall) -> None:
        failed, called = True, request.called
        try:
            result = await self.deadlines.call(run, self._call(run, request))
            failed = False
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                return  # abandoned, or answered by `_late`
            result = EnvironmentFailure("env_error", f"{called} raised CancelledError")
        except Overrun as late:
            result = EnvironmentFailure("env_timeout", f"{called} {late}")
        except (EnvironmentFailure, UserError) as error:
            result = error
        except Broken as broken:
            # For schemas the message names the class or the tool itself.
            before = "" if request.kind == "schemas" else f"{called}: "
            result = EnvironmentFailure("env_error", f"{before}{broken}")
        except (Exception, SystemExit, KeyboardInterrupt, GeneratorExit) as error:
            result = EnvironmentFailure("env_error", f"{called} raised {blame(error)}")
        if self._runs.get(request.session) is not run:
            return
        del self._runs[request.session]
        session = self._sessions.get(request.session)
        if session is not None and (failed or request.kind == "finish"):
            del self._sessions[request.session]
            if getattr(result, "stop_reason", "") != "env_timeout":  # else its close may hang too
                self._release(session, is_clean=not failed)
        self.reply(Reply(request.number, result))

    async def _call(self, run: RunningCall, request: SessionCall) -> Any:
        if request.kind == "step":
            return await self._session(run, request.session).environment.step(request.payload)
        if request.kind == "finish":
            return await self._session(run, request.session).environment.finish()
        if request.kind == "schemas":
            session = self._make(run, request.payload)
            try:
                await session.environment.open()
                return [dict(schema) for schema in session.environment.schemas]
            finally:
                self._release(session, is_clean=False)
        assert request.kind == "reset", request.kind
        name, row, seed = request.payload
        seed_everything(seed)
        session = self._idle[name].pop() if self._idle[name] else self._make(run, name)
        session.streams = run.streams
        try:
            first = await session.environment.reset(row, seed)
        except BaseException:
            self._release(session, is_clean=False)
            raise
        self._sessions[request.session] = session
        return first

    def _session(self, run: RunningCall, number: int) -> _Session:
        if number not in self._sessions:
            assert not self.spec.has_state, "reset comes first"
            self._sessions[number] = self._make(run, "")  # it has moved to this worker
        return self._sessions[number]

    def _make(self, run: RunningCall, name: str) -> _Session:
        return _Session(name, self.maker.make(name), run.streams)

    async def close(self) -> None:
        """Closes all environments; each has its deadline."""
        for number in list(self._sessions):
            self._abandon(number)
        for idle in self._idle.values():
            for session in idle:
                session.environment.is_reusable = False
                self._release(session, is_clean=False)
        while self._closing:
            await asyncio.wait(set(self._closing))
        await self.maker.close()


def main() -> None:
    """Answers requests until the main process closes the pipe."""
    mark_fd = int(sys.argv[2])
    os.set_inheritable(mark_fd, False)  # child processes must not keep it open
    own, mark = os.getpid(), Mark(mark_fd)
    pipe, spec = processes.connect()

    def reply(message: Any) -> None:
        if os.getpid() != own:  # a child that an environment forked
            os._exit(1)
        with contextlib.suppress(OSError):  # the run has ended
            pipe.send(message)

    host = Host(spec, Deadlines(spec.seconds, mark, interrupt=True), reply)
    # Imports do not count in a call's deadline. The first call reports an error.
    with contextlib.suppress(Exception, SystemExit):
        host.maker.preload()
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    leaving: list[asyncio.Task[None]] = []

    def read() -> None:  # in a thread, so that the parent never waits for a busy environment
        while True:
            try:
                request = pipe.recv()
            except (EOFError, OSError):
                os._exit(0)
            except Exception:  # a message that cannot be read: the run sees the exit
                traceback.print_exc()
                os._exit(1)
            loop.call_soon_threadsafe(take, request)

    def take(request: SessionCall | str) -> None:
        if os.getpid() != own:
            os._exit(1)
        if isinstance(request, SessionCall):
            host.take(request)
        else:  # "close"
            leaving.append(loop.create_task(leave()))

    async def leave() -> None:
        await host.close()
        for child in processes.descendants(os.getpid()):  # such as an MCP server that hangs
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        os._exit(0)  # without waiting for threads of environments

    def beat() -> None:
        mark.beat()
        loop.call_later(BEAT_SECONDS, beat)

    beat()
    pipe.send("ready")
    threading.Thread(target=read, name="requests", daemon=True).start()
    while True:
        with contextlib.suppress(SystemExit, KeyboardInterrupt, Overrun):  # from a user's own task
            loop.run_forever()


if __name__ == "__main__":
    # Imported by name, so that pickled objects have this module's classes, not those of __main__.
    from grpo_cli.environments import session_worker

    session_worker.main()
