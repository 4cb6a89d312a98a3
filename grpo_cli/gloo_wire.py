"""A gloo group between one trainer process and the workers of one server. Needs torch alone."""

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

from grpo_cli import gloo


def local_address(host: str, port: int) -> str:
    """This machine's address on the way to another; nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


class Store:
    """Where a group meets: a TCP store that the trainer holds, on a port of its own."""

    def __init__(self, address: str, port: int, size: int, timeout: float) -> None:
        """Listens. A port of 0 is any free one.

        Raises:
            OSError: the port is taken, or the address is not this machine's.
        """
        # Bound here: torch's rendezvous by address would join torchrun's own store instead.
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.create_server((address, port), family=family, backlog=64)
        self.port = int(listening.getsockname()[1])
        # The store takes the socket over, and closes it.
        self.store = TCPStore(
            address,
            self.port,
            size,
            is_master=True,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )


def join(address: str, port: int, rank: int, size: int, timeout: float) -> Any:
    """Joins the group that meets at an address, as a worker.

    Raises:
        RuntimeError: nobody is there, or not all came, within `timeout` seconds.
    """
    store = TCPStore(
        address, port, size, is_master=False, timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
    )  # fmt: skip
    return group(store, local_address(address, port), rank, size, timeout)


def group(store: Any, own_address: str, rank: int, size: int, timeout: float) -> Any:
    """A process group apart from the default one; to meet, and for an operation, `timeout` s."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._threads = gloo.THREADS
    options._devices = [ProcessGroupGloo.create_device(hostname=own_address)]
    options._timeout = timedelta(seconds=timeout)
    return ProcessGroupGloo(store, rank, size, options)


def broadcast(group: Any, tensor: Tensor, timeout: float) -> Any:
    """Begins to give rank 0's tensor to all, or to take it; what is returned can be waited for."""
    options = BroadcastOptions()
    options.rootRank, options.timeout = 0, timedelta(seconds=timeout)
    return group.broadcast([tensor], options)
