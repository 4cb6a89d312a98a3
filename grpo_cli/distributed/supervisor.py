"""Ends all processes of a job when one fails, and names the one that failed.

Without it, a failed process leaves the others in a collective that it never enters. They wait for
half an hour, then each prints a timeout without the cause. So each process has a thread that

    publishes  the process's activity (`heartbeat`) in the job's key-value store (`job_store`)
    reads      the job's first failure and the first stop signal from the store
    looks      whether the other processes on its machine are still there
    judges     (in the first living process) whether any process still makes progress

Only the first failure is reported, not its consequences, such as lost connections in the other
processes. A process that hangs in C++ is ended by its supervisor thread.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from grpo_cli.config.interpolation import masked
from grpo_cli.distributed import heartbeat, stall_diagnosis
from grpo_cli.distributed.job_store import Failure, JobStore, is_alive, is_local
from grpo_cli.distributed.process_log import ProcessLog, flush_output, within, write_error_file
from grpo_cli.distributed.stall_diagnosis import PublishedState
from grpo_cli.distributed.stop_signal import WAKE, StopSignal
from grpo_cli.errors import TrainingError, UserError

POLL_SECONDS = 1.0  # between two reads of the store
ROOT_CAUSE_TIMEOUT = 5.0  # for the cause of a lost connection to be published or found
OTHERS_SECONDS = 3.0  # seconds that the other processes stay, so that the failed one ends first
GRACE_SECONDS = 8.0  # for a process to end by itself after another has failed
CLEANUP_SECONDS = 15.0  # for the failed process to end by itself
SAVING_SECONDS = 20.0  # for either, while a checkpoint is being written that can still be completed
CLOSING_SECONDS = 5.0  # part of SAVING_SECONDS, for the work after the checkpoint
STOP_SECONDS = 0.5  # delay of a published signal, in which its cause may be published
STORE_SECONDS = 6.0  # for an unresponsive store to come back

# Matches errors that may mean that another process has ended or not started.
_LOST = re.compile(
    r"gloo|nccl|closed by peer|reset by peer|broken pipe|timed out|timeout|communicator|watchdog",
    re.IGNORECASE,
)


class Supervisor:
    """Publishes the state of this process and watches the others."""

    def __init__(self, rank: int, size: int, folder: Path, stall_minutes: float | None) -> None:
        """Starts the thread, which joins the job's store if the job has several processes.

        Args:
            rank, size: rank of this process, and number of processes.
            folder: the run's folder; logs are written to its subfolder logs/.
            stall_minutes: minutes without a heartbeat of any process after which the run ends;
                None: never. Before the first step `heartbeat.START_TIMES` times as long.
        """
        self.rank, self.size = rank, size
        self.log = ProcessLog(Path(folder) / "logs", rank)
        self.stall = stall_minutes * 60 if stall_minutes else None
        self.stop_signal: int | None = None  # the signal that some process received
        self._error: BaseException | None = None  # error of this process
        self._unsent: tuple[int, float] | None = None  # signal to publish, and its time
        self._closing = False
        self._logged: set[str] = set()  # errors of the supervisor itself

        self.poll = POLL_SECONDS if self.stall is None else min(POLL_SECONDS, self.stall / 10)
        self.ending = Ending(rank, size, self.log, self.poll)
        # A process whose thread has not run for this long counts as frozen.
        self.silent = max(4 * self.poll, min(5.0, (self.stall or 60.0) / 2))
        self._polled_at = time.monotonic()

        self._lock = threading.RLock()
        self._lost_at: float | None = None  # time at which the store stopped responding
        self._store: JobStore | None = None  # None with one process, and after closing
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # signal handlers may put too
        if size > 1:
            self._store = JobStore(rank, size)
            self._store.publish()
        heartbeat.on_stage = self._wake  # publishes immediately, in case the process is killed
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    # Called by the main thread when it fails or receives a signal.

    def report(self, error: BaseException, code: int = 1) -> None:
        """Publishes and prints the error that ends this process, unless another error caused it.

        The traceback goes to the log, and to the screen if the error is unexpected. The process
        then has CLEANUP_SECONDS to end. If the error may be a consequence, waits ROOT_CAUSE_TIMEOUT
        for the cause. A second call does nothing.

        Args:
            code: exit code if the supervisor thread must end this process.
        """
        if self._error is not None:
            return
        self._error, self.ending.code = error, code
        trace = masked("".join(traceback.format_exception(error)))
        self.log.write(trace)
        text = masked(f"{getattr(error, 'where', None) or heartbeat.where()}: {_message(error)}")
        if self._store is not None and _is_consequence(error):
            self._wait_for_cause()
        self.ending.reports = self._post(Failure(self.rank, text, time.time(), self.rank))
        self.ending.leave_at = time.monotonic() + CLEANUP_SECONDS
        self._wake()
        if self.ending.reports:
            write_error_file(text, time.time())
            is_expected = isinstance(error, UserError | TrainingError | KeyboardInterrupt)
            self.log.print(f"{'' if is_expected else trace}grpo: {text}")

    @property
    def failure(self) -> Failure | None:
        """The job's first failure."""
        return self.ending.failure

    def connect(self, stop: StopSignal) -> None:
        """Passes stop signals and failures between `stop` and the other processes."""
        stop.send, stop.received = self.send_stop, lambda: self.stop_signal
        stop.is_aftermath = lambda: self.has_failed
        self.ending.is_starting = lambda: not stop.started
        self.ending.ends_at = lambda: stop.ends_at

    @property
    def has_failed(self) -> bool:
        """Whether a process of the job has failed, according to the store."""
        if not self._closing:
            with contextlib.suppress(RuntimeError):
                self._read_store()
                self._look_for_lost()
        return self.failure is not None

    def send_stop(self, number: int) -> None:
        """Publishes a stop signal, and sets `stop_signal`; called in a signal handler.

        If a failure is published within STOP_SECONDS, the signal came from torchrun tearing the job
        down and is ignored.
        """
        self._unsent = self._unsent or (number, time.monotonic())
        if self._store is None:
            self.stop_signal = self.stop_signal or number
        self._wake()

    def send_stop_now(self, number: int) -> bool:
        """Publishes a stop signal before this process ends, so that its end is not a failure.

        Returns:
            False if a failure is published within STOP_SECONDS, since it caused the signal.
        """
        until = time.monotonic() + STOP_SECONDS
        while self._store is not None and not self.has_failed and time.monotonic() < until:
            time.sleep(0.05)
        if self.failure is not None:
            return False
        self._unsent = None
        with contextlib.suppress(RuntimeError):
            self._post_stop(number)
        return True

    def close(self) -> None:
        """Ends the supervisor cleanly: the others no longer expect this process."""
        if self._closing:
            return
        self._closing = True
        heartbeat.on_stage = None
        self._wake()
        self._thread.join(timeout=5)
        with self._lock, contextlib.suppress(RuntimeError):
            if self._store is not None:
                self._store.publish(done=True)
            self._store = None
        self.log.close()

    # The key-value store.

    def _post(self, failure: Failure) -> bool:
        """Publishes a failure; returns whether it is the first one."""
        with self._lock:
            first = self.failure or failure  # without a store the order is unknown, so report it
            if self.failure is None and self._store is not None:
                with contextlib.suppress(RuntimeError):
                    first = self._store.post_failure(failure)
            self.ending.begin(first)
            return first == failure

    def _post_stop(self, number: int) -> None:
        if self.stop_signal is None:
            if self._store is not None:
                self._store.post_stop(number)
            self.stop_signal = number

    def _read_store(self) -> None:
        """Reads the job's failure and stop signal."""
        with self._lock:
            if self._store is None:
                return
            if self.failure is None and (failure := self._store.failure()) is not None:
                self.ending.begin(failure)
            if self.stop_signal is None and (stop := self._store.stop()) is not None:
                self.stop_signal = stop["signal"]
                if stop["rank"] != self.rank and self.ending.is_starting():
                    self.ending.stopped_at = time.monotonic()

    def _survey(self) -> dict[int, PublishedState]:
        """Returns the states of all processes that have not ended cleanly."""
        if self._store is None:
            return {self.rank: PublishedState(b"", time.monotonic(), False, heartbeat.state())}
        with self._lock:
            found = self._store.survey()
        return {rank: seen for rank, seen in found.items() if not seen.done}

    def _name(self, rank: int) -> str:
        return self._store.name(rank) if self._store else f"process {rank} on {heartbeat.node()}"

    # The supervisor thread.

    def _run(self) -> None:
        while not self._closing:
            try:
                self._poll()
                self._lost_at = None
            except RuntimeError as error:  # any kind of DistError
                self._handle_lost_store(error)
            except Exception as error:  # a bug here must not end the supervision
                if repr(error) not in self._logged:
                    self._logged.add(repr(error))
                    self.log.write("".join(traceback.format_exception(error)))
            self.ending.end_if_due(self.stop_signal)
            is_quiet = self.failure is None and self._unsent is None
            with contextlib.suppress(queue.Empty):
                self._wakes.get(timeout=self.poll if is_quiet else 0.1)
                while True:
                    self._wakes.get_nowait()

    def _poll(self) -> None:
        """Publishes this process's state, reads the store and checks for a stall, once."""
        now = time.monotonic()
        slept = now - self._polled_at
        self._polled_at = now
        if self.stall is not None and slept > max(self.silent, self.stall / 2):
            heartbeat.touch()  # the process, or the entire job, was suspended: not a stall
            if self._store is not None:
                self._store.seen.clear()
        if self._store is not None:
            if self._lost_at is not None:
                self._store.reconnect()
            with self._lock:
                if not self._closing:
                    self._store.publish()
            self._read_store()
            self._look_for_lost()
            if self._unsent is not None and now - self._unsent[1] > STOP_SECONDS:
                if self.failure is None:
                    self._post_stop(self._unsent[0])
                self._unsent = None
        if self.failure is None and self.stall is not None:
            self._look_for_stall(now, self.stall)

    def _look_for_lost(self) -> None:
        """Reports a process of this machine that has ended, unless it ended cleanly."""
        if self._store is not None and self.failure is None and (ended := self._store.ended()):
            self._read_store()  # the failure that ended it, if it has published one
            running = self._survey()
            for rank in ended:
                if self.failure is None and rank in running:
                    self._report_lost(rank, "is gone (exited or killed; out of memory?)", running)

    def _report_lost(self, rank: int, what: str, running: dict[int, PublishedState]) -> None:
        text = (
            f"{self._name(rank)} {what}; it was last in {running[rank].doing}; what it left is in "
            f"{self.log.folder}/."
        )
        self._report_other(rank, text)

    def _report_other(self, rank: int, text: str, frozen: Sequence[Any] | None = None) -> None:
        """Reports the failure of another process, a stall if `frozen` lists those to be killed."""
        is_stall = frozen is not None
        if self._post(Failure(rank, text, time.time(), self.rank, is_stall, list(frozen or ()))):
            self.log.print(f"grpo: {text}")

    def _handle_lost_store(self, error: RuntimeError) -> None:
        """Handles an unresponsive store: torchrun on the first node, or that node, has ended."""
        now = time.monotonic()
        self._lost_at = self._lost_at or now
        if self.failure is None and now - self._lost_at > STORE_SECONDS:
            assert self._store is not None
            host, port = self._store.address
            text = (
                f"the job's store at {host}:{port} is gone: torchrun there has ended, or its node; "
                f"process {self.rank} on {heartbeat.node()} ends as well."
            )
            self.ending.failure = Failure(0, text, time.time(), self.rank)
            self.ending.leave_at = now + GRACE_SECONDS
            print(f"grpo: {text} ({error})", file=sys.stderr)
            if os.environ.get("LOCAL_RANK", "0") == "0" and self.rank > 0:
                self.log.print(f"grpo: {text}")

    def _look_for_stall(self, now: float, stall: float) -> None:
        """Reports a stall, on the first process, if no process had a heartbeat for too long."""
        if heartbeat.state().quiet < stall / 2:  # read the states only if a stall is possible
            return
        running = self._survey()
        silent = stall_diagnosis.silent(running, now, self.silent)
        if self.rank != min((rank for rank in running if rank not in silent), default=-1):
            return
        if found := stall_diagnosis.diagnose(running, silent, now, stall, self._name):
            rank, text = found[0], f"{found[1]}; stacks in {self.log.folder}/."
            frozen = [self._store.who(rank) for rank in silent] if self._store else []
            self._report_other(rank, text, frozen)

    def _wait_for_cause(self) -> None:
        """Waits for another process's failure, which may have caused this process's error.

        A process on another machine that publishes nothing meanwhile is the cause.
        """
        until = time.monotonic() + ROOT_CAUSE_TIMEOUT
        with contextlib.suppress(RuntimeError):
            self._survey()
        while self.failure is None and time.monotonic() < until:
            with contextlib.suppress(RuntimeError):
                self._read_store()
            if self._lost_at is not None:  # the store is lost too, which the thread will report
                until = max(until, self._lost_at + STORE_SECONDS + 2 * self.poll)
            time.sleep(0.1)
        if self.failure is None and self._lost_at is None:
            with contextlib.suppress(RuntimeError):
                running = self._survey()
                silent = stall_diagnosis.silent(running, time.monotonic(), ROOT_CAUSE_TIMEOUT - 1)
                for rank in silent[:1]:
                    self._report_lost(rank, "gives no answer (killed, or a lost node)", running)

    def _wake(self) -> None:
        self._wakes.put(None)


