"""Runs untrusted Python programs, and grades them by tests.

    finished = run("print(input()[::-1])", stdin="abc")
    verdict = grade("def f(x): return x + 1", ["assert f(1) == 2", "assert f(2) == 4"])

Two levels of guards. "limits" works everywhere on Linux: a separate process in its own session,
with resource limits, a clean environment, no inherited file descriptors, a temporary folder of its
own, another user where this process is root, and everything that it starts killed at the end.
"namespaces" puts bubblewrap around the same: no network, no files but Python's and the system's,
no processes but its own. docs/sandbox.md says what each level stops.

One sandbox, one bare interpreter, serves all tests of a program: its trusted half, in
sandbox_runner.py, forks a child for each and reports over a pipe that no child has. A sandbox dies
with the process that started it. Importing this is cheap: the standard library and that half.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import marshal
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from grpo_cli import sandbox_runner

GUARDS = ("auto", "namespaces", "limits")
TMP_VARIABLE = "GRPO_SANDBOX_TMP"  # the folder that holds the sandboxes' own
AGREED_VARIABLE = "GRPO_SANDBOX_LEVEL"  # who has settled on which level
PREFIX = "grpo-sandbox-"
MARK = "GRPO_SANDBOX"  # in the environment of what runs in a sandbox: its folder or its starter
NOBODY = 65534
SPARE_UIDS = 0x7000_0000  # one user for each thread that may run a program: this plus its id
START_SECONDS = 15.0  # for an interpreter to be there
GRACE_SECONDS = 8.0  # for a sandbox to end a program that is over its limits, and to report it
MIB = 1 << 20


class SandboxError(RuntimeError):
    """The sandbox could not do its part, whatever the program is worth."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one run may use. A run is the program with one test, or with one input."""

    seconds: float = 6.0  # wall time
    cpu_seconds: int | None = None  # CPU time of each process; None: `seconds`, rounded up
    memory_mb: int = 1024  # MiB of address space of each process, and resident in all of them
    processes: int = 16  # at a time, threads counted
    file_mb: int = 16  # MiB of each file, and of all of them
    open_files: int = 64  # of each process
    output_kb: int = 256  # KiB on stdout, and as much on stderr

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "cpu_seconds" and value is None:
                continue
            kinds = (int, float) if name == "seconds" else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 1e6:
                number = "number" if name == "seconds" else "whole number"
                raise ValueError(f"{name} is {value!r}; it must be a {number} above 0.")


@dataclass(frozen=True)
class Guard:
    """One thing that a sandbox keeps programs from."""

    name: str
    on: bool
    detail: str  # how it works, or why it is off


@dataclass(frozen=True)
class Finished:
    """How a run ended."""

    status: str  # "ok", "error", "killed", "timeout", "memory", "disk", "output", "skipped", "lost"
    returncode: int  # minus the signal's number where a signal ended it
    stdout: str
    stderr: str
    seconds: float  # wall time
    reason: str  # one line
    test_passed: bool = False  # where the run had a test: it came to its end


@dataclass(frozen=True)
class Verdict:
    """What a program's tests say."""

    share: float  # passed / total
    passed: int
    total: int
    reason: str  # the first failure, one line
    seconds: float  # wall time of all tests that were tried


def run(
    source: str,
    stdin: str = "",
    *,
    limits: Limits | None = None,
    guards: str = "auto",
    site_packages: bool = False,
) -> Finished:
    """Runs a program as a script.

    Args:
        source: Python source.
        stdin: what it reads there.
        limits: see `Limits`.
        guards: "namespaces" or "limits" for that level; "auto" for the best that works here.
        site_packages: whether it may import what is installed beside this interpreter.

    Raises:
        SandboxError: fewer guards work here than `guards` asks for, or the sandbox failed.
    """
    level = find_level(guards, site_packages)
    with _Sandbox(level, limits or Limits(), source, "", [(stdin, None)]) as sandbox:
        return sandbox.next_result()


