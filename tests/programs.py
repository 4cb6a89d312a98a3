"""Programs that tests start: by themselves, or several of one under torchrun."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
PATIENCE = 600  # seconds with one that hangs: a busy machine may take ten times as long as a quiet


def alone(*program: str) -> list[str]:
    """The command of a program: a script or -m and a module, and its words."""
    return [sys.executable, *program]


def torchrun(processes: int, *program: str) -> list[str]:
    """The command that starts it so many times here; torchrun's own options come before it."""
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    return alone(*launcher, f"--nproc-per-node={processes}", *program)


def started(processes: int, *program: str) -> list[str]:
    """The command of a user: several processes need torchrun, one does not."""
    return torchrun(processes, *program) if processes > 1 else alone(*program)


def environment(**more: str) -> dict[str, str]:
    """That of the tests, with which a program finds this checkout's modules."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def run(command: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    """Waits for its end; `more` is of its environment."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT, env=environment(**more)
    )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def until(condition: Callable[[], object], what: str = "so") -> None:
    """Waits until it is true; fails after a minute."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, f"it is not {what} after a minute"
        time.sleep(0.01)


def gone(*pids: int) -> bool:
    """Waits for the end of processes: what was killed takes a moment to be gone."""
    until(lambda: not any(map(is_running, pids)), "gone")
    return True