class Ending:
    """Records why and when this process must end, and ends it."""

    def __init__(self, rank: int, size: int, log: ProcessLog, poll: float) -> None:
        """Begins with no failure, in a job whose processes read the store every `poll` seconds."""
        self.rank, self.size, self.log, self.poll = rank, size, log, poll
        self.failure: Failure | None = None  # the job's first failure
        self.reports = False  # whether this process has reported the failure
        self.code = 1  # exit code
        self.failed_at = 0.0  # time at which the failure was published or became known
        self.leave_at: float | None = None  # time at which this process is ended
        self.stopped_at: float | None = None  # time of another process's signal during the start
        self.is_saving: Callable[[], bool] = lambda: False  # whether a checkpoint is being written
        self.is_starting: Callable[[], bool] = lambda: False  # whether a signal ends it immediately
        self.ends_at: Callable[[], float | None] = lambda: None  # unix time of the end, if known
        self.on_failure: Callable[[str], None] = lambda text: None  # before this process ends

    def begin(self, failure: Failure) -> None:
        """Records the job's first failure: this process must end within GRACE_SECONDS."""
        self.failure = failure
        self.failed_at = time.monotonic()
        self.leave_at = self.leave_at or self.failed_at + GRACE_SECONDS

    def end_if_due(self, stop_signal: int | None) -> None:
        """Ends this process if its time has expired."""
        if self.failure is not None and self.failure.is_stall:
            self._end_stalled(self.failure)
        now = time.monotonic()
        if self.stopped_at is not None and now > self.stopped_at + GRACE_SECONDS:
            self.stopped_at = None
            if self.is_starting():  # it waits in C++ for another process that has ended
                self.exit(128 + (stop_signal or signal.SIGTERM))
        if heartbeat.is_calling():
            self._end_call(stop_signal)
        if self.leave_at is not None and self.is_saving():  # closing follows
            until = min(now + CLOSING_SECONDS, self.failed_at + SAVING_SECONDS)
            self.leave_at = max(self.leave_at, until)
        if self.leave_at is not None and now > self.leave_at:
            self.exit(self.code)

    def leave(self, code: int) -> NoReturn:
        """Ends a failed process, regardless of its other threads.

        The reporting process stays until the others have read the failure, in case the store ends
        with it. The others stay until it has ended, so that torchrun names it first.
        """
        if self.size > 1:
            stay = self.poll + 0.5 if self.reports else OTHERS_SECONDS
            time.sleep(max(0.0, self.failed_at + stay - time.monotonic()))
        self.exit(code)

    def exit(self, code: int) -> NoReturn:
        """Ends the process now, regardless of its other threads."""
        if self.failure is not None and not self.reports:
            # One second after the cause: torchrun treats the earliest error as the root.
            write_error_file(f"ended after this: {self.failure.text}", self.failure.time + 1)
        if (failure := self.failure) is not None:
            within(1.0, lambda: self.on_failure(failure.text))
        within(1.0, flush_output)
        self.log.discard_empty()
        os._exit(code)

    def _end_call(self, stop_signal: int | None) -> None:
        """Interrupts a user's function that outlasts the run; later ends the process.

        A function can catch the interrupt, and does not receive it while in C code.
        """
        leave, ends_at = heartbeat.leave, self.ends_at()
        if leave is not None and leave():
            signal.pthread_kill(threading.main_thread().ident or 0, WAKE)
        if ends_at is not None and time.time() > ends_at + GRACE_SECONDS:
            self.log.print(
                f"grpo: {heartbeat.where()}: a reward function, or the source of streamed "
                "rows, does not return; ended without saving this step."
            )
            self.exit(128 + (stop_signal or signal.SIGTERM))

    def _end_stalled(self, stall: Failure) -> NoReturn:
        """Dumps the stacks of this process, kills silent ones on its machine, and exits."""
        self.log.dump_stacks(stall.text)
        _kill([process for process in stall.frozen if is_local(process)])
        # The reporting process ends last, so that its message is the last on the screen.
        time.sleep(1.0 if stall.reporter == self.rank else 0.0)
        self.exit(1)


