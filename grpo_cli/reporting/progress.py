"""Shows progress: a bar on a terminal, lines of text elsewhere, and status.json in the folder.

    {"state": "training", "step": 12, "steps": 400, "stage": "generate", "since": 1764.5, ...}

status.json is for tools that watch the folder. A thread of the main process replaces it about once
a second, also in a stage that takes minutes. If the time in the file does not change, the process
was killed or its node is gone. Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from grpo_cli import __version__
from grpo_cli.config.interpolation import masked
from grpo_cli.distributed import heartbeat
from grpo_cli.distributed.stop_signal import StoppedWhileStarting
from grpo_cli.errors import NO_READER, Stopped, lost_reader
from grpo_cli.reporting.run_folder import STATUS

STAGES = (  # the stages of a step, in order; in the last one a process waits for the others
    "generate", "reward", "old_logprobs", "ref_logprobs", "forward_backward", "optimizer",
    "weights", "idle",
)  # fmt: skip
LONGEST = 5  # stages in a line of times
SHORT = {"old_logprobs": "old", "ref_logprobs": "ref", "forward_backward": "fwd/bwd"}


def measure_of(metrics: Mapping[str, Any], prefix: str = "eval/") -> str:
    """Returns the name of the evaluation metric to print: accuracy or reward.

    The accuracy is the share of completions whose reward is 1. It is not informative if the reward
    has values other than 0 and 1; the mean of the reward is printed then.
    """
    return "reward" if f"{prefix}graded" in metrics else "accuracy"


def times(metrics: Mapping[str, Any]) -> str:
    """Formats a step's times as a line: stages, tokens a second, and MFU of the training.

    Stages below 1 % of the step are left out, and all but the longest LONGEST.
    """
    if not (total := metrics.get("step_time")):
        return ""
    stages = {
        SHORT.get(name, name): seconds
        for key, seconds in metrics.items()
        if key.startswith("time/") and "/" not in (name := key[5:]) and seconds >= 0.01 * total
    }
    longest = sorted(stages, key=stages.__getitem__)[-LONGEST:]
    parts = [
        f"{name} {s:.{2 if s < 1 else 1 if s < 100 else 0}f}"
        for name, s in stages.items()
        if name in longest
    ]
    line = [" · ".join([f"{part} s" for part in parts[:1]] + parts[1:])]
    if (rate := metrics.get("tokens_per_second")) is not None:
        line.append(f"{rate:,.0f} tok/s")
    if (used := metrics.get("mfu/forward_backward")) is not None:
        line.append(f"MFU {100 * used:.{0 if used >= 0.0995 else 1}f} %")
    return " | ".join(filter(None, line))


SECONDS_BETWEEN_LINES = 2.0  # between two lines of progress, without a terminal


class _WithLineBelow(Progress):
    """A bar with a line of text under it."""

    below = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.below:
            yield Text(self.below, style="dim", no_wrap=True, overflow="ellipsis")


class _Activity(ProgressColumn):
    """Shows the current activity of the process, such as `generate 12/64`."""

    def render(self, task: Task) -> Text:
        return Text(heartbeat.activity(), style="dim")


class Bar:
    """A progress bar on a terminal; elsewhere a line of text every few seconds.

    The time left is shown once a tenth is done. It is estimated from the newer half, since the
    first step of a run also compiles and checks.
    """

    def __init__(self, console: Console, name: str, total: int) -> None:
        self.console, self.name, self.total = console, name, total
        self.last_line = 0.0
        self.marks = [(0, time.monotonic())]  # (done, time in seconds)
        self.bar: _WithLineBelow | None = None

    def start_at(self, done: int) -> None:
        """Shows the bar, and starts the estimate of the remaining time at `done`."""
        self.marks = [(done, time.monotonic())]
        if self.console.is_terminal and not self.console.quiet:
            self._show(done)

    def update(self, done: int, text: str, *, below: str = "", always: bool = False) -> None:
        """Shows the progress.

        Args:
            done: the part of `total` that is done.
            text: text next to the progress.
            below: a second line.
            always: write the line even if another was written a moment ago.
        """
        if self.console.quiet:
            return
        now = time.monotonic()
        self.marks.append((done, now))
        first, left = self.marks[0][0], 0.0 if done >= self.total else None
        if left is None and 10 * (done - first) >= self.total - first and len(self.marks) > 2:
            half = first + (done - first) / 2
            since, then = max(mark for mark in self.marks if mark[0] <= half)
            left = (now - then) / (done - since) * (self.total - done)
        remaining = "" if left is None else f"{clock(left)} left"
        if self.console.is_terminal:
            bar = self._show(done)
            bar.below = below
            bar.update(bar.task_ids[0], completed=done, text=text, left=remaining)
            return
        if always or done == self.total or now - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = now
            line = "  ".join(filter(None, (f"{self.name} {done}/{self.total}", text, remaining)))
            self.console.print(line + (f"\n  {below}" if below else ""), soft_wrap=True)

    def _show(self, done: int) -> _WithLineBelow:
        if self.bar is None:
            self.bar = _WithLineBelow(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
                TextColumn("{task.fields[left]}"),
                _Activity(),
                console=self.console,
            )
            self.bar.add_task(self.name, total=self.total, completed=done, text="", left="")
            self.bar.start()
        return self.bar

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def clock(seconds: float) -> str:
    """Formats seconds as `1:02:03` or `2:03`."""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


STATUS_SECONDS = 1.0  # between two writes of status.json
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
            if self._ending.wait(STATUS_SECONDS):
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


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yields a path to write, which then replaces a file: a reader sees the old one or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".tmp")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically."""
    with replaced(path) as partial:
        partial.write_text(text, encoding="utf-8")