def grade(
    code: str,
    tests: str | Sequence[str | Mapping[str, str]],
    *,
    setup: str = "",
    entry_point: str | None = None,
    limits: Limits | None = None,
    guards: str = "auto",
    site_packages: bool = False,
    total_seconds: float | None = None,
    stop_at_failure: bool = False,
) -> Verdict:
    """Tries a program on its tests, each by itself: a fresh process that runs the program first.

    Args:
        code: Python source.
        tests: a snippet or a list of them, each passed when it runs to its end after the program;
            or a list of {"input": ..., "output": ...}, each passed when the program, run as a
            script with that input, exits with 0 and prints that output. Spaces at the ends of
            lines and empty lines at the end do not count.
        setup: a snippet that runs after the program and before each snippet.
        entry_point: each snippet defines `check`; it is called with what has this name.
        limits: of each test, see `Limits`.
        guards, site_packages: as for `run`.
        total_seconds: wall time of all tests; those not begun by then count as failed.
        stop_at_failure: whether tests after the first failed one are left out, as failed.

    Raises:
        SandboxError: fewer guards work here than `guards` asks for, or the sandbox failed.
        ValueError: `tests` is none of these.
    """
    limits = limits or Limits()
    prepared = [
        _Test.of(test, entry_point) for test in ([tests] if isinstance(tests, str) else tests)
    ]
    if not prepared:
        raise ValueError("tests is empty; there must be at least one.")
    runs = [(test.stdin, test.snippet) for test in prepared]
    passed, seconds, reason = 0, 0.0, ""
    level = find_level(guards, site_packages)
    with _Sandbox(level, limits, code, setup, runs, total_seconds) as sandbox:
        for number, test in enumerate(prepared, start=1):
            finished = sandbox.next_result()
            seconds += finished.seconds
            failure = test.failure(finished)
            if failure is None:
                passed += 1
                continue
            reason = reason or f"test {number} of {len(prepared)}: {failure}"
            if stop_at_failure or finished.status in ("skipped", "lost"):
                break
    return Verdict(passed / len(prepared), passed, len(prepared), reason or "passed", seconds)


@dataclass(frozen=True)
class _Test:
    stdin: str = ""
    snippet: str | None = None
    output: str | None = None

    @classmethod
    def of(cls, test: str | Mapping[str, str], entry_point: str | None) -> _Test:
        if isinstance(test, str):
            call = "" if entry_point is None else f"\n\ncheck({entry_point})\n"
            return cls(snippet=test + call)
        if isinstance(test, Mapping) and {"input", "output"} <= test.keys():
            stdin, output = test["input"], test["output"]
            if isinstance(stdin, str) and isinstance(output, str):
                return cls(stdin=stdin, output=output)
        raise ValueError(
            f"a test is {_short(test)}; it must be a string, or a mapping whose input and output "
            "are strings."
        )

    def failure(self, finished: Finished) -> str | None:
        if self.output is None:
            if finished.test_passed:
                return None
            ended = "the program ended before its test did"
            return ended if finished.status == "ok" else finished.reason
        if finished.status != "ok":
            return finished.reason
        if _lines(finished.stdout) == _lines(self.output):
            return None
        return f"printed {_short(finished.stdout)}, not {_short(self.output)}"


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# Levels


@dataclass(frozen=True)
class Level:
    """A way to start programs that has been seen to work here."""

    name: str  # "namespaces" or "limits"
    guards: tuple[Guard, ...]
    command: tuple[str, ...] = ()  # what goes around the interpreter
    becomes: str | None = None  # "inside", "outside": where it gives up its user; None: it does not
    sys_path: tuple[str, ...] = ()  # added to the interpreter's own

    @property
    def has_own_pids(self) -> bool:
        return self.name == "namespaces"

    @property
    def may_reach_its_keeper(self) -> bool:
        return not self.has_own_pids and self.becomes is None


