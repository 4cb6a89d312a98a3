"""Manages one sandbox: a program's process and its runs, from start to cleanup.

A sandbox is one bare interpreter that serves all tests of a program. Its trusted half, runner.py,
forks a child per test and reports over its own pipe. A sandbox dies with the process that started
it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import marshal
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from grpo_cli.sandbox.system_calls import call_filter
from grpo_cli.sandbox.temporary_folder import MARK, TemporaryFolder

if TYPE_CHECKING:
    from grpo_cli.sandbox.isolation import SandboxLevel

NOBODY = 65534
SPARE_UIDS = 0x7000_0000  # user id of a thread's program: this plus the thread's id
START_SECONDS = 15.0  # for an interpreter to start
GRACE_SECONDS = 8.0  # for a sandbox to end a program that exceeds its limits, and to report it
MIB = 1 << 20
# Modules that run inside; later ones import earlier ones.
INSIDE = ("proxies", "messages", "peer", "judge", "folders", "processes", "child", "runner")
IN_MEMORY = ("/tmp", "/dev/shm")  # a program's writable folders in namespaces


class SandboxError(RuntimeError):
    """Raised when the sandbox itself fails, regardless of the program."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of one run: the program with one test or one input."""

    seconds: float = 6.0  # wall time; rounded up, also CPU time per process
    memory_mb: int = 1024  # MiB of address space per process, and resident in all of them
    processes: int = 16  # simultaneous processes, including threads
    file_mb: int = 16  # MiB per file, and over all files
    open_files: int = 64  # per process
    output_kb: int = 1024  # KiB on stdout, and also on stderr

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            kinds = (int, float) if name == "seconds" else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 1e6:
                number = "number" if name == "seconds" else "whole number"
                raise ValueError(f"{name} is {value!r}; it must be a {number} above 0.")


@dataclass(frozen=True)
class ProgramResult:
    """The outcome of a run."""

    status: str  # "ok", "error", "killed", "timeout", "memory", "disk", "output", "skipped", "lost"
    returncode: int = 0  # minus the signal's number if a signal ended it
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0  # wall time
    reason: str = ""  # one line
    test_passed: bool = False  # whether the run's test, if any, ran to its end


# Code of setup and snippet, argument of `check`, names of the tests to call, the program's names,
# and packages that the tests import.
Test = tuple[list[Any], str | None, list[str], list[str], list[str]]


_BOOTSTRAP = (
    "import marshal, sys\n"
    "codes, settings = marshal.load(open(0, 'rb', closefd=False))\n"
    "for name, code in codes:\n"
    "    module = sys.modules[name] = type(sys)(name)\n"
    "    exec(code, module.__dict__)\n"
    "for name, _ in codes:\n"
    "    del sys.modules[name]\n"
    "module.main(settings)\n"
    "module.os._exit(0)\n"  # skips the slow shutdown of the interpreter
)


@functools.cache
def _codes() -> list[tuple[str, Any]]:
    """Returns (name, code) of the modules that run inside."""
    codes: list[tuple[str, Any]] = [(name, "") for name in ("grpo_cli", "grpo_cli.sandbox")]
    for name in (f"grpo_cli.sandbox.{name}" for name in INSIDE):
        loader: Any = importlib.util.find_spec(name).loader  # type: ignore[union-attr]
        codes.append((name, loader.get_code(name)))
    return codes


