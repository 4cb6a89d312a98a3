"""A failure of one process is known to all at once, by name, and ends them.

A process that fails leaves the others in a collective that nobody else enters: they wait for half
an hour, then each prints a timeout, and none knows who it was. So each process has a thread that

    tells   what the process does (`heartbeat`), in the job's key-value store
    reads   the news there: the first failure of the job, a stop signal that one process got
    holds   a line to the next process, in a ring: the kernel cuts it when that process ends
    judges  (the first process that lives) whether any process still gets on

The first failure that is written counts; what follows from it (a connection that the others lose)
is not told. A process that is hung up in C++ is ended from its thread.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import resource
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from grpo_cli import blame, heartbeat
from grpo_cli.blame import Seen
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.ring import Ring

POLL_SECONDS = 1.0  # between two looks at the store, with up to BUSY_STORE processes
BUSY_STORE = 512
PATIENCE = timedelta(seconds=30)  # with one answer of the store
CAUSE_SECONDS = 5.0  # for the cause of a lost connection to become known
OTHERS_SECONDS = 3.0  # in which those who did not fail stay, so that the one who did ends first
GRACE_SECONDS = 8.0  # for a process to end by itself once another has failed
CLEANUP_SECONDS = 15.0  # for the one that failed to do so
SAVING_SECONDS = 20.0  # for either, while a checkpoint is being written that can still be whole
CLOSING_SECONDS = 5.0  # of these, for what comes after it
STOP_SECONDS = 0.5  # between a signal and telling of it, in which a failure may become known
STORE_SECONDS = 6.0  # for a store that does not answer to come back

# Of errors that say that another process is gone, or did not come.
_LOST = re.compile(
    r"gloo|nccl|closed by peer|reset by peer|broken pipe|timed out|timeout|communicator|watchdog",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class News:
    """What one process tells all. Kinds: failure, stall, stop (a signal), end (of the store)."""

    kind: str
    rank: int  # of whom it is about
    text: str = ""
    signal: int = 0
    time: float = 0.0  # unix seconds
    teller: int = 0  # rank of who noticed
    frozen: list[dict[str, Any]] = field(default_factory=list)  # whom to end, and who does it


class Watch:
    """This process's eye on the others, and theirs on it."""

    def __init__(
        self,
        rank: int,
        size: int,
        folder: Path,
        stall_minutes: float | None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Starts the thread. With several processes, once they have found one another.

        Args:
            folder: of the run; logs/ in it is for what processes say.
            stall_minutes: without a beat of any process, after which the run ends; None: never.
                Before its first step it is `heartbeat.START_TIMES` as long.
            say: prints a line of the first process; by default on stderr.
        """
        self.rank, self.size = rank, size
        self.logs = Path(folder) / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.screen: IO[str] = sys.stderr
        self.stall = stall_minutes * 60 if stall_minutes else None
        self.stop_told: int | None = None  # the signal that some process got
        self.failure: News | None = None  # the first of the job
        self.told = ""  # this process's own failure, as it is to be printed
        self.is_saving: Callable[[], bool] = lambda: False  # whether a checkpoint is being written
        self.is_starting: Callable[[], bool] = lambda: False  # whether a signal ends it at once
        self._say = say
        self._error: BaseException | None = None
        self._tells = False
        self._code = 1
        self._leave_at: float | None = None
        self._stopped_at: float | None = None  # when another was told to end while this one starts
        self._posted_at = 0.0
        self._to_tell: tuple[int, float] | None = None  # a signal and when, until it is told
        self._closing = False
        self._logged: set[str] = set()  # errors of the watch itself

        self.poll = POLL_SECONDS * max(1.0, size / BUSY_STORE)
        if self.stall is not None:
            self.poll = min(self.poll, self.stall / 10)
        # A thread that another keeps from running for this long is asleep, or its process is.
        self.silent = max(4 * self.poll, min(5.0, (self.stall or 60.0) / 2))

        self._stacks = open(self.log_path("stacks.txt"), "a", encoding="utf-8")  # noqa: SIM115
        self._had_faulthandler = faulthandler.is_enabled()
        # A segmentation fault says where; so does one that SIGABRT ends while it holds the GIL.
        faulthandler.enable(self._stacks, all_threads=True)

        self._lock = threading.RLock()
        self._read = 0  # news that this process knows of
        self._published = 0
        self._seen: dict[int, Seen] = {}
        self._looked = self._judge_at = time.monotonic()
        self._lost_at: float | None = None  # when the store last stopped to answer
        self._store: Any = None  # of the job; None where there is none (any more)
        self._ring: Ring | None = None
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._rope.setblocking(False)
        if size > 1:
            self._join()
        heartbeat.on_stage = self._wake  # told at once, for the words on a process that is killed
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def log_path(self, kind: str = "log") -> Path:
        """Where this process's log, or another file of it, lies."""
        return self.logs / f"rank-{self.rank}.{kind}"

    def log_to_file(self) -> None:
        """Sends what a process but the first prints to its log; `screen` stays the terminal's."""
        if self.rank == 0:
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        terminal = os.dup(2)
        self.screen = open(terminal, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
        log = os.open(self.log_path(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for fd in (1, 2):
            os.dup2(log, fd)
        os.close(log)
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(line_buffering=True)
        now = datetime.now().isoformat(sep=" ", timespec="seconds")
        print(f"--- {now} process {self.rank} on {heartbeat.node()}, pid {os.getpid()}")

    # What the main thread calls when it fails, or is told to stop.

    def failed(self, error: BaseException, code: int = 1) -> bool:
        """Whether it is for this process to tell of the error that ends it, as `told`.

        The traceback goes to the log. From here on the process has CLEANUP_SECONDS to end. An
        error that others may be the cause of waits for them to say so. The same error again gets
        the same answer.

        Args:
            code: this process's exit code if its thread has to end it.
        """
        if error is self._error:
            return self._tells
        self._error, self._code = error, code
        self._log(error)
        text = _message(error)
        cause = None
        if self._store is not None and _is_consequence(error):
            cause, hint = self._cause(time.monotonic() + CAUSE_SECONDS)
            text += hint
        at = getattr(error, "where", None) or heartbeat.where()
        self.told = f"{at}: {text}"
        news = News("failure", self.rank, self.told, time=time.time(), teller=self.rank)
        self._tells = cause is None and self._post(news)
        if self._tells:
            self._write_error_file(self.told, news.time)
        self._leave_at = time.monotonic() + CLEANUP_SECONDS
        self._wake()
        return self._tells

    def tell(self, error: BaseException, code: int = 1) -> bool:
        """`failed`, and prints what it has to tell; an error nobody foresaw with its traceback."""
        before = self._error
        tells = self.failed(error, code)
        if tells and error is not before:
            text = f"grpo: {self.told}"
            if not isinstance(error, UserError | TrainingError | KeyboardInterrupt):
                text = "".join(traceback.format_exception(error)) + text
            self._show(text)
        return tells

    def leave(self, code: int) -> NoReturn:
        """Ends a process that has failed, whatever its threads do.

        The one that told stays until the others have read it, in case the store ends with it; the
        others until it is gone, so that torchrun names it first.
        """
        if self.size > 1:
            stay = self.poll + 0.5 if self._tells else OTHERS_SECONDS
            time.sleep(max(0.0, self._posted_at + stay - time.monotonic()))
        self._exit(code)

    @property
    def has_failed(self) -> bool:
        """Whether a process of the job has failed, as the store has it now."""
        if self.failure is None and self._store is not None and not self._closing:
            with contextlib.suppress(RuntimeError):
                self._read_news()
        return self.failure is not None

    def tell_stop(self, number: int) -> None:
        """Tells all processes of a signal; `stop_told` is it then. For a signal's handler.

        Unless a failure becomes known within STOP_SECONDS: then it was torchrun that ends the rest.
        """
        self._to_tell = self._to_tell or (number, time.monotonic())
        if self._store is None:
            self.stop_told = self.stop_told or number
        self._wake()

    def tell_stop_now(self, number: int) -> bool:
        """`tell_stop` of a process that leaves at once: the others know before they miss it.

        Returns:
            False if a failure becomes known within STOP_SECONDS: that it was told for.
        """
        until = time.monotonic() + STOP_SECONDS
        while self._store is not None and not self.has_failed and time.monotonic() < until:
            time.sleep(0.05)
        if self.failure is not None:
            return False
        self._to_tell = None
        if self.stop_told is None:
            self._post(News("stop", self.rank, signal=number))
            self.stop_told = number
        return True

    def close(self, *, done: bool = True) -> None:
        """The orderly end of this process's watch: it is not missed from now on.

        Args:
            done: whether it did all that it was to do.
        """
        if self._closing:
            return
        self._closing = True
        heartbeat.on_stage = None
        self._wake()
        self._thread.join(timeout=5)
        with self._lock, contextlib.suppress(RuntimeError):
            if self._store is not None:
                if done:
                    self._publish(done=True)
                if self.rank == 0 and not _agent_has_store():
                    self._post(News("end", 0))
                    time.sleep(self.poll + 0.5)  # the store ends with this process
        if self._ring is not None:
            self._ring.close()
        self._store = None
        self._bell.close()
        self._rope.close()
        faulthandler.disable()
        if self._had_faulthandler and sys.__stderr__ is not None:
            with contextlib.suppress(OSError, ValueError):  # a stderr that is no file
                faulthandler.enable(sys.__stderr__)
        self._stacks.close()
        self._discard_empty()

    # The store: who is who, the news, what each process does.

    def _join(self) -> None:
        """Connects to the job's store and says who this is."""
        job = os.environ.get("TORCHELASTIC_RUN_ID", "-")
        self._job = f"grpo-watch/{job}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = self._connect()
        self._ring = Ring(self.rank, self.size, f"{self._job} ", self._address)
        who = {
            "node": heartbeat.node(),
            "pid": os.getpid(),
            "started": psutil.Process().create_time(),
            "line": self._ring.address,
        }
        self._store.set(f"who/{self.rank}", json.dumps(who))
        self._publish()

    def _connect(self) -> Any:
        host, port = self._address
        store = TCPStore(host, port, None, False, PATIENCE, wait_for_workers=False)
        return PrefixStore(self._job, store)

    def _publish(self, *, done: bool = False) -> None:
        assert self._store is not None
        self._published += 1
        told = blame.told(self._published, heartbeat.state(), done=done)
        self._store.set(f"state/{self.rank}", told)

    def _post(self, news: News) -> bool:
        """Writes to all. False for a failure that comes after another."""
        written = json.dumps([os.getpid(), time.monotonic_ns(), asdict(news)])
        with self._lock:
            is_first = True
            if self._store is not None:
                try:
                    while True:
                        if news.kind in ("failure", "stall") and self.failure is not None:
                            is_first = False
                            break
                        number = self._read
                        there = self._store.compare_set(f"news/{number}", "", written)
                        self._heard(number, there)
                        if there.decode() == written:
                            break
                except RuntimeError:  # no store, no order: tell it
                    pass
            if is_first and self.failure is None and news.kind in ("failure", "stall"):
                self.failure = news
            self._posted_at = time.monotonic()
            return is_first

    def _read_news(self) -> None:
        with self._lock:
            while self._store is not None:
                number = self._read
                if not self._store.check([f"news/{number}"]):
                    return
                self._heard(number, self._store.get(f"news/{number}"))

    def _heard(self, number: int, written: bytes) -> None:
        if number != self._read:  # a signal's handler came in between, and has read it
            return
        self._read += 1
        news = News(**json.loads(written)[-1])
        if news.kind == "stop":
            self.stop_told = self.stop_told or news.signal
            if news.rank != self.rank and self.is_starting():
                self._stopped_at = time.monotonic()
        elif news.kind == "end":
            self._store = None
        elif self.failure is None:
            self.failure = news
            self._posted_at = time.monotonic()
            if self._leave_at is None:
                self._leave_at = time.monotonic() + GRACE_SECONDS

    def _who(self, rank: int) -> dict[str, Any]:
        assert self._store is not None
        key = f"who/{rank}"
        known = self._store.check([key])
        return dict(json.loads(self._store.get(key))) if known else {"node": "?"}

    def _name(self, rank: int) -> str:
        return f"process {rank} on {self._who(rank)['node']}"

    def _survey(self) -> None:
        """Reads what every process does."""
        with self._lock:
            if self._store is None:
                return
            keys = [f"state/{rank}" for rank in range(self.size)]
            if not self._store.check(keys):  # not all have begun; a `get` would wait for them
                keys = [key for key in keys if self._store.check([key])]
            for key, raw in zip(keys, self._store.multi_get(keys), strict=True):
                self._note(int(key.rpartition("/")[2]), raw)

    def _note(self, rank: int, raw: bytes) -> None:
        if rank not in self._seen or self._seen[rank].raw != raw:
            self._seen[rank] = Seen.of(raw, time.monotonic())

    # The thread.

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell, selectors.EVENT_READ)
            if self._ring is not None:
                self._ring.selector = selector
                selector.register(self._ring.listener, selectors.EVENT_READ)
            while not self._closing:
                try:
                    self._look()
                    self._lost_at = None
                except RuntimeError as error:  # DistError of every kind
                    self._without_store(error)
                except Exception as error:  # of this code: no reason to go on unwatched
                    self._log_once(error)
                self._obey()
                for key, _ in selector.select(self.poll if self._is_quiet else 0.1):
                    if key.fileobj is self._bell:
                        with contextlib.suppress(OSError):
                            self._bell.recv(64)
                    elif self._ring is not None and self._ring.hears(key.fileobj):
                        with contextlib.suppress(RuntimeError):
                            self._gone(self._ring.next)

    @property
    def _is_quiet(self) -> bool:
        return self.failure is None and self._to_tell is None

    def _look(self) -> None:
        """One round."""
        now = time.monotonic()
        slept = now - self._looked
        self._looked = now
        if self.stall is not None and slept > max(self.silent, self.stall / 2):
            heartbeat.touch()  # the process, or the whole job, was suspended: no stall
            self._seen.clear()
        if self._store is not None and self._lost_at is not None:
            if not _answers(self._address):
                raise RuntimeError("nobody answers there")
            self._store = self._connect()
        if self._store is not None:
            assert self._ring is not None
            with self._lock:
                if not self._closing:
                    self._publish()
            self._read_news()
            if self._to_tell is not None and now - self._to_tell[1] > STOP_SECONDS:
                if self.failure is None and self.stop_told is None:
                    self._post(News("stop", self.rank, signal=self._to_tell[0]))
                self._to_tell = None
            if self._store is not None and not self._ring.is_tied:
                who = self._who(self._ring.next)
                self._ring.tie(who.get("line"))
        if self.failure is None and self.stall is not None and now >= self._judge_at:
            self._judge_at = now + self.poll
            self._judge(now)

    def _obey(self) -> None:
        """Ends this process if it is time to."""
        if self.failure is not None and self.failure.kind == "stall":
            self._end_stalled(self.failure)
        now = time.monotonic()
        if self._stopped_at is not None and now > self._stopped_at + GRACE_SECONDS:
            self._stopped_at = None
            if self.is_starting():  # it waits for the other, which is gone, where no Python runs
                self._exit(128 + (self.stop_told or signal.SIGTERM))
        if self._leave_at is not None and self.is_saving():  # and then there is closing to do
            until = min(now + CLOSING_SECONDS, self._posted_at + SAVING_SECONDS)
            self._leave_at = max(self._leave_at, until)
        if self._leave_at is not None and now > self._leave_at:
            self._exit(self._code)

    def _gone(self, rank: int) -> None:
        """The line to a process is cut. Tells of it, unless it ended in good order."""
        self._read_news()
        if self._store is None or self.failure is not None or self._closing:
            return
        if self.stop_told is not None and self.is_starting():  # as this one is about to
            return
        self._survey()
        seen = self._seen.get(rank)
        if seen is not None and seen.done:
            return
        text = f"{self._name(rank)} is gone (exited or killed; out of memory?)"
        if seen is not None:
            text += f"; it was last in {seen.doing}"
        text += f"; what it left is in {self.logs}/."
        self._declare(News("failure", rank, text, time=time.time(), teller=self.rank))

    def _without_store(self, error: RuntimeError) -> None:
        """The store does not answer: it ended with torchrun on the first node, or with the node."""
        now = time.monotonic()
        self._lost_at = self._lost_at or now
        if self.failure is None and now - self._lost_at > STORE_SECONDS:
            host, port = self._address
            text = (
                f"the job's store at {host}:{port} is gone: torchrun there has ended, or its node; "
                f"process {self.rank} on {heartbeat.node()} ends as well."
            )
            self.failure = News("failure", 0, text, time=time.time(), teller=self.rank)
            self._leave_at = now + GRACE_SECONDS
            print(f"grpo: {text} ({error})", file=sys.stderr)
            if os.environ.get("LOCAL_RANK", "0") == "0" and self.rank > 0:
                self._print(text)

    def _declare(self, news: News) -> None:
        """Tells of what befell another process."""
        if self._post(news):
            self._print(news.text)

    def _print(self, text: str) -> None:
        say = self._say
        if self.rank == 0 and say is not None:
            _within(2.0, lambda: say(text))
        else:
            self._show(f"grpo: {text}")

    def _show(self, text: str) -> None:
        # In one piece: others write to the same terminal.
        _within(2.0, lambda: print(text + "\n", end="", file=self.screen, flush=True))

    # Stalls.

    def _judge(self, now: float) -> None:
        """Declares a stall if no process has beaten for so long and this is the one to say so."""
        assert self.stall is not None
        if self._store is None:
            state = heartbeat.state()
            limit = blame.limit([state], self.stall)
            if self.size == 1 and state.quiet > limit:
                what = f"it has been in {blame.doing(state)} for {blame.spelt(state.inside)}"
                self._declare(News("stall", 0, self._stalled(limit, what), time=time.time()))
            return
        if not self._may_judge(now):
            return
        self._survey()
        running = {rank: seen for rank, seen in self._seen.items() if not seen.done}
        silent = blame.silent(running, now, self.silent)
        if not running or self.rank != min((r for r in running if r not in silent), default=-1):
            return
        limit = blame.limit([seen.state for seen in running.values()], self.stall)
        if blame.quiet(running, now) <= limit:
            return
        rank, what = blame.slowest(running, silent, now)
        news = News(
            "stall",
            rank,
            self._stalled(limit, f"{self._name(rank)}{what}"),
            time=time.time(),
            teller=self.rank,
            frozen=self._frozen(running, silent),
        )
        self._declare(news)

    def _may_judge(self, now: float) -> bool:
        """Whether this is the first process, or may have to stand in for it."""
        if self.rank == 0:
            return True
        if self.rank >= 8 and os.environ.get("LOCAL_RANK") != "0":
            return False  # a thousand that read a thousand states would be too many
        assert self._store is not None
        if not self._store.check(["state/0"]):
            return False
        self._note(0, self._store.get("state/0"))
        return self._seen[0].done or now - self._seen[0].at > self.silent

    def _stalled(self, limit: float, what: str) -> str:
        return f"stalled for {blame.spelt(limit)}: {what}; stacks in {self.logs}/."

    def _frozen(self, running: dict[int, Seen], silent: list[int]) -> list[dict[str, Any]]:
        """Silent processes, and for each the one on its machine that is to end it."""
        if not silent:
            return []
        whos = {rank: self._who(rank) for rank in running}
        frozen = []
        for rank in silent:
            beside = [r for r in whos if r not in silent and whos[r]["node"] == whos[rank]["node"]]
            frozen.append({"rank": rank, "by": min(beside, default=-1), **whos[rank]})
        return frozen

    def _end_stalled(self, stall: News) -> NoReturn:
        """Writes the stacks of this process, ends silent ones beside it, and leaves."""
        with contextlib.suppress(OSError):  # a full disk may be what hangs
            self._stacks.write(f"--- {stall.text}\n")
            self._stacks.flush()
            faulthandler.dump_traceback(self._stacks, all_threads=True)
        own = [f for f in stall.frozen if f["by"] == self.rank]
        for process in own:
            _abort(process)
        time.sleep(1.0)
        for process in own:
            _send(process, signal.SIGKILL)
        # The one that told ends last, so that the screen ends with it.
        time.sleep(1.0 if stall.teller == self.rank else 0.0)
        self._exit(1)

    # Ends.

    def _cause(self, until: float) -> tuple[News | None, str]:
        """What another process has failed of; or a hint at who is missing or late."""
        first: dict[int, Seen] = {}
        while time.monotonic() < until:
            with contextlib.suppress(RuntimeError), self._lock:
                self._read_news()
                # Not at once: a thousand processes may ask, and mostly the news are there soon.
                if self.failure is None and not first and time.monotonic() > until - 4:
                    self._survey()
                    first = dict(self._seen)
            if self.failure is not None:
                return self.failure, ""
            if self._lost_at is not None:  # no store either: the thread will say so, for all
                until = max(until, self._lost_at + STORE_SECONDS + 2 * self.poll)
            time.sleep(0.1)
        hint = ""
        with contextlib.suppress(RuntimeError), self._lock:
            if self._store is not None:
                self._survey()
                others = {r: s for r, s in self._seen.items() if r != self.rank and not s.done}
                found = blame.missing(first, others)
                if found is not None:
                    hint = f"; {self._name(found[0])} {found[1]}"
        return None, hint

    def _exit(self, code: int) -> NoReturn:
        """Ends the process now, whatever its threads do."""
        if self.failure is not None and not self._tells:
            # A second later than the cause: torchrun calls the earliest one the root.
            self._write_error_file(f"ended after this: {self.failure.text}", self.failure.time + 1)
        _within(1.0, _flush)
        self._discard_empty()
        os._exit(code)

    def _discard_empty(self) -> None:
        path = self.log_path("stacks.txt")
        with contextlib.suppress(OSError):
            if path.stat().st_size == 0:
                path.unlink()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._rope.send(b".")

    def _log(self, error: BaseException) -> None:
        """Writes an error with its traceback to the log."""
        now = datetime.now().isoformat(sep=" ", timespec="seconds")
        text = "".join(traceback.format_exception(error))
        with (
            contextlib.suppress(OSError),  # a full disk may be what the error is about
            open(self.log_path(), "a", encoding="utf-8", errors="backslashreplace") as log,
        ):
            log.write(f"--- {now} {heartbeat.where()}\n{text}")

    def _log_once(self, error: Exception) -> None:
        if repr(error) not in self._logged:
            self._logged.add(repr(error))
            self._log(error)

    def _write_error_file(self, text: str, when: float) -> None:
        """What torchrun shows of this process in its closing block, if it started it."""
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if not path or os.path.exists(path):
            return
        extra = {"py_callstack": text, "timestamp": str(int(when))}
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)


def _agent_has_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _answers(address: tuple[str, int]) -> bool:
    """Whether somebody listens there. TCPStore itself would print a page of C++ if not."""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=2):
        return True
    return False


def _is_consequence(error: BaseException) -> bool:
    """Whether an error may be that another process is gone, or did not come."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, dist.DistError):
            return True
        if isinstance(link, RuntimeError) and _LOST.search(str(link)):
            return True
        link = link.__cause__
    return False


def _message(error: BaseException) -> str:
    """An error in words, without C++'s stack."""
    text = str(error).partition("\nException raised from")[0].strip()
    if isinstance(error, UserError | TrainingError):
        return text
    if isinstance(error, KeyboardInterrupt):
        return "stopped at once by Ctrl-C"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _abort(process: dict[str, Any]) -> None:
    """Ends a frozen process, which writes its stacks first: faulthandler needs no GIL for it."""
    if hasattr(resource, "prlimit"):
        with contextlib.suppress(OSError, ValueError):
            resource.prlimit(process["pid"], resource.RLIMIT_CORE, (0, 0))  # no core of gigabytes
    _send(process, signal.SIGABRT)
    _send(process, signal.SIGCONT)  # one that is stopped takes its signals when it goes on


def _send(process: dict[str, Any], number: int) -> None:
    """Sends a signal to a process of this job on this machine, if it is still that one."""
    with contextlib.suppress(psutil.Error, OSError):
        there = psutil.Process(process["pid"])
        if abs(there.create_time() - process["started"]) < 2:  # seconds; the clock may be set
            os.kill(process["pid"], number)


def _within(seconds: float, action: Callable[[], object]) -> None:
    """Does what may hang: a stream that nobody reads, or whose lock a stuck thread holds."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(seconds)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
