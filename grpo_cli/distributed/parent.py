"""Ends a process that torchrun started when torchrun is killed.

The processes would otherwise survive, wait for torchrun's store, and join the next torchrun at the
same port.
"""

from __future__ import annotations

import ctypes
import signal
import sys

from grpo_cli.distributed.stop_signal import is_under_torchrun

PR_SET_PDEATHSIG = 1


def die_with_torchrun() -> None:
    """Makes the kernel kill this process when the torchrun that started it ends."""
    if sys.platform == "linux" and is_under_torchrun():
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