def _is_consequence(error: BaseException) -> bool:
    """Returns whether an error may mean that another process has ended or not started."""
    link: BaseException | None = error
    while link is not None:
        is_runtime = isinstance(link, RuntimeError)
        if isinstance(link, dist.DistError) or (is_runtime and _LOST.search(str(link))):
            return True
        link = link.__cause__
    return False


def _message(error: BaseException) -> str:
    """Returns an error's message without the C++ stack."""
    text = str(error).partition("\nException raised from")[0].strip()
    if isinstance(error, UserError | TrainingError):
        return text
    if isinstance(error, KeyboardInterrupt):
        return "stopped at once by Ctrl-C"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _kill(frozen: Sequence[dict[str, Any]]) -> None:
    """Kills processes of this machine, each after it has dumped its stacks."""
    for process in frozen:  # faulthandler needs no GIL
        if hasattr(resource, "prlimit"):
            with contextlib.suppress(OSError, ValueError):
                resource.prlimit(process["pid"], resource.RLIMIT_CORE, (0, 0))  # no core dump
        _send(process, signal.SIGABRT)
        _send(process, signal.SIGCONT)  # a stopped process receives SIGABRT only now
    time.sleep(1.0)
    for process in frozen:
        _send(process, signal.SIGKILL)


def _send(process: dict[str, Any], number: int) -> None:
    """Sends a signal to a local process of this job, unless its pid has been reused."""
    with contextlib.suppress(OSError):
        if is_alive(process):
            os.kill(process["pid"], number)
