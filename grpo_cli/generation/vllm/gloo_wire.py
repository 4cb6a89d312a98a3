"""A gloo process group of one trainer process and one server's workers. Imports only torch."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    BroadcastOptions,
    ProcessGroupGloo,
    TCPStore,
)


def local_address(host: str, port: int) -> str:
    """Returns this machine's address on the route to `host`; sends nothing."""
    family, _, _, _, address = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def listen(address: str, size: int, timeout: float) -> tuple[TCPStore, int]:
    """Returns the rendezvous store for a group of `size`, and its port, a free one.

    Raises:
        OSError: the address is not this machine's.
    """
    # Bound here, since torch's rendezvous by address would join torchrun's own store.
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family, backlog=64)
    port = int(listening.getsockname()[1])
    # The store takes ownership of the socket.
    store = TCPStore(
        address, port, size, is_master=True, timeout=timedelta(seconds=timeout),
        wait_for_workers=False, master_listen_fd=listening.detach(),
    )  # fmt: skip
    return store, port


def join(address: str, port: int, rank: int, size: int, timeout: float) -> Any:
    """Joins the group that meets at an address, as a worker.

    Raises:
        RuntimeError: the group was not complete within `timeout` seconds.
    """
    store = TCPStore(
        address, port, size, is_master=False, timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
    )  # fmt: skip
    return group(store, local_address(address, port), rank, size, timeout)


def group(store: Any, own_address: str, rank: int, size: int, timeout: float) -> Any:
    """Returns a process group beside the default one; `timeout` s to connect and per operation."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._threads = 1  # see distributed/workers.py
    options._devices = [ProcessGroupGloo.create_device(hostname=own_address)]
    options._timeout = timedelta(seconds=timeout)
    return ProcessGroupGloo(store, rank, size, options)


def broadcast(group: Any, tensor: Tensor, timeout: float) -> Any:
    """Begins a broadcast of rank 0's tensor; returns a handle to wait for."""
    options = BroadcastOptions()
    options.rootRank, options.timeout = 0, timedelta(seconds=timeout)
    return group.broadcast([tensor], options)