def describe(guards: str = "auto", site_packages: bool = False) -> str:
    """One line for the log: which guards are on, and which are off and why.

    Raises:
        SandboxError: fewer guards work here than `guards` asks for.
    """
    level = find_level(guards, site_packages)
    on = [f"{guard.name} ({guard.detail})" for guard in level.guards if guard.on]
    off = [f"{guard.name} ({guard.detail})" for guard in level.guards if not guard.on]
    line = f"sandbox: level {level.name}; on: {', '.join(on)}"
    return line + (f"; OFF: {', '.join(off)}" if off else "; off: none")


def guards_available() -> tuple[Guard, ...]:
    """The guards of the best level that works here."""
    return find_level("auto").guards


def find_level(guards: str = "auto", site_packages: bool = False) -> Level:
    """The level that `guards` asks for. It is tried once in a process.

    Raises:
        SandboxError: it does not work here.
    """
    if guards not in GUARDS:
        raise ValueError(f"guards is {guards!r}; it must be one of {', '.join(GUARDS)}.")
    if guards == "auto":
        level = _find(_agreed(), site_packages)
        os.environ[AGREED_VARIABLE] = f"{os.getpid()} {level.name}"
        return level
    return _find(guards, site_packages)


def _find(guards: str, site_packages: bool) -> Level:
    if guards == "limits":
        return _limits(site_packages, 'guards is "limits"')
    level, problem = _namespaces(os.environ.get("PATH", os.defpath), site_packages)
    if level is None and guards == "namespaces":
        raise SandboxError(
            f'the sandbox was asked for guards "namespaces", and {problem}. '
            'docs/sandbox.md tells what they need; guards "limits" does with less.'
        )
    return level or _limits(site_packages, problem)


def _agreed() -> str:
    """What "auto" has come to in the process that started this one.

    A worker process never does with less than its trainer has found and logged.
    """
    pid, _, name = os.environ.get(AGREED_VARIABLE, "").partition(" ")
    return name if name in GUARDS and pid != str(os.getpid()) else "auto"


@functools.cache
def _namespaces(path: str, site_packages: bool) -> tuple[Level | None, str]:
    """The level, or why it does not work here."""
    bwrap = _which("bwrap", path)
    if bwrap is None:
        return None, "bubblewrap is not on PATH (on Debian and Ubuntu: apt install bubblewrap)"
    problem = ""
    for becomes in ("inside", "outside") if os.geteuid() == 0 else (None,):
        if becomes is not None and _spare_uid() is None:
            continue
        for left_out in _LEFT_OUT:
            if becomes == "inside" and "nested" in left_out:
                continue  # has no user namespace
            level = _bubblewrapped(bwrap, becomes, left_out, site_packages)
            try:
                _try(level)
            except SandboxError as error:
                problem = problem or f"bubblewrap does not work here: {error}"
            else:
                return level, ""
    return None, problem or "this process may not become another user"


@functools.cache
def _limits(site_packages: bool, why_alone: str) -> Level:
    becomes = "inside" if os.geteuid() == 0 and _spare_uid() is not None else None
    off = [Guard(name, False, why_alone) for name in ("own files", "no network", "own processes")]
    level = Level(
        "limits",
        (*_BASIC, _user_guard(becomes, "this process is not root"), *off),
        becomes=becomes,
        sys_path=_site_folders() if site_packages else (),
    )
    _try(level)
    return level


def _user_guard(becomes: str | None, otherwise: str, on: bool = False) -> Guard:
    name = "another user"
    if becomes is not None:
        return Guard(name, True, "of its own" if _has_own_uid() else f"{NOBODY}, shared by all")
    if os.geteuid() == 0:
        otherwise = "this process may not become another user"
    return Guard(name, on, otherwise)


_BASIC = (
    Guard("own session", True, "killed with all that it starts"),
    Guard("temporary folder", True, "removed at the end"),
    Guard("resource limits", True, "time, memory, processes, files, output"),
    Guard("clean environment", True, "no variables, no file descriptors"),
)

