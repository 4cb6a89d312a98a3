"""Supervises untrusted programs from inside the sandbox, as its trusted half.

`process.py` sends the compiled code of messages.py, judge.py and this module, and the runs, to a
bare interpreter (no site, no environment). For each run it forks a child that applies the limits,
changes its user if possible, and executes the program. The parent collects the output and enforces
the limits that no rlimit covers. It ends the run by killing all processes that the run started.

If a run is a test, a second child is the judge, with its own limits and user. It reads the test
from a file that neither this process nor the program's reads, and reports the verdict.

It imports almost nothing, because each program waits for the imports. `signal`, `typing` and
`contextlib` would take longer than everything else.
"""

# ruff: noqa: SIM105

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import resource
import select
import sys
import time

from grpo_cli.sandbox.judge import FAILED, PASSED, judge
from grpo_cli.sandbox.messages import as_json
from grpo_cli.sandbox.peer import BrokenError, Peer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

SIGINT = 2
SIGKILL = 9
SIGXCPU = 24
LIFELINE = 0  # stdin: closes when the process that requested the run is gone
RESULTS = 1
LOOK_SECONDS = 0.1  # between two checks of memory and files
KILL_SECONDS = 5.0
MAX_FILES = 1000  # in the temporary folder: removing a file takes up to 4 ms on some disks
PROGRAM_GONE = 99  # exit status of a judge whose program is gone
MAX_PATH = 1000  # characters; checking deeper folders takes too long
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38


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
        said = f"{type(error).__name__}: {error}".encode(errors="replace")
        _send("failed" if is_own else "lost", out=said)
    finally:
        _kill_all(settings)
        if settings.on_disk is not None:
            _clean_up(settings, settings.on_disk)


def _prepare(settings: RunnerSettings) -> None:
    _go_first("self")
    if settings.uid is None or not settings.has_own_pids:
        _prctl(PR_SET_CHILD_SUBREAPER, 1)  # adopts orphans, so that none is lost
        _prctl(PR_SET_NO_NEW_PRIVS, 1)  # disables setuid programs such as sudo
        _prctl(PR_SET_DUMPABLE, 0)  # hides this process's memory from processes of the same user
    if settings.call_filter is not None:
        import ctypes

        rules = ctypes.create_string_buffer(settings.call_filter)
        program = (ctypes.c_size_t * 2)(len(settings.call_filter) // 8, ctypes.addressof(rules))
        _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program))
    for folder in settings.in_memory:
        os.chmod(folder, 0o1777)