class Sandbox:
    """A program and its runs; as a context manager it finally kills and removes everything.

    All runs are passed to the constructor; `next_result` returns their outcomes in order.
    """

    def __init__(
        self,
        level: SandboxLevel,
        limits: Limits,
        source: str,
        runs: list[str | Test],
        total_seconds: float | None = None,
    ) -> None:
        self.level = level
        self.limits = limits
        try:
            self.folder = None if level.has_own_pids else TemporaryFolder()
        except OSError as error:
            raise SandboxError(f"the sandbox has no temporary folder: {error}") from error
        self.uid = None if level.becomes is None else spare_uid()
        self.own_uid = None if self.uid == NOBODY else self.uid
        tests = [None if isinstance(run, str) else run for run in runs]
        self.tests = _file_of(marshal.dumps(tests))
        self.call_filter = _file_of(call_filter() or b"")
        settings = {
            "source": source,
            "runs": [run if isinstance(run, str) else None for run in runs],
            "tests": self.tests,
            "seconds": limits.seconds,
            "total_seconds": math.inf if total_seconds is None else total_seconds,
            "memory": limits.memory_mb * MIB,
            "files": limits.file_mb * MIB,
            "output": limits.output_kb * 1024,
            "rlimits": self._rlimits(),
            "uid": self.uid if level.becomes == "inside" else None,
            "has_own_uid": self.own_uid is not None,
            "has_own_pids": level.has_own_pids,
            "call_filter": None if level.has_own_pids else call_filter(),
            "on_disk": self.folder.path if self.folder else None,
            "in_memory": [] if self.folder else list(IN_MEMORY),
            "sys_path": list(level.sys_path),
        }
        try:
            self._start(marshal.dumps((_codes(), settings)))
        except OSError as error:
            if self.folder is not None:
                self.folder.remove(self.own_uid)
            raise SandboxError(f"the sandbox's process did not start: {error}") from error
        finally:
            os.close(self.tests)
            os.close(self.call_filter)

    def _rlimits(self) -> list[tuple[str, int]]:
        limits, level = self.limits, self.level
        # The judge runs as the program's user and counts too, as does a runner that keeps its user.
        processes = limits.processes + (1 if level.becomes == "inside" else 2)
        if not self.own_uid and (self.uid or not (level.has_own_pids and _counts_by_namespace())):
            # The kernel also counts the user's other processes.
            processes += _count_tasks(self.uid or os.geteuid())
        return [
            ("RLIMIT_CPU", math.ceil(limits.seconds)),
            ("RLIMIT_AS", limits.memory_mb * MIB),
            ("RLIMIT_NPROC", processes),
            ("RLIMIT_FSIZE", limits.file_mb * MIB),
            ("RLIMIT_NOFILE", limits.open_files),
            ("RLIMIT_CORE", 0),
            ("RLIMIT_MEMLOCK", 0),
            ("RLIMIT_MSGQUEUE", 0),
        ]

    def _start(self, payload: bytes) -> None:
        size = str((self.limits.file_mb + 1) * MIB)  # the program itself is a file there
        words = {"SIZE": size, "CALL_FILTER": str(self.call_filter)}
        command = [words.get(word, word) for word in self.level.command]
        options: dict[str, Any] = {}
        if self.level.becomes == "outside":
            options = {"user": self.uid, "group": self.uid, "extra_groups": []}
        # -P, -s and -S: import nothing from the working folder or site-packages.
        command += [python()[0], "-P", "-s", "-S", "-X", "utf8", "-c", _BOOTSTRAP]
        # Not a pipe: a program of this user could reopen it in /proc and write its own results.
        self.results, theirs = socket.socketpair()
        self.reports = self.results.makefile("rb")
        with theirs:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                env=self._environment(),
                cwd="/",
                start_new_session=True,
                pass_fds=[self.tests, self.call_filter],
                bufsize=0,
                **options,
            )
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # it reports the reason on stderr
            view = memoryview(payload)
            while view:
                view = view[self.process.stdin.write(view) :]

    def _environment(self) -> dict[str, str]:
        variables = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "PYTHONHASHSEED": "0",  # same order of sets, same verdict in every run
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            MARK: self.folder.path if self.folder else str(os.getpid()),
        }
        libraries = os.path.join(python()[1], "lib")
        if libraries in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
            variables["LD_LIBRARY_PATH"] = libraries  # it may not start without
        return variables

    def __enter__(self) -> Self:
        try:
            message = self._receive(START_SECONDS)
            problem = "" if message.status == "ready" else message.stdout
        except (EOFError, TimeoutError) as error:
            problem = str(error)
        except BaseException:
            self.close()
            raise
        if problem:
            raise SandboxError(self.close() or problem)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next_result(self) -> ProgramResult:
        """Returns the next run's outcome; "lost" if the program destroyed or blocked its sandbox.

        Raises:
            SandboxError: the sandbox failed for a reason other than the program.
        """
        try:
            finished = self._receive(self.limits.seconds + GRACE_SECONDS)
        except EOFError:  # ended by the program, or along with it by a kernel short of memory
            finished = ProgramResult("lost")
        except TimeoutError as error:
            # Only a program with its runner's user can have blocked the runner.
            if self.level.becomes is not None:
                raise SandboxError(str(error)) from None
            finished = ProgramResult("lost")
        if finished.status == "failed":  # before any program has run
            raise SandboxError(finished.stdout)
        status = "timeout" if finished.status == "cpu" else finished.status
        return replace(finished, status=status, reason=_reason(finished, self.limits))

    def _receive(self, seconds: float) -> ProgramResult:
        """Returns the next report of the runner (`runner._send`), without a reason."""
        self.results.settimeout(seconds)
        try:
            line = self.reports.readline()
        except TimeoutError:
            raise TimeoutError("it gave no sign of life for too long") from None
        if not line.endswith(b"\n"):
            raise EOFError("its process ended without a word")
        return ProgramResult(**json.loads(line))

    def close(self) -> str:
        """Ends the process and waits for its cleanup; returns its stderr."""
        process = self.process
        stdin, stderr = process.stdin, process.stderr
        assert stdin is not None
        assert stderr is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.close()
        self.reports.close()
        self.results.close()
        # Not `process.wait(GRACE_SECONDS)`, which polls in sleeps that are mostly too long.
        handle, poll = os.pidfd_open(process.pid), select.poll()
        poll.register(handle, select.POLLIN)
        if not poll.poll(max(0.0, GRACE_SECONDS) * 1000):
            process.kill()
        process.wait()
        os.close(handle)
        os.set_blocking(stderr.fileno(), False)
        errors = stderr.read() or b""
        stderr.close()
        if self.folder is not None:
            self.folder.remove(self.own_uid)
        return errors.decode(errors="replace").strip()[-2000:]


