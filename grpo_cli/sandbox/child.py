"""Turns a forked child into a program or its judge, and runs it until it ends."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import resource
import sys

from grpo_cli.sandbox.folders import empty
from grpo_cli.sandbox.judge import FAILED, PASSED, judge
from grpo_cli.sandbox.peer import BrokenError, Peer
from grpo_cli.sandbox.processes import PR_SET_DUMPABLE, PR_SET_PDEATHSIG, SIGKILL, prctl

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from grpo_cli.sandbox.runner import RunnerSettings

SIGINT = 2
PROGRAM_GONE = 99  # exit status of a judge whose program is gone


def be_the_judge(
    settings: RunnerSettings, number: int, folder: str, fds: tuple[int, ...], pipes: tuple[int, ...]
) -> NoReturn:
    verdict, problem = fds
    nowhere = os.open(os.devnull, os.O_RDWR)
    kept = (verdict, *pipes, settings.tests)
    become(settings, folder, (nowhere,) * 3, problem, kept, is_judge=True)
    import marshal

    with open(settings.tests, "rb") as file:
        file.seek(0)
        test = marshal.load(file)[number]
    text = judge(pipes[0], pipes[1], test)
    report = memoryview(text.encode(errors="replace")[: settings.output])
    while report:
        report = report[os.write(verdict, report) :]
    os._exit(PROGRAM_GONE if text == FAILED else int(text != PASSED))


def become(
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
        libraries = {}
        if settings.on_disk and uid is not None:
            folders = filter(os.path.isdir, sys.path)
            libraries = {path: os.open(path, os.O_PATH | os.O_DIRECTORY) for path in folders}
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
            prctl(PR_SET_PDEATHSIG, SIGKILL)
        if is_judge:
            _signal.signal(SIGINT, _signal.SIG_DFL)  # no KeyboardInterrupt that a test could catch
            if uid is not None and os.stat("/proc/self").st_uid != 0:  # fs.suid_dumpable is 1
                prctl(PR_SET_DUMPABLE, 0)
        else:
            if not settings.has_own_pids:
                prctl(PR_SET_DUMPABLE, 1)  # its mark must be readable, see `TemporaryFolder`
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
                folders[:] = [door + f[len(path) :] if f.startswith(path) else f for f in folders]


def run_script(source: str) -> NoReturn:
    names = _new_module("__main__")
    code = 0
    try:
        exec(_compiled(source), names)
    except BaseException as error:
        code = _report(error)
    _leave(code)


def serve(source: str, questions: int, answers: int) -> NoReturn:
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

    def outcome() -> None:
        if error is not None:
            raise error

    def value(name: str) -> Any:
        if name not in names:
            raise NameError(f"name {name!r} is not defined")
        return names[name]

    peer = Peer(questions, answers, {"name": value})
    try:
        if peer.reply(outcome, [], {}):
            peer.outcome([])  # never returns: serves until the judge is gone
    except BrokenError:  # the judge is gone
        pass
    os._exit(1)


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
