"""Shares the states, failures and stop signals of a job's processes in torch's key-value store."""

from __future__ import annotations

import functools
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from grpo_cli.distributed import heartbeat, stall_diagnosis
from grpo_cli.distributed.stall_diagnosis import PublishedState

TIMEOUT = timedelta(seconds=30)  # for one response of the store


@dataclass(frozen=True)
class Failure:
    """The failure that ends a job: an error, a lost process, or a stall."""

    rank: int  # rank of the process that failed
    text: str
    time: float  # unix seconds
    reporter: int  # rank of the process that noticed the failure
    is_stall: bool = False
    frozen: list[dict[str, Any]] = field(default_factory=list)  # processes to be killed


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
        self.seen: dict[int, PublishedState] = {}  # last state of each process in `survey`
        self._store = self._connect()
        self._whos: dict[int, dict[str, Any]] = {}  # identities of the processes by rank
        who = {"pid": os.getpid(), "started": psutil.Process().create_time(), **_place()}
        self._store.set(f"who/{rank}", json.dumps(who))

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

    def who(self, rank: int) -> dict[str, Any]:
        """Returns a process's identity; its node is "?" if it has published none."""
        if rank not in self._whos and (who := self._read(f"who/{rank}")) is not None:
            self._whos[rank] = who
        return self._whos.get(rank, {"node": "?"})

    def name(self, rank: int) -> str:
        """Returns the name of a process, such as `process 1 on n2`."""
        return f"process {rank} on {self.who(rank)['node']}"

    def ended(self) -> list[int]:
        """Returns the ranks of this machine's processes that have ended, cleanly or not."""
        ranks = range(self.size)
        return [rank for rank in ranks if is_local(who := self.who(rank)) and not is_alive(who)]

    def publish(self, *, done: bool = False) -> None:
        """Publishes this process's state."""
        self._messages += 1
        message = stall_diagnosis.status_message(self._messages, heartbeat.state(), done=done)
        self._store.set(f"state/{self.rank}", message)

    def survey(self) -> dict[int, PublishedState]:
        """Returns the states of all processes that have published one."""
        keys = [f"state/{rank}" for rank in range(self.size)]
        if not self._store.check(keys):  # some have not started; a `get` would wait for them
            keys = [key for key in keys if self._store.check([key])]
        for key, raw in zip(keys, self._store.multi_get(keys), strict=True):
            rank = int(key.rpartition("/")[2])
            if rank not in self.seen or self.seen[rank].raw != raw:
                self.seen[rank] = PublishedState.of(raw, time.monotonic())
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


@functools.cache
def _place() -> dict[str, Any]:
    """Returns the machine and the namespace in which this process's id is valid."""
    namespace = Path("/proc/self/ns/pid")
    return {
        "node": heartbeat.node(),
        "namespace": os.readlink(namespace) if namespace.is_symlink() else "",
    }


def is_local(who: dict[str, Any]) -> bool:
    """Returns whether a process, by its identity, runs where this process can see its id."""
    return _place().items() <= who.items()


def is_alive(who: dict[str, Any]) -> bool:
    """Returns whether a local process still runs. Its id may have been given to another one."""
    try:
        process = psutil.Process(who["pid"])
        is_same = abs(process.create_time() - who["started"]) < 2  # seconds; the clock may be set
        return bool(is_same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
