"""Writes status.json: what a run does at the moment, for whoever watches its folder.

    {"state": "training", "step": 12, "steps": 400, "stage": "generate", "since": 1764.5, ...}

A thread of the main process replaces the file about once a second, also in a stage that takes
minutes: a file whose time stands still is of a process that was killed, or of a node that is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from grpo_cli import __version__
from grpo_cli.config.interpolation import masked
from grpo_cli.distributed import heartbeat
from grpo_cli.distributed.stop_signal import StoppedWhileStarting
from grpo_cli.errors import NO_READER, Stopped, lost_reader
from grpo_cli.reporting.run_folder import STATUS

SECONDS = 1.0  # between two writes
LOCK_SECONDS = 2.0  # that the end waits for a write under way, on a file system that hangs
STOPS = (KeyboardInterrupt, Stopped, StoppedWhileStarting, heartbeat.Interrupt)

# The state of a run in a stage of `heartbeat`; in any other it trains, or starts.
STATES = {"evaluate": "evaluating", "checkpoint": "saving", "hub": "saving"}


class Status:
    """Writes the file on the main process, from `start` to `end`; does nothing on the others.

    A disk on which it cannot be written is no error of the run: the file stays as it was.
    """

    def __init__(self, folder: Path, main: bool) -> None:
        self.path, self.main = folder / STATUS, main
        self.facts: dict[str, Any] = {}  # that stay the same: number of processes, device, steps
        self.before: Callable[[], Mapping[str, Any] | None] = lambda: None
        self._final: dict[str, Any] | None = None  # once the run has ended
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, **facts: Any) -> None:
        """Begins to write; `facts` become a part of the file."""
        if not self.main or self._thread is not None:
            return
        own = {"node": heartbeat.node(), "pid": os.getpid(), "started": time.time()}
        self.facts = {**facts, **own, "version": __version__}
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._thread.start()

    def add(self, **facts: Any) -> None:
        """Adds what is known later, such as the number of steps, to the file."""
        self.facts = self.facts | facts  # a new dict: the thread may read the old one

    def end(self, state: str, message: str | None = None) -> None:
        """Writes the state in which the run ends, once: ended, stopped or failed.

        Args:
            message: why.
        """
        if self._thread is None or self._ending.is_set():
            return
        self._final = {"state": state, "message": None if message is None else masked(message)}
        self._ending.set()
        if self._lock.acquire(timeout=LOCK_SECONDS):
            try:
                self._write()
            finally:
                self._lock.release()

    def end_with(self, error: BaseException) -> None:
        """Writes that the run ends with an error, or with a request to stop."""
        text = str(error)
        if lost_reader(error):
            self.end("failed", NO_READER)
            return
        if isinstance(error, STOPS):
            self.end("stopped", text or None)
            return
        is_told = type(error).__module__ == "grpo_cli.errors"
        self.end("failed", text if is_told else f"{type(error).__name__}: {text}")

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._ending.is_set():
                    return
                self._write()
            if self._ending.wait(SECONDS):
                return

    def _write(self) -> None:
        partial = self.path.with_name(self.path.name + ".tmp")
        with contextlib.suppress(Exception):  # whatever it is: the run goes on without it
            partial.write_text(json.dumps(self._now()), encoding="utf-8")
            os.replace(partial, self.path)

    def _now(self) -> dict[str, Any]:
        """Returns the contents of the file."""
        now, seen = time.time(), heartbeat.state()
        is_starting = seen.stage == heartbeat.START
        state = STATES.get(seen.stage, "starting" if is_starting else "training")
        return {
            "state": state,
            "step": seen.step,
            "stage": seen.stage,
            "since": now - seen.inside,
            "time": now,
            "before": self.before(),
            "memory": memory(),
            **self.facts,
            **(self._final or {}),
        }


def memory() -> dict[str, int]:
    """Returns bytes that this process uses: of the host, and of its CUDA device if it has one."""
    used = {"rss": psutil.Process().memory_info().rss}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        used["cuda_allocated"] = torch.cuda.memory_allocated()
        used["cuda_reserved"] = torch.cuda.memory_reserved()
        used["cuda_peak"] = torch.cuda.max_memory_allocated()
    return used
