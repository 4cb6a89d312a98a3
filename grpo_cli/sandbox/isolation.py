"""Finds the levels of guards that this kernel, container and user allow.

"limits" works everywhere on Linux: a separate process in its own session, with resource limits, a
clean environment, no inherited file descriptors and its own temporary folder. It gets another user
if this process is root, and all its descendants are killed at the end. "namespaces" adds
bubblewrap: no network, no files except Python's and the system's, no processes except its own.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from grpo_cli.sandbox import process
from grpo_cli.sandbox.process import IN_MEMORY, NOBODY, Limits, Sandbox, SandboxError
from grpo_cli.sandbox.system_calls import call_filter

GUARDS = ("auto", "namespaces", "limits")


@dataclass(frozen=True)
class SandboxLevel:
    """A tested way to start programs on this machine."""

    name: str  # "namespaces" or "limits"
    off: tuple[str, ...] = ()  # guards of the level that do not work here
    command: tuple[str, ...] = ()  # words before the interpreter
    becomes: str | None = None  # where it changes its user: "inside", "outside"; None: nowhere
    sys_path: tuple[str, ...] = ()  # added to the interpreter's own

    @property
    def has_own_pids(self) -> bool:
        return self.name == "namespaces"


def describe(guards: str = "auto", site_packages: bool = False) -> str:
    """Describes in one line the level, its guards that do not work, and what it does not prevent.

    Raises:
        SandboxError: fewer guards work here than `guards` requests.
    """
    level = find_level(guards, site_packages)
    off = [*level.off, *([] if call_filter() else ["filter of system calls"])]
    line = f"sandbox: level {level.name}; " + (f"OFF: {', '.join(off)}" if off else "off: none")
    return line if level.has_own_pids else f"{line}; {_reach()}"


def find_level(guards: str = "auto", site_packages: bool = False) -> SandboxLevel:
    """Returns the level for `guards`, after trying it once in this process.

    Raises:
        SandboxError: the level does not work here.
        ValueError: `guards` is not in GUARDS.
    """
    if guards not in GUARDS:
        raise ValueError(f"guards is {guards!r}; it must be one of {', '.join(GUARDS)}.")
    if guards == "limits":
        return _limits(site_packages)
    level, problem = _namespaces(os.environ.get("PATH", os.defpath), site_packages)
    if level is None:
        raise SandboxError(
            f"{problem}, and programs run behind namespaces unless told otherwise: docs/sandbox.md "
            f'tells what they need. guards "limits" runs programs without: {_reach()}.'
        )
    return level


def _reach() -> str:
    """Lists what the level "limits" does not prevent."""
    reads = "what any user may read" if _may_change_user() else "what you can read"
    writes = "" if _may_change_user() else ", change your files and end your processes"
    return f"a program can use the network, read {reads}, write to /tmp{writes}"


def _may_change_user() -> bool:
    return os.geteuid() == 0 and process.spare_uid() is not None


@functools.cache
def _namespaces(path: str, site_packages: bool) -> tuple[SandboxLevel | None, str]:
    """Returns (the level or None, the reason why it does not work here)."""
    found = shutil.which("bwrap", path=path)
    if found is None:
        return None, "bubblewrap is not on PATH (on Debian and Ubuntu: apt install bubblewrap)"
    bwrap, problem = os.path.abspath(found), ""
    for becomes in ("inside", "outside") if os.geteuid() == 0 else (None,):
        if becomes is not None and process.spare_uid() is None:
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
def _limits(site_packages: bool) -> SandboxLevel:
    becomes = "inside" if _may_change_user() else None
    sys_path = _site_folders() if site_packages else ()
    off = ("own files", "no network", "own processes")
    level = SandboxLevel("limits", off, becomes=becomes, sys_path=sys_path)
    _try(level)
    return level


# Features that a kernel, a container or an older bubblewrap may lack; fewest omissions first.
_LEFT_OUT = tuple(
    (*option, *nested)
    for option in ((), ("proc",), ("size",), ("size", "proc"))
    for nested in ((), ("nested",))
)


def _bubblewrapped(
    bwrap: str, becomes: str | None, left_out: Sequence[str], site_packages: bool
) -> SandboxLevel:
    sys_path = _site_folders() if site_packages else ()
    command = [bwrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    # As its namespace's first process, the runner cannot be signalled from inside and inherits all
    # orphans. bubblewrap itself waits for it: a trainer that is a container's first process does
    # not reap other processes.
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
            command += _bind(folder)
    for path in ("/etc/ld.so.cache", "/etc/alternatives"):
        command += ["--ro-bind-try", path, path]
    for path in (process.python()[1], *sys_path):
        if not path.startswith("/usr/") and not _is_hidden(path):
            command += _bind(path)
    # Folders below one that is in memory inside are mounted elsewhere.
    moved = {path: f"/site/{n}" for n, path in enumerate(sys_path) if _is_hidden(path)}
    for path, target in moved.items():
        command += ["--dir", "/site", "--ro-bind", path, target]
    if "proc" not in left_out:
        command += ["--proc", "/proc"]
    command += ["--dev", "/dev"]
    for folder in IN_MEMORY:
        size = [] if "size" in left_out else ["--size", "SIZE"]
        command += [*size, "--tmpfs", folder]
    command += ["--remount-ro", "/dev", "--remount-ro", "/"]
    if call_filter() is not None:
        command += ["--seccomp", "CALL_FILTER"]
    off = {
        "size": "hard limit on files (this bubblewrap does not know --size)",
        "proc": "limit on the memory of all processes (/proc cannot be mounted here)",
    }
    missing = tuple(text for name, text in off.items() if name in left_out)
    visible = tuple(moved.get(path, path) for path in sys_path)
    return SandboxLevel("namespaces", missing, tuple(command), becomes, visible)


def _is_hidden(path: str) -> bool:
    return any(path.startswith(folder + "/") for folder in IN_MEMORY)


def _bind(path: str) -> list[str]:
    # Create the parents first, or they would be as inaccessible as this user's home may be.
    _, *above = reversed(PurePosixPath(path).parents)
    return [*(word for p in above for word in ("--dir", str(p))), "--ro-bind", path, path]


def _try(level: SandboxLevel) -> None:
    with Sandbox(level, Limits(), "print('here')", [""]) as sandbox:
        finished = sandbox.next_result()
    if finished.stdout != "here\n":
        raise SandboxError(
            f"a first program ended with {finished.reason}: {finished.stderr[-300:]}"
        )


def _site_folders() -> tuple[str, ...]:
    names = ("site-packages", "dist-packages")
    return tuple(p for p in sys.path if os.path.basename(p) in names and os.path.isdir(p))
