"""Links each process to the next with a socket that the kernel closes when a process ends."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Sequence
from typing import Any


class PeerLink:
    """This process's connection to the next process, and connections from others to it.

    Nothing is sent. The kernel closes a connection when a process ends for any reason, but not when
    the process is frozen.
    """

    def __init__(self, selector: selectors.BaseSelector, store: tuple[str, int]) -> None:
        """Listens on the local address from which this machine reaches the store.

        Args:
            selector: waits for the sockets; pass the ready ones to `is_lost`.
            store: (host, port) of the job's store.
        """
        self._selector = selector
        family, *_, address = socket.getaddrinfo(*store, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect(address)  # sends nothing
            local = route.getsockname()[0]
        self._listener = socket.create_server((local, 0), family=family, backlog=8)
        self._listener.setblocking(False)
        self.address = [local, self._listener.getsockname()[1]]
        self.is_tried = False  # whether `connect` was called
        self._next: socket.socket | None = None
        self.accepted: list[socket.socket] = []
        selector.register(self._listener, selectors.EVENT_READ)
        os.register_at_fork(after_in_child=self._close_sockets)

    def connect(self, address: Sequence[Any]) -> None:
        """Connects to the next process; without a route only heartbeats can detect its end."""
        self.is_tried = True
        with contextlib.suppress(OSError):
            link = socket.create_connection((address[0], address[1]), timeout=2)
            link.setblocking(False)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
                if hasattr(socket, option):  # a machine that loses power is detected after 25 s
                    link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            self._next = link
            self._selector.register(link, selectors.EVENT_READ)

    def is_lost(self, ready: object) -> bool:
        """Handles a socket that is ready; returns True if the next process has ended."""
        if ready is self._listener:
            with contextlib.suppress(OSError):
                self.accepted.append(self._listener.accept()[0])
            return False
        if self._next is None or ready is not self._next:
            return False
        self._selector.unregister(self._next)
        self._next.close()
        self._next = None
        return True

    def close(self) -> None:
        """Closes all connections."""
        self._selector.unregister(self._listener)
        if self._next is not None:
            self._selector.unregister(self._next)
        self._close_sockets()

    def _close_sockets(self) -> None:
        """Closes all sockets; a forked child calls it so as not to keep its parent's links open."""
        for link in (self._listener, self._next, *self.accepted):
            if link is not None:
                link.close()
        self.accepted, self._next = [], None
