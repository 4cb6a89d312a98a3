"""Shows progress: a bar on a terminal, lines of text elsewhere; and the metrics to show.

Imports nothing heavy.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from grpo_cli.distributed import heartbeat

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
