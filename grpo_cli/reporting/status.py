"""Writes status.json: the current activity of a run, for tools that watch its folder.

    {"state": "training", "step": 12, "steps": 400, "stage": "generate", "since": 1764.5, ...}

A thread of the main process replaces the file about once a second, also in a stage that takes
minutes. If the time in the file does not change, the process was killed or its node is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from grpo_cli import __version__
from grpo_cli.config.interpolation import masked
from grpo_cli.distributed import heartbeat
from grpo_cli.distributed.stop_signal import StoppedWhileStarting
from grpo_cli.errors import NO_READER, Stopped, lost_reader
from grpo_cli.files import write_text
from grpo_cli.reporting.run_folder import STATUS

SECONDS = 1.0  # between two writes
LOCK_SECONDS = 2.0  # longest wait of `end` for a write, on a file system that hangs
STOPS = (KeyboardInterrupt, Stopped, StoppedWhileStarting, heartbeat.WorkInterrupted)

# The state of a run by its stage of `heartbeat`; in other stages it is training or starting.
STATES = {"evaluate": "evaluating", "checkpoint": "saving", "hub": "saving"}


class Status:
    """Writes the file on the main process, from `start` to `end`; does nothing on the others.

    If the file cannot be written, the run continues and the file stays as it was.
    """

    def __init__(self, folder: Path, main: bool) -> None:
        self.path, self.main = folder / STATUS, main
        self.facts: dict[str, Any] = {}  # constant ones: number of processes, device, steps
        self._final: dict[str, Any] | None = None  # set once the run has ended
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, **facts: Any) -> None:
        """Starts to write the file, which includes `facts`."""
        if not self.main or self._thread is not None:
            return
        own = {"node": heartbeat.node(), "pid": os.getpid(), "started": time.time()}
        self.facts = {**facts, **own, "version": __version__}
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._thread.start()

    def add(self, **facts: Any) -> None:
        """Adds facts that are known later, such as the number of steps, to the file."""
        self.facts = self.facts | facts  # a new dict: the thread may read the old one

    def end(self, state: str, message: str | None = None) -> None:
        """Writes the state in which the run ends, once: ended, stopped or failed.

        Args:
            message: the reason.
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
        if not self.path.parent.is_dir():  # somebody has removed it
            return
        with contextlib.suppress(Exception):  # whatever it is: the run continues without it
            write_text(self.path, json.dumps(self._now()))

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
            "before": None,  # metrics of the evaluation before the first step, if it is done
            "memory": memory(),
            **self.facts,
            **(self._final or {}),
        }


def memory() -> dict[str, int]:
    """Returns the bytes that this process uses on the host, and on its CUDA device if any."""
    used = {"rss": psutil.Process().memory_info().rss}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        used["cuda_allocated"] = torch.cuda.memory_allocated()
        used["cuda_reserved"] = torch.cuda.memory_reserved()
        used["cuda_peak"] = torch.cuda.max_memory_allocated()
    return used
