"""Supervises untrusted programs from inside the sandbox, as its trusted half.

`process.py` sends the compiled code of this module and of those that it imports, and the runs, to a
bare interpreter (no site, no environment). For each run it forks a child that applies the limits,
changes its user if possible, and executes the program. The parent collects the output and enforces
the limits that no rlimit covers. It ends the run by killing all processes that the run started.

If a run is a test, a second child is the judge, with its own limits and user. It reads the test
from a file that neither this process nor the program's reads, and reports the verdict.

It imports almost nothing, because each program waits for the imports. `signal`, `typing` and
`contextlib` would take longer than everything else.
"""

from __future__ import annotations

import os
import select
import time

from grpo_cli.sandbox import processes
from grpo_cli.sandbox.child import PROGRAM_GONE, be_the_judge, become, run_script, serve
from grpo_cli.sandbox.folders import is_over_full, remove, remove_those_of
from grpo_cli.sandbox.judge import PASSED
from grpo_cli.sandbox.messages import as_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SIGXCPU = 24
LIFELINE = 0  # stdin: closes when the process that requested the run is gone
RESULTS = 1
LOOK_SECONDS = 0.1  # between two checks of memory and files


class RunnerSettings:
    """The settings of a sandbox, which process.py sets by name."""

    source: str
    runs: list[str | None]  # stdin of a script; None: a test
    tests: int  # file with (setup and snippet, entry point, collected) of each test
    seconds: float  # wall time of one run
    total_seconds: float  # wall time of all runs
    memory: int  # bytes
    files: int  # bytes in each writable folder
    output: int  # bytes on stdout, and on stderr
    rlimits: list[tuple[str, int]]
    uid: int | None  # user id of the children; None: unchanged
    has_own_uid: bool  # no other process has that uid
    has_own_pids: bool  # all visible processes belong to this sandbox
    on_disk: str | None  # holds a working folder per run, and is removed at the end
    call_filter: bytes | None  # filter of system calls; None: no filter, or already active
    in_memory: list[str]  # writable folders if on_disk is None; the first is the working folder
    sys_path: list[str]  # added to the interpreter's own
    has_run = False  # whether a child has been started

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)


class CallerGoneError(Exception):
    """Raised when no process waits for the results any more."""


class CannotStartError(Exception):
    """Raised when a child could not apply its limits."""


def main(values: dict[str, Any]) -> None:
    settings = RunnerSettings(values)
    number = 0
    try:
        _prepare(settings)
        _send("ready")
        end = time.monotonic() + settings.total_seconds
        for number in range(len(settings.runs)):
            seconds = min(settings.seconds, end - time.monotonic())
            if seconds > 0:
                _run(settings, number, seconds, _working_folder(settings, number))
            else:
                _send("skipped")
    except (CallerGoneError, BrokenPipeError):
        pass
    except Exception as error:
        # Once a program has run, it may be the cause: a program of the same user may, for example,
        # limit this process. The first run cannot fail to start because of a program.
        is_own = number == 0 and (isinstance(error, CannotStartError) or not settings.has_run)
        said = f"{type(error).__name__}: {error}".encode(errors="replace").decode()
        _send("failed" if is_own else "lost", stdout=said)
    finally:
        processes.kill_all(settings.has_own_pids)
        if settings.on_disk is not None:
            remove(settings.on_disk)
            if settings.uid is not None and settings.has_own_uid:
                for shared in ("/tmp", "/var/tmp", "/dev/shm", "/run/lock"):  # writable for all
                    remove_those_of(settings.uid, shared)


