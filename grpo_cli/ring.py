"""A line from each process to the next, which the kernel cuts when a process ends (`watch`)."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
from typing import Any


class Ring:
    """The line of this process to the next, and that of the one before to this.

    Nothing travels on it but who answers, and a full stop from a process that ends in good order.
    What counts is that the kernel cuts it when a process ends, however it does, and not when one is
    merely frozen.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        job: str,
        store: tuple[str, int],
    ) -> None:
        """Listens at the address by which this machine reaches the store."""
        self.rank, self.size, self.job = rank, size, job
        family, *_, address = socket.getaddrinfo(*store, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect(address)  # sends nothing
            own = route.getsockname()[0]
        self.listener = socket.create_server((own, 0), family=family, backlog=8)
        self.listener.setblocking(False)
        self.address = [own, self.listener.getsockname()[1]]
        self.next = (rank + 1) % size
        self.selector: selectors.BaseSelector | None = None
        self._to_next: socket.socket | None = None
        self._heard = b""
        self._tries = 5
        self._before: list[socket.socket] = []  # lines of those that watch this process
        os.register_at_fork(after_in_child=self._let_go)

    @property
    def is_tied(self) -> bool:
        """Whether there is a line to the next process, or will be none."""
        return self._to_next is not None or self._tries == 0 or self.next == self.rank

    def tie(self, address: list[Any] | None) -> None:
        """Opens the line to the next process."""
        if address is None:  # it has not said yet where it listens
            return
        assert self.selector is not None
        self._tries -= 1
        try:
            line = socket.create_connection((address[0], address[1]), timeout=2)
        except OSError:  # no route between the two: heartbeats have to do
            return
        line.setblocking(False)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, option):  # a machine that loses its power is gone after 25 s
                line.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._to_next, self._heard = line, b""
        self.selector.register(line, selectors.EVENT_READ)

    def hears(self, source: object) -> bool:
        """Takes what there is to read. True if the next process is gone."""
        if source is self.listener:
            with contextlib.suppress(OSError):
                line, _ = self.listener.accept()
                line.setblocking(False)
                line.send(f"{self.job}{self.rank}\n".encode())
                self._before.append(line)
            return False
        if self._to_next is None or source is not self._to_next:
            return False
        cut = False
        try:
            data = self._to_next.recv(4096)
            cut = not data
            self._heard += data
        except BlockingIOError:
            return False
        except OSError as error:
            cut = error.errno in (errno.ECONNRESET, errno.ETIMEDOUT, errno.EHOSTUNREACH)
        greeting = f"{self.job}{self.next}\n".encode()
        is_it = self._heard.startswith(greeting)
        if self._heard == greeting + b".":  # it ended in good order: watch the one after it
            self._drop()
            self.next, self._tries = (self.next + 1) % self.size, 5
            return False
        if cut:
            self._drop()
            self._tries = 0 if is_it else self._tries
        return cut and is_it

    def _drop(self) -> None:
        if self._to_next is not None and self.selector is not None:
            self.selector.unregister(self._to_next)
            self._to_next.close()
        self._to_next = None

    def close(self) -> None:
        """Says that this process ends in good order."""
        for line in self._before:
            with contextlib.suppress(OSError):
                line.send(b".")
        self._let_go()

    def _let_go(self) -> None:
        """In a forked child too: it would keep the lines of a parent that is gone."""
        for line in (self.listener, self._to_next, *self._before):
            if line is not None:
                line.close()
        self._before, self._to_next = [], None