def _go_first(process: int | str) -> None:
    """Makes a kernel short of memory end a sandbox's process before the trainer."""
    try:
        with open(f"/proc/{process}/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass  # no /proc in the sandbox, or the process has ended


def _prctl(option: int, value: int, address: int = 0) -> None:
    import ctypes  # takes 6 ms, so only if needed

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, ctypes.c_void_p(address), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def _send(
    status: str,
    returncode: int = 0,
    seconds: float = 0.0,
    passed: bool = False,
    out: bytes = b"",
    err: bytes = b"",
) -> None:
    texts = [text.decode(errors="replace") for text in (out, err)]
    message = memoryview(f"{as_json([status, returncode, seconds, passed, *texts])}\n".encode())
    while message:
        message = message[os.write(RESULTS, message) :]


# One run, seen from the parent


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
    out, err, verdict, problem = ours
    questions: tuple[int, ...] = os.pipe() if stdin is None else ()
    answers: tuple[int, ...] = os.pipe() if stdin is None else ()
    start = time.monotonic()
    child = judge = os.fork()
    settings.has_run = True
    if child == 0:
        pipes = (questions[0], answers[1]) if questions else ()
        _become(settings, folder, (given, *theirs[:2]), theirs[3], pipes)
        _serve(settings.source, *pipes) if pipes else _run_script(settings.source)
    if stdin is None:
        judge = os.fork()
        if judge == 0:
            _be_the_judge(settings, number, folder, theirs[2:], questions, answers)
    for fd in (given, *theirs, *questions, *answers):
        os.close(fd)
    try:
        if text := os.read(problem, 1000):  # closed when the child is ready to run the program
            raise CannotStartError(text.decode(errors="replace"))
        end = time.monotonic() + seconds
        texts = {out: bytearray(), err: bytearray(), verdict: bytearray()}
        monitor = _Monitor(settings, judge, folder, texts)
        status = monitor.until(end)
        took = time.monotonic() - start
    finally:
        _kill_all(settings)
        returncode = _end(judge)
        if judge != child:
            program = _end(child)
            returncode = program if returncode == PROGRAM_GONE else returncode
        _reap(settings)
    monitor.drain()
    for fd in ours:
        os.close(fd)
    if monitor.is_over_full:
        status = "output"
    elif status == "" and returncode < 0:
        status = "cpu" if returncode == -SIGXCPU else "killed"
    elif status == "":
        status = "ok" if returncode == 0 else "error"
    report = bytes(monitor.texts[verdict])
    passed = status == "ok" and report == PASSED.encode()
    why = report[1:] or bytes(monitor.texts[err])
    _send(status, returncode, took, passed, bytes(monitor.texts[out]), why)


def _end(child: int) -> int:
    _kill(child)  # a process that has ended keeps its status
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _kill(process: int) -> None:
    try:
        os.kill(process, SIGKILL)
    except ProcessLookupError:
        pass


class _Monitor:
    """Collects the output of a child until it ends or must be ended."""

    def __init__(
        self, settings: RunnerSettings, child: int, folder: str, texts: dict[int, bytearray]
    ) -> None:
        self.settings = settings
        self.child = child
        self.folders = settings.in_memory or [folder]
        self.texts = texts
        self.is_over_full = False
        self.poll = select.poll()
        self.open = set(texts)
        for fd in texts:
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
                    if problem := _overuse(self.settings, self.folders):
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


# Limits that no rlimit covers: total memory and total file size


def _overuse(settings: RunnerSettings, folders: list[str]) -> str:
    processes = _processes(settings)
    if _memory(processes) > settings.memory:
        return "memory"
    for process in () if settings.has_own_pids else processes:
        _go_first(process)  # it may have undone that; in a namespace all end with this process
    if any(_is_over_full(folder, settings.files) for folder in folders):
        return "disk"
    return ""


def _memory(processes: list[int]) -> int:
    """Returns the resident bytes of all processes; shared pages count repeatedly."""
    pages = 0
    for process in processes:
        try:
            with open(f"/proc/{process}/statm") as file:
                pages += int(file.read().split()[1])
        except OSError:
            pass
    return pages * resource.getpagesize()


def _is_over_full(folder: str, limit: int) -> bool:
    size = count = 0
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    count += 1
                    if count > MAX_FILES or len(entry.path) > MAX_PATH:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:  # gone by now, or not readable by this user
            pass
    return size > limit


# Processes


def _processes(settings: RunnerSettings) -> list[int]:
    """Returns every process of the programs."""
    if not settings.has_own_pids:
        return _descendants(os.getpid())
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    return [int(name) for name in names if name.isdigit() and int(name) not in (1, os.getpid())]


def _descendants(pid: int) -> list[int]:
    found = []
    parents = [pid]
    while parents:
        children = _children(parents.pop())
        found += children
        parents += children
    return found


def _children(pid: int) -> list[int]:
    children: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                children += map(int, file.read().split())
    except OSError:
        if pid == os.getpid():  # the kernel lacks these lists
            return _children_by_search(pid)
    return children


def _children_by_search(parent: int) -> list[int]:
    children = []
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/stat") as file:
                is_child = int(file.read().rpartition(")")[2].split()[1]) == parent
        except (OSError, ValueError):
            continue
        if is_child:
            children.append(int(name))
    return children


def _kill_all(settings: RunnerSettings) -> None:
    # -1: everything in the namespace but this process and the first
    for process in [-1] if settings.has_own_pids else _descendants(os.getpid()):
        _kill(process)


def _reap(settings: RunnerSettings) -> None:
    """Kills and reaps until no child is left; orphans have become children."""
    end = time.monotonic() + KILL_SECONDS
    while time.monotonic() < end:
        _kill_all(settings)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
    raise TimeoutError(f"processes could not be killed in {KILL_SECONDS:.0f} s")


# Files


def _clean_up(settings: RunnerSettings, folder: str) -> None:
    remove(folder)
    if settings.uid is not None and settings.has_own_uid:
        for shared in ("/tmp", "/var/tmp", "/dev/shm", "/run/lock"):  # writable for any user
            _remove_those_of(settings.uid, shared)


def _remove_those_of(uid: int, folder: str) -> None:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        try:
            if entry.stat(follow_symlinks=False).st_uid != uid:
                continue
            if entry.is_dir(follow_symlinks=False):
                remove(entry.path)
            else:
                os.unlink(entry.path)
        except FileNotFoundError:
            pass


def remove(folder: str) -> None:
    """Removes a folder that nothing writes to any more."""
    if os.path.islink(folder):
        os.unlink(folder)
    elif os.path.isdir(folder):
        empty(folder)
        os.rmdir(folder)


def open_up(folder: str) -> None:
    """Makes a folder writable, but not the target of a link that replaced it."""
    try:
        fd = os.open(folder, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY)
    except NotADirectoryError:
        return
    try:
        os.chmod(f"/proc/self/fd/{fd}" if os.path.isdir("/proc/self") else folder, 0o700)
    except PermissionError:
        pass  # owned by another user, and so already open
    finally:
        os.close(fd)


def empty(folder: str) -> None:
    """Removes all contents of a folder, regardless of depth and permissions.

    Moves nested folders up until none is left, since paths may be too long to name and a recursion
    too deep. Nothing may write there any more.
    """
    open_up(folder)
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            open_up(entry.path)
            for inner in list(os.scandir(entry.path)):
                if inner.is_dir(follow_symlinks=False):
                    open_up(inner.path)  # moving a folder requires it to be writable
                os.rename(inner.path, f"{folder}/{os.urandom(16).hex()}")
            os.rmdir(entry.path)


# The child, until it ends


def _be_the_judge(
    settings: RunnerSettings,
    number: int,
    folder: str,
    fds: tuple[int, ...],
    questions: tuple[int, ...],
    answers: tuple[int, ...],
) -> NoReturn:
    verdict, problem = fds
    nowhere = os.open(os.devnull, os.O_RDWR)
    kept = (verdict, answers[0], questions[1], settings.tests)
    _become(settings, folder, (nowhere,) * 3, problem, kept, is_judge=True)
    import marshal

    with open(settings.tests, "rb") as file:
        file.seek(0)
        test = marshal.load(file)[number]
    text = judge(answers[0], questions[1], test)
    report = memoryview(text.encode(errors="replace")[: settings.output])
    while report:
        report = report[os.write(verdict, report) :]
    os._exit(PROGRAM_GONE if text == FAILED else int(text != PASSED))


def _become(
    settings: RunnerSettings,
    folder: str,
    standard: tuple[int, ...],
    problem: int,
    kept: tuple[int, ...],
    is_judge: bool = False,
) -> None:
    """Applies a child's limits and user, and closes all other file descriptors."""
    try:
        for number, fd in enumerate(standard):
            os.dup2(fd, number)
        sys.path += settings.sys_path
        uid = settings.uid
        libraries = _open_libraries() if settings.on_disk and uid is not None else {}
        os.chdir(folder)  # the folder may be inaccessible to the other user
        _close_all(but=(problem, *kept, *libraries.values()))
        os.setsid()
        for name, limit in settings.rlimits:
            _set_rlimit(getattr(resource, name), limit)
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            _reach_libraries(libraries)
        if not settings.has_own_pids:
            _prctl(PR_SET_PDEATHSIG, SIGKILL)
        if is_judge:
            _signal.signal(SIGINT, _signal.SIG_DFL)  # no KeyboardInterrupt that a test could catch
            if uid is not None and os.stat("/proc/self").st_uid != 0:  # fs.suid_dumpable is 1
                _prctl(PR_SET_DUMPABLE, 0)
        else:
            if not settings.has_own_pids:
                _prctl(PR_SET_DUMPABLE, 1)  # its mark must be readable, see `sandbox.sweep`
            for other in settings.in_memory:
                empty(other)  # files that the previous run left there
        os.environ["HOME"] = os.environ["TMPDIR"] = folder
    except BaseException as error:
        os.write(problem, f"{type(error).__name__}: {error}".encode(errors="replace"))
        os._exit(1)
    os.close(problem)


def _close_all(but: tuple[int, ...]) -> None:
    start = 3
    for fd in (*sorted(but), 1000):  # the parent has far fewer
        os.closerange(start, fd)
        start = fd + 1


def _set_rlimit(kind: int, limit: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    if kind != resource.RLIMIT_CPU:
        resource.setrlimit(kind, (limit, limit))
    elif hard != limit:  # a process over its CPU time gets SIGXCPU, and SIGKILL a second later
        resource.setrlimit(kind, (limit, limit + 1))


def _open_libraries() -> dict[str, int]:
    return {
        path: os.open(path, os.O_PATH | os.O_DIRECTORY) for path in sys.path if os.path.isdir(path)
    }


def _reach_libraries(libraries: dict[str, int]) -> None:
    """Keeps Python's folders open, in case they lie in a home that the new user may not enter."""
    for path, fd in libraries.items():
        if os.access(path, os.R_OK | os.X_OK):
            os.close(fd)
            continue
        door = f"/proc/self/fd/{fd}"
        sys.path[sys.path.index(path)] = door
        for module in list(sys.modules.values()):
            folders = getattr(module, "__path__", None)
            if isinstance(folders, list):
                folders[:] = [
                    f.replace(path, door, 1) if f.startswith(path) else f for f in folders
                ]


def _run_script(source: str) -> NoReturn:
    names = _new_module("__main__")
    code = 0
    try:
        exec(_compiled(source), names)
    except BaseException as error:
        code = _report(error)
    _leave(code)


def _serve(source: str, questions: int, answers: int) -> NoReturn:
    """Runs the program, and then serves the judge's requests."""
    # Not "__main__": as in an imported module, code under `if __name__ == ...` does not run.
    os.read(questions, 1)
    names = _new_module("solution")
    process, error = os.getpid(), None
    try:
        exec(_compiled(source), names)
    except BaseException as raised:
        error = raised
    if os.getpid() != process:  # a child that the program forked
        os._exit(0)
    peer = Peer(questions, answers, {"name": lambda name: _value(names, name)})
    try:
        if peer.reply(lambda: _raise(error), [], {}):
            peer.outcome([])  # never returns: serves until the judge is gone
    except BrokenError:  # the judge is gone
        pass
    os._exit(1)


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _value(names: dict[str, Any], name: str) -> Any:
    if name not in names:
        raise NameError(f"name {name!r} is not defined")
    return names[name]


def _new_module(name: str) -> dict[str, Any]:
    import builtins
    from _sitebuiltins import Quitter  # `exit` and `quit`, which only `site` would import

    for quitter in ("exit", "quit"):
        setattr(builtins, quitter, Quitter(quitter, "Ctrl-D"))
    module = type(sys)(name)
    module.__file__ = "main.py"
    sys.modules[name] = module
    sys.argv = ["main.py"]
    return module.__dict__


def _compiled(source: str) -> Any:
    with open("main.py", "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(source)  # for tracebacks and `inspect`; tests are not readable
    return compile(source, "main.py", "exec", dont_inherit=True)


def _report(error: BaseException) -> int:
    """Prints the error that ended a program as Python does, and returns its exit code."""
    code = 1
    try:
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if code == 1 and error.code != 1:
                print(error.code, file=sys.stderr)
        else:
            trace = error.__traceback__
            while trace and trace.tb_frame.f_code.co_filename == _report.__code__.co_filename:
                trace = trace.tb_next
            sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.stderr.flush()
    except BaseException:
        pass  # an error of its own stderr or hook
    return code


def _leave(code: int) -> NoReturn:
    """Ends like an interpreter: joins threads, runs exit functions, flushes buffers."""
    import atexit

    try:
        if threading := sys.modules.get("threading"):
            threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        code = code or 120  # Python's own code for this
    finally:
        os._exit(code & 0xFF)
