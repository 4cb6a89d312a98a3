"""Process groups of gloo with one thread each: with two, PyTorch's corrupt their memory.

Each thread of a group writes the name of what it has done into one string that belongs to them all,
without a lock (`ProcessGroupGloo::runLoop`, lastCompletedWorkName; seen in torch 2.13). Names of
more than 15 letters, such as ALLGATHER_COALESCED of a DTensor, lie on the heap, and are then freed
twice: "malloc(): unaligned tcache chunk detected", a segmentation fault or a hang, once in some
hundred runs, and within seconds where many collectives are under way at once. A second thread is of
use only there.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

THREADS = 1


class _Groups(type):
    """What PyTorch asks of a backend is still whether it is one of gloo's."""

    def __instancecheck__(cls, thing: object) -> bool:
        return isinstance(thing, dist.ProcessGroupGloo)


class _Single(metaclass=_Groups):
    """`ProcessGroupGloo`, as torch.distributed calls it; it hands no options on to it."""

    def __new__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        groups: Any = dist.ProcessGroupGloo  # whose stub knows no options
        options = groups._Options()
        options._threads = THREADS
        options._timeout = timeout
        # As PyTorch finds them itself where it is given none.
        names = os.environ.get("GLOO_SOCKET_IFNAME", "")
        if names:
            options._devices = [groups.create_device(interface=name) for name in names.split(",")]
        else:
            options._devices = [groups.create_default_device()]
        return groups(store, rank, size, options)


def use_one_thread() -> None:
    """Gives every group that this process makes from now on a single thread."""
    if dist.is_available() and dist.is_gloo_available():
        distributed_c10d.ProcessGroupGloo = _Single  # type: ignore[assignment,misc]