_IN_MEMORY = ("/tmp", "/dev/shm")  # a program's writable folders where it has namespaces

# What a kernel, a container or an older bubblewrap may not have, the fewest left out first.
_LEFT_OUT = tuple(
    (*option, *nested)
    for option in ((), ("proc",), ("size",), ("size", "proc"))
    for nested in ((), ("nested",))
)


def _bubblewrapped(
    bwrap: str, becomes: str | None, left_out: Sequence[str], site_packages: bool
) -> Level:
    sys_path = _site_folders() if site_packages else ()
    command = [bwrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    # As the first process of its namespace the keeper cannot be signalled from inside, inherits all
    # orphans, and is waited for by bubblewrap itself: a trainer that is a container's first process
    # does not collect the dead of others.
    command += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--as-pid-1"]
    if becomes == "inside":
        command += ["--cap-drop", "ALL"]
        for capability in ("SETUID", "SETGID", "KILL"):
            command += ["--cap-add", f"CAP_{capability}"]
    else:
        command += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
        if "nested" not in left_out:
            command.append("--disable-userns")
    for folder in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        if os.path.islink(folder):
            command += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            command += _shown(folder)
    for path in ("/etc/ld.so.cache", "/etc/alternatives"):
        command += ["--ro-bind-try", path, path]
    for path in (_python()[1], *sys_path):
        if not path.startswith("/usr/") and not _is_hidden(path):
            command += _shown(path)
    # What lies below a folder that is in memory here is shown in another place.
    doors = {path: f"/site/{n}" for n, path in enumerate(sys_path) if _is_hidden(path)}
    for path, door in doors.items():
        command += ["--dir", "/site", "--ro-bind", path, door]
    if "proc" not in left_out:
        command += ["--proc", "/proc"]
    command += ["--dev", "/dev"]
    for folder in _IN_MEMORY:
        size = [] if "size" in left_out else ["--size", "SIZE"]
        command += [*size, "--tmpfs", folder]
    command += ["--remount-ro", "/dev", "--remount-ro", "/"]
    guards = [
        *_BASIC,
        _user_guard(becomes, "the same, without its rights", on=True),
        Guard("own files", True, "read-only, the system's and Python's; its own in memory"),
        Guard("no network", True, "a namespace without one"),
        Guard("own processes", True, "a namespace of their own"),
    ]
    if "size" in left_out:
        guards.append(Guard("hard limit on files", False, "this bubblewrap does not know --size"))
    if "proc" in left_out:
        guards.append(
            Guard("limit on the memory of all processes", False, "/proc cannot be mounted here")
        )
    seen = tuple(doors.get(path, path) for path in sys_path)
    return Level("namespaces", tuple(guards), tuple(command), becomes, seen)


def _is_hidden(path: str) -> bool:
    return any(path.startswith(folder + "/") for folder in _IN_MEMORY)


def _shown(path: str) -> list[str]:
    # Made first, or the folders above would be as closed as this user's home may be.
    above = [word for folder in _above(path) for word in ("--dir", folder)]
    return [*above, "--ro-bind", path, path]


def _above(path: str) -> list[str]:
    parent = os.path.dirname(path)
    return [] if parent == path or parent == "/" else [*_above(parent), parent]


def _try(level: Level) -> None:
    with _Sandbox(level, Limits(), "print('here')", "", [("", None)]) as sandbox:
        finished = sandbox.next_result()
    if finished.stdout != "here\n":
        raise SandboxError(
            f"a first program ended with {finished.reason}: {finished.stderr[-300:]}"
        )


def _which(name: str, path: str) -> str | None:
    for folder in path.split(os.pathsep):
        file = os.path.join(folder, name)
        if os.path.isfile(file) and os.access(file, os.X_OK):
            return os.path.abspath(file)
    return None


@functools.cache
def _python() -> tuple[str, str]:
    """The interpreter, not that of a virtual environment, and the folder it is installed in."""
    executable = getattr(sys, "_base_executable", "") or sys.executable
    return os.path.realpath(executable), os.path.realpath(sys.base_prefix)


def _site_folders() -> tuple[str, ...]:
    names = ("site-packages", "dist-packages")
    return tuple(p for p in sys.path if os.path.basename(p) in names and os.path.isdir(p))


# Users


def _spare_uid() -> int | None:
    """A user for a program of this thread: no other's, if this process may become anyone."""
    ranges = _uid_ranges()
    own = SPARE_UIDS + threading.get_native_id()
    for uid in (own, NOBODY):
        if any(start <= uid < start + count for start, count in ranges):
            return uid
    return None


def _has_own_uid() -> bool:
    return _spare_uid() not in (None, NOBODY)


@functools.cache
def _uid_ranges() -> list[tuple[int, int]]:
    """The users that exist in this process's user namespace."""
    with open("/proc/self/uid_map") as file:
        rows = [line.split() for line in file]
    return [(int(start), int(count)) for start, _, count in rows]


def _count_tasks(uid: int) -> int:
    """How many threads a user has."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == uid:
                    count += os.stat(f"/proc/{name}/task").st_nlink - 2
    return count


@functools.cache
def _counts_by_namespace() -> bool:
    """Whether RLIMIT_NPROC counts a user's processes in each user namespace by itself."""
    return tuple(int(n) for n in os.uname().release.split("-")[0].split(".")[:2]) >= (5, 14)


# One sandbox

_BOOTSTRAP = (
    "import marshal\n"
    "code, settings = marshal.load(open(0, 'rb', closefd=False))\n"
    "names = {'__name__': 'sandbox_runner'}\n"
    "exec(code, names)\n"
    "names['main'](settings)\n"
    "names['os']._exit(0)\n"  # what an interpreter does at its end takes time and is for nothing
)


@functools.cache
def _runner_code() -> Any:
    loader: Any = sandbox_runner.__loader__
    return loader.get_code(sandbox_runner.__name__)


class _Sandbox:
    """A program and its runs, from the start of its process until nothing of it is left.

    The runs are all named at the start. A conversation of several blocks would send them one by one
    over the same pipe.
    """

    def __init__(
        self,
        level: Level,
        limits: Limits,
        source: str,
        setup: str,
        runs: list[tuple[str, str | None]],
        total_seconds: float | None = None,
    ) -> None:
        self.level = level
        self.limits = limits
        self.is_first_run = True
        self.buffer = bytearray()
        try:
            self.folder = None if level.has_own_pids else _Folder()
        except OSError as error:
            raise SandboxError(f"the sandbox has no temporary folder: {error}") from error
        self.uid = None if level.becomes is None else _spare_uid()
        settings = {
            "source": source,
            "setup": setup,
            "runs": runs,
            "seconds": limits.seconds,
            "total_seconds": math.inf if total_seconds is None else total_seconds,
            "memory": limits.memory_mb * MIB,
            "files": limits.file_mb * MIB,
            "output": limits.output_kb * 1024,
            "rlimits": self._rlimits(),
            "uid": self.uid if level.becomes == "inside" else None,
            "has_own_uid": self.uid not in (None, NOBODY),
            "has_own_pids": level.has_own_pids,
            "on_disk": self.folder.path if self.folder else None,
            "in_memory": [] if self.folder else list(_IN_MEMORY),
            "sys_path": list(level.sys_path),
        }
        try:
            self._start(marshal.dumps((_runner_code(), settings)))
        except OSError as error:
            self._remove_folder()
            raise SandboxError(f"the sandbox's process did not start: {error}") from error

    def _rlimits(self) -> list[tuple[str, int]]:
        limits = self.limits
        # Where the program keeps the user of its keeper, that one counts too.
        processes = limits.processes + (0 if self.level.becomes == "inside" else 1)
        if self.uid == NOBODY or not (
            self.uid or (self.level.has_own_pids and _counts_by_namespace())
        ):
            # The kernel counts with them what else this user runs.
            processes += _count_tasks(self.uid or os.geteuid())
        cpu_seconds = limits.cpu_seconds or math.ceil(limits.seconds)
        return [
            ("RLIMIT_CPU", cpu_seconds),
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
        command = [size if word == "SIZE" else word for word in self.level.command]
        options: dict[str, Any] = {}
        if self.level.becomes == "outside":
            options = {"user": self.uid, "group": self.uid, "extra_groups": []}
        # -P, -s and -S: nothing is imported from where this process stands or from site-packages.
        command += [_python()[0], "-P", "-s", "-S", "-X", "utf8", "-c", _BOOTSTRAP]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environment(),
            cwd="/",
            start_new_session=True,
            pass_fds=[self.folder.lock] if self.folder else [],
            bufsize=0,
            **options,
        )
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # then it says why on stderr
            view = memoryview(payload)
            while view:
                view = view[self.process.stdin.write(view) :]

    def _environment(self) -> dict[str, str]:
        variables = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "PYTHONHASHSEED": "0",  # the same program, the same order of its sets, the same verdict
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            MARK: self.folder.path if self.folder else str(os.getpid()),
        }
        libraries = os.path.join(_python()[1], "lib")
        if libraries in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
            variables["LD_LIBRARY_PATH"] = libraries  # it may not start without
        return variables

    def __enter__(self) -> Self:
        try:
            message = self._receive(START_SECONDS)
            problem = "" if message.status == "ready" else message.out
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

    def next_result(self) -> Finished:
        """How the next run ended; "lost" when the program did away with what watches over it.

        Raises:
            SandboxError: the sandbox failed, and not by what the program did.
        """
        # A program of the same user as its keeper may have blocked it, or spoiled the next run.
        is_to_blame = self.level.may_reach_its_keeper
        try:
            message = self._receive(self.limits.seconds + GRACE_SECONDS)
        except EOFError:  # ended by the program, or with it by a kernel short of memory
            message = _Message("lost")
        except TimeoutError as error:
            if not is_to_blame:
                raise SandboxError(str(error)) from None
            message = _Message("lost")
        if message.status == "failed":
            if not is_to_blame or self.is_first_run:
                raise SandboxError(message.out)
            message = _Message("lost")
        self.is_first_run = False
        return Finished(
            "timeout" if message.status == "cpu" else message.status,
            message.returncode,
            message.out,
            message.err,
            message.seconds,
            _reason(message, self.limits),
            message.passed,
        )

    def _receive(self, seconds: float) -> _Message:
        end = time.monotonic() + seconds
        while (newline := self.buffer.find(b"\n")) < 0:
            self._fill(end)
        status, *numbers = self.buffer[:newline].decode().split()
        returncode, took, passed, out, err = map(float, numbers)
        start, middle = newline + 1, newline + 1 + int(out)
        stop = middle + int(err)
        while len(self.buffer) < stop:
            self._fill(end)
        texts = [self.buffer[start:middle], self.buffer[middle:stop]]
        del self.buffer[:stop]
        decoded = [text.decode(errors="replace") for text in texts]
        return _Message(status, int(returncode), took, passed == 1, *decoded)

    def _fill(self, end: float) -> None:
        assert self.process.stdout
        if not _is_readable(self.process.stdout.fileno(), end - time.monotonic()):
            raise TimeoutError("it gave no sign of life for too long")
        data = self.process.stdout.read(1 << 16)
        if not data:
            raise EOFError("its process ended without a word")
        self.buffer += data

    def close(self) -> str:
        """Ends it and waits until nothing is left; returns what it said on stderr."""
        process = self.process
        stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.close()
        stdout.close()
        if not _ends(process, GRACE_SECONDS):
            process.kill()
        process.wait()
        os.set_blocking(stderr.fileno(), False)
        said = stderr.read() or b""
        stderr.close()
        self._remove_folder()
        return said.decode(errors="replace").strip()[-2000:]

    def _remove_folder(self) -> None:
        if self.folder is not None:
            if self.folder.is_there():
                _kill_marked(self.folder.path)
            self.folder.remove()