def _prepare(settings: RunnerSettings) -> None:
    processes.end_before_trainer("self")
    if settings.uid is None or not settings.has_own_pids:
        processes.prctl(processes.PR_SET_CHILD_SUBREAPER, 1)  # adopts orphans, so that none is lost
        processes.prctl(processes.PR_SET_NO_NEW_PRIVS, 1)  # disables setuid programs such as sudo
        processes.prctl(processes.PR_SET_DUMPABLE, 0)  # hides its memory from others of its user
    if settings.call_filter is not None:
        import ctypes

        rules = ctypes.create_string_buffer(settings.call_filter)
        program = (ctypes.c_size_t * 2)(len(settings.call_filter) // 8, ctypes.addressof(rules))
        mode, address = processes.SECCOMP_MODE_FILTER, ctypes.addressof(program)
        processes.prctl(processes.PR_SET_SECCOMP, mode, address)
    for folder in settings.in_memory:
        os.chmod(folder, 0o1777)


def _send(status: str, **fields: Any) -> None:
    """Sends the fields of a `process.ProgramResult`."""
    with open(RESULTS, "wb", closefd=False) as results:
        results.write(f"{as_json({'status': status, **fields})}\n".encode())


def _working_folder(settings: RunnerSettings, number: int) -> str:
    if settings.on_disk is None:
        return settings.in_memory[0]
    folder = f"{settings.on_disk}/{number}"
    os.mkdir(folder, 0o700)
    if settings.uid is not None:
        # Not the parent folder: the program could replace its own folder by a link.
        os.chown(folder, settings.uid, settings.uid)
    return folder


def _run(settings: RunnerSettings, number: int, seconds: float, folder: str) -> None:
    stdin = settings.runs[number]
    given = os.memfd_create("stdin")
    with open(given, "wb", closefd=False) as file:
        file.write((stdin or "").encode(errors="surrogatepass"))
    os.lseek(given, 0, os.SEEK_SET)
    ours, theirs = zip(*(os.pipe() for _ in range(4)), strict=True)
    *outputs, problem = ours  # stdout, stderr and the verdict
    questions: tuple[int, ...] = os.pipe() if stdin is None else ()
    answers: tuple[int, ...] = os.pipe() if stdin is None else ()
    start = time.monotonic()
    child = judge = os.fork()
    settings.has_run = True
    if child == 0:
        pipes = (questions[0], answers[1]) if questions else ()
        become(settings, folder, (given, *theirs[:2]), theirs[3], pipes)
        serve(settings.source, *pipes) if pipes else run_script(settings.source)
    if stdin is None:
        judge = os.fork()
        if judge == 0:
            be_the_judge(settings, number, folder, theirs[2:], (answers[0], questions[1]))
    for fd in (given, *theirs, *questions, *answers):
        os.close(fd)
    try:
        if text := os.read(problem, 1000):  # closed when the child is ready to run the program
            raise CannotStartError(text.decode(errors="replace"))
        monitor = _Monitor(settings, judge, folder, outputs)
        status = monitor.until(time.monotonic() + seconds)
        took = time.monotonic() - start
    finally:
        processes.kill_all(settings.has_own_pids)
        returncode = processes.kill_and_wait(judge)
        if judge != child:
            program = processes.kill_and_wait(child)
            returncode = program if returncode == PROGRAM_GONE else returncode
        processes.reap(settings.has_own_pids)
    monitor.drain()
    for fd in ours:
        os.close(fd)
    if monitor.is_over_full:
        status = "output"
    elif status == "" and returncode < 0:
        status = "cpu" if returncode == -SIGXCPU else "killed"
    elif status == "":
        status = "ok" if returncode == 0 else "error"
    printed, why, report = (text.decode(errors="replace") for text in monitor.texts.values())
    fields = {"stdout": printed, "stderr": report[1:] or why}
    passed = status == "ok" and report == PASSED
    _send(status, returncode=returncode, seconds=took, test_passed=passed, **fields)


class _Monitor:
    """Collects the output of a child until it ends or must be ended."""

    def __init__(self, settings: RunnerSettings, child: int, folder: str, fds: list[int]) -> None:
        self.settings = settings
        self.child = child
        self.folders = settings.in_memory or [folder]
        self.texts = {fd: bytearray() for fd in fds}
        self.is_over_full = False
        self.poll = select.poll()
        self.open = set(fds)
        for fd in fds:
            os.set_blocking(fd, False)
            self.poll.register(fd, select.POLLIN)

    def until(self, deadline: float) -> str:
        """Returns the reason why the child must be ended, or "" once it has ended by itself."""
        ended = os.pidfd_open(self.child)
        self.poll.register(ended, select.POLLIN)
        self.poll.register(LIFELINE, 0)  # reports POLLHUP without being requested
        look = time.monotonic() + LOOK_SECONDS / 2
        try:
            while (now := time.monotonic()) < deadline:
                if now >= look:
                    if problem := self.overuse():
                        return problem
                    look = time.monotonic() + LOOK_SECONDS
                ready = self.read(max(min(deadline, look) - now, 0.001))
                if LIFELINE in ready:
                    raise CallerGoneError
                if self.is_over_full or ended in ready:
                    return "output" if self.is_over_full else ""
            return "timeout"
        finally:
            self.poll.unregister(LIFELINE)
            self.poll.unregister(ended)
            os.close(ended)

    def overuse(self) -> str:
        """Returns the limit that the run exceeds of those that no rlimit covers, or ""."""
        found = processes.every(self.settings.has_own_pids)
        if processes.resident_bytes(found) > self.settings.memory:
            return "memory"
        # A program may have undone this; in a namespace all processes end with this one.
        for process in () if self.settings.has_own_pids else found:
            processes.end_before_trainer(process)
        is_full = any(is_over_full(folder, self.settings.files) for folder in self.folders)
        return "disk" if is_full else ""

    def read(self, seconds: float) -> list[int]:
        """Waits for output and reads it; returns the file descriptors that are ready."""
        ready = [fd for fd, _ in self.poll.poll(seconds * 1000)]
        for fd in self.open.intersection(ready):
            try:
                data = os.read(fd, 1 << 16)
            except BlockingIOError:
                continue
            room = self.settings.output - len(self.texts[fd])
            self.texts[fd] += data[:room]
            self.is_over_full = self.is_over_full or len(data) > room
            if not data:
                self.poll.unregister(fd)
                self.open.discard(fd)
        return ready

    def drain(self) -> None:
        """Reads the remaining output. All writers are dead or dying."""
        end = time.monotonic() + 1
        while self.open and not self.is_over_full and time.monotonic() < end:
            self.read(0.1)
