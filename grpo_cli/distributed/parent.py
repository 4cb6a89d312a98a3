"""Ends a process that torchrun started when torchrun is killed.

The processes would otherwise survive, wait for torchrun's store, and join the next torchrun at the
same port. Once the processes of a run have connected, the supervisor watches the store instead and
ends the run cleanly.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from grpo_cli.distributed.stop_signal import is_under_torchrun

PR_SET_PDEATHSIG = 1


def die_with_torchrun() -> None:
    """Makes the kernel kill this process when the torchrun that started it ends.

    Raises:
        SystemExit: torchrun has already ended.
    """
    if sys.platform != "linux" or not is_under_torchrun():
        return
    _on_death_of_parent(signal.SIGKILL)
    if is_orphan():
        sys.exit("grpo: the torchrun that has started this process has ended")


def watched_by_supervisor() -> None:
    """Undoes `die_with_torchrun`, because the supervisor detects the end of torchrun."""
    if sys.platform == "linux" and is_under_torchrun():
        _on_death_of_parent(0)


def is_orphan() -> bool:
    """Returns whether init has adopted this process after torchrun ended.

    In a container torchrun may itself be process 1. If another program runs between torchrun and
    this process, this process is in that program's session.
    """
    if os.getppid() != 1 or os.getsid(0) != os.getpid():
        return False
    return b"torch" not in Path("/proc/1/cmdline").read_bytes()


def _on_death_of_parent(number: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