@dataclass(frozen=True)
class _Message:
    """What a sandbox says of a run, see `sandbox_runner._send`."""

    status: str
    returncode: int = 0
    seconds: float = 0.0
    passed: bool = False
    out: str = ""
    err: str = ""


def _ends(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Waits for an end. `Popen.wait` with a timeout sleeps in steps, mostly for too long."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:  # Linux before 5.3
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        return process.poll() is not None
    try:
        return _is_readable(handle, seconds)
    finally:
        os.close(handle)


def _is_readable(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def _reason(message: _Message, limits: Limits) -> str:
    status, returncode = message.status, message.returncode
    if status == "error":
        lines = [line for line in message.err.splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else f"ended with exit code {returncode}"
    if status == "killed":
        with contextlib.suppress(ValueError):
            return f"ended by {signal.Signals(-returncode).name}"
        return f"ended by signal {-returncode}"
    if status == "timeout" and message.seconds < limits.seconds:
        return "no time was left for more of it"
    cpu_seconds = limits.cpu_seconds or math.ceil(limits.seconds)
    return {
        "ok": "ended with exit code 0",
        "timeout": f"ran for over {limits.seconds:g} s",
        "cpu": f"used over {cpu_seconds} s of CPU time",
        "memory": f"used over {limits.memory_mb} MiB of memory",
        "disk": f"wrote over {limits.file_mb} MiB, or too many or too deep files",
        "output": f"printed over {limits.output_kb} KiB",
        "skipped": "no time was left for it",
        "lost": "the program ended or blocked its sandbox",
    }[status]


# Temporary folders


class _Folder:
    """A folder on disk, locked for as long as its sandbox, or who started it, is alive."""

    def __init__(self) -> None:
        while True:
            self.path = os.path.join(_tmp_parent(), PREFIX + os.urandom(8).hex())
            os.mkdir(self.path, 0o711)
            try:
                self.lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:  # a sweep took it in this moment
                continue
            if _lock(self.lock):
                return
            os.close(self.lock)

    def is_there(self) -> bool:
        return os.path.lexists(self.path)

    def remove(self) -> None:
        with contextlib.suppress(OSError):  # what cannot be removed now is left to a sweep
            sandbox_runner.remove(self.path)
        os.close(self.lock)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _tmp_parent() -> str:
    if parent := os.environ.get(TMP_VARIABLE):
        return os.path.abspath(parent)
    import tempfile

    return tempfile.gettempdir()


def sweep(parent: str | None = None) -> int:
    """Removes the folders of sandboxes that died with the process that started them.

    A sandbox removes its own folder also when that process is killed. What is left, with whatever
    still runs in it, is of sandboxes that were killed themselves.

    Args:
        parent: the folder that holds them; by default where this process would put its own.

    Returns:
        How many there were.
    """
    count = 0
    for entry in _abandoned(parent or _tmp_parent()):
        _kill_marked(entry)
        with contextlib.suppress(FileNotFoundError):
            sandbox_runner.remove(entry)
            count += 1
    return count


def _abandoned(parent: str) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(parent):
            path = os.path.join(parent, name)
            if not name.startswith(PREFIX):
                continue
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except OSError:
                continue
            try:
                if os.fstat(fd).st_uid == os.geteuid() and _lock(fd):
                    yield path
            finally:
                os.close(fd)


def _kill_marked(folder: str) -> None:
    """Kills what still runs with this sandbox's mark in its environment."""
    mark = f"{MARK}={folder}".encode()
    end = time.monotonic() + GRACE_SECONDS
    unseen = 0
    while unseen < 2 and time.monotonic() < end:
        found = [
            pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _has(pid, mark)
        ]
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        # One that forked and ended while /proc was read left a child that was not yet in the list.
        unseen = 0 if found else unseen + 1
        time.sleep(0.01)


def _has(pid: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except OSError:
        return False
