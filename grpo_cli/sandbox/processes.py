"""Finds, measures and kills the processes that the runner's programs have started."""

from __future__ import annotations

import os
import resource
import time

SIGKILL = 9
KILL_SECONDS = 5.0
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38


def prctl(option: int, value: int, address: int = 0) -> None:
    import ctypes  # takes 6 ms, so only if needed

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, ctypes.c_void_p(address), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def end_before_trainer(process: int | str) -> None:
    """Makes a kernel short of memory end a sandbox's process before the trainer."""
    try:
        with open(f"/proc/{process}/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass  # no /proc in the sandbox, or the process has ended


def resident_bytes(processes: list[int]) -> int:
    """Returns the resident bytes of all processes; shared pages count repeatedly."""
    pages = 0
    for process in processes:
        try:
            with open(f"/proc/{process}/statm") as file:
                pages += int(file.read().split()[1])
        except OSError:
            pass
    return pages * resource.getpagesize()


def every(has_own_pids: bool) -> list[int]:
    """Returns every process of the programs."""
    if not has_own_pids:
        return _descendants(os.getpid())
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    return [int(name) for name in names if name.isdigit() and int(name) not in (1, os.getpid())]


def _descendants(pid: int) -> list[int]:
    found = _children(pid)
    for child in found:  # grows during the loop
        found += _children(child)
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
                if int(file.read().rpartition(")")[2].split()[1]) == parent:
                    children.append(int(name))
        except (OSError, ValueError):
            pass
    return children


def kill_all(has_own_pids: bool) -> None:
    # -1: everything in the namespace but this process and the first
    for process in [-1] if has_own_pids else _descendants(os.getpid()):
        kill(process)


def reap(has_own_pids: bool) -> None:
    """Kills and reaps until no child is left; orphans have become children."""
    end = time.monotonic() + KILL_SECONDS
    while time.monotonic() < end:
        kill_all(has_own_pids)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
    raise TimeoutError(f"processes could not be killed in {KILL_SECONDS:.0f} s")


def kill_and_wait(child: int) -> int:
    """Returns the exit code of a child, which may have ended by itself."""
    kill(child)  # a process that has ended keeps its status
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill(process: int) -> None:
    try:
        os.kill(process, SIGKILL)
    except ProcessLookupError:
        pass