def _reason(finished: ProgramResult, limits: Limits) -> str:
    status, returncode = finished.status, finished.returncode
    if status == "error":
        lines = [line for line in finished.stderr.splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else f"ended with exit code {returncode}"
    if status == "killed":
        with contextlib.suppress(ValueError):
            return f"ended by {signal.Signals(-returncode).name}"
        return f"ended by signal {-returncode}"
    if status == "timeout" and finished.seconds < limits.seconds:
        return "no time was left for more of it"
    return {
        "ok": "ended with exit code 0",
        "timeout": f"ran for over {limits.seconds:g} s",
        "cpu": f"used over {math.ceil(limits.seconds)} s of CPU time",
        "memory": f"used over {limits.memory_mb} MiB of memory",
        "disk": f"wrote over {limits.file_mb} MiB, or too many or too deep files",
        "output": f"printed over {limits.output_kb} KiB",
        "skipped": "no time was left for it",
        "lost": "the program ended or blocked its sandbox",
    }[status]


@functools.cache
def python() -> tuple[str, str]:
    """Returns the base interpreter, not a virtual environment's, and its installation folder."""
    executable = getattr(sys, "_base_executable", "") or sys.executable
    return os.path.realpath(executable), os.path.realpath(sys.base_prefix)


def spare_uid() -> int | None:
    """Returns a user id for this thread's program, unshared if this process may use such an id."""
    ranges = _uid_ranges()
    for uid in (SPARE_UIDS + threading.get_native_id(), NOBODY):
        if any(start <= uid < start + count for start, count in ranges):
            return uid
    return None


def _file_of(data: bytes) -> int:
    """Creates an open in-memory file with the given data."""
    fd = os.memfd_create("given")
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


@functools.cache
def _uid_ranges() -> list[tuple[int, int]]:
    """Returns (first id, count) of the user ids in this process's user namespace."""
    with open("/proc/self/uid_map") as file:
        rows = [line.split() for line in file]
    return [(int(start), int(count)) for start, _, count in rows]


def _count_tasks(uid: int) -> int:
    """Counts the threads of a user."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == uid:
                    count += os.stat(f"/proc/{name}/task").st_nlink - 2
    return count


@functools.cache
def _counts_by_namespace() -> bool:
    """Returns whether RLIMIT_NPROC counts a user's processes per user namespace."""
    return tuple(int(n) for n in os.uname().release.split("-")[0].split(".")[:2]) >= (5, 14)
