"""Shares the states, failures and stop signals of a job's processes in torch's key-value store."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import psutil
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from grpo_cli.distributed import heartbeat, stall_diagnosis
from grpo_cli.distributed.stall_diagnosis import Seen

TIMEOUT = timedelta(seconds=30)  # for one response of the store


@dataclass(frozen=True)
class Failure:
    """The failure that ends a job: an error, a lost process, or a stall."""

    rank: int  # rank of the process that failed
    text: str
    time: float  # unix seconds
    reporter: int  # rank of the process that noticed the failure
    is_stall: bool = False
    frozen: list[dict[str, Any]] = field(default_factory=list)  # to be killed, each "by" a rank


class JobStore:
    """The identities and states of all processes, the first failure and the first stop signal.

    Every method raises a RuntimeError if the store does not respond.
    """

    def __init__(self, rank: int, size: int) -> None:
        """Connects to the store at $MASTER_ADDR."""
        self.rank, self.size = rank, size
        self.address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        job = os.environ.get("TORCHELASTIC_RUN_ID", "-")
        self._job = f"grpo/{job}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._messages = 0
        self.seen: dict[int, Seen] = {}  # last state of each process, as found by `survey`
        self._store = self._connect()

    def _connect(self) -> Any:
        store = TCPStore(*self.address, None, False, TIMEOUT, wait_for_workers=False)
        return PrefixStore(self._job, store)

    def reconnect(self) -> None:
        """Reconnects to a store that did not respond."""
        try:  # TCPStore itself would print a page of C++ if nobody listens
            socket.create_connection(self.address, timeout=2).close()
        except OSError as error:
            raise RuntimeError(f"nobody answers: {error}") from error
        self._store = self._connect()

    def introduce(self, link_address: list[Any]) -> None:
        """Publishes this process's identity."""
        who = {
            "node": heartbeat.node(),
            "pid": os.getpid(),
            "started": psutil.Process().create_time(),
            "link": link_address,
        }
        self._store.set(f"who/{self.rank}", json.dumps(who))

    def who(self, rank: int) -> dict[str, Any]:
        """Returns a process's identity; its node is "?" if it has published none."""
        return self._read(f"who/{rank}") or {"node": "?"}

    def name(self, rank: int) -> str:
        """Returns the name of a process, such as `process 1 on n2`."""
        return f"process {rank} on {self.who(rank)['node']}"

    def publish(self, *, done: bool = False) -> None:
        """Publishes this process's state."""
        self._messages += 1
        message = stall_diagnosis.status_message(self._messages, heartbeat.state(), done=done)
        self._store.set(f"state/{self.rank}", message)

    def survey(self) -> dict[int, Seen]:
        """Returns the states of all processes that have published one."""
        keys = [f"state/{rank}" for rank in range(self.size)]
        if not self._store.check(keys):  # some have not started; a `get` would wait for them
            keys = [key for key in keys if self._store.check([key])]
        for key, raw in zip(keys, self._store.multi_get(keys), strict=True):
            rank = int(key.rpartition("/")[2])
            if rank not in self.seen or self.seen[rank].raw != raw:
                self.seen[rank] = Seen.of(raw, time.monotonic())
        return dict(self.seen)

    def post_failure(self, failure: Failure) -> Failure:
        """Publishes a failure unless there is one already; returns the job's first failure."""
        return Failure(**self._post("failure", asdict(failure)))

    def failure(self) -> Failure | None:
        """Returns the job's first failure."""
        found = self._read("failure")
        return Failure(**found) if found else None

    def post_stop(self, number: int) -> None:
        """Publishes a stop signal unless there is one already."""
        self._post("stop", {"rank": self.rank, "signal": number})

    def stop(self) -> dict[str, int] | None:
        """Returns the first stop signal, with the rank of the process that received it."""
        return self._read("stop")

    def _post(self, key: str, value: dict[str, Any]) -> dict[str, Any]:
        return dict(json.loads(self._store.compare_set(key, "", json.dumps(value))))

    def _read(self, key: str) -> dict[str, Any] | None:
        return dict(json.loads(self._store.get(key))) if self._store.check([key]) else None
