"""Reports a run: progress, metrics.jsonl, completions and the closing table."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import accelerate
import datasets
import torch
import transformers
from rich.console import Console
from rich.table import Table
from rich.text import Text

import grpo_cli
from grpo_cli.checkpoints.manifest import sync, sync_folder
from grpo_cli.checkpoints.paths import shown as shown_path
from grpo_cli.config.interpolation import masked
from grpo_cli.config.recipe import Recipe
from grpo_cli.data import conversations
from grpo_cli.data.stored_completions import write_parquet
from grpo_cli.distributed import heartbeat
from grpo_cli.errors import TrainingError, UserError, counted
from grpo_cli.files import json_object, read_text, reason, write_text
from grpo_cli.reporting.alarms import Raised
from grpo_cli.reporting.progress import Bar, clock, measure_of, times
from grpo_cli.reporting.run_folder import ALARMS, METRICS, read_lines
from grpo_cli.reporting.settings import Log
from grpo_cli.reporting.stage_clock import MemoryMeter
from grpo_cli.reporting.status import Status


class Reporter:
    """Writes a run's files and output on the main process; does nothing on the others."""

    def __init__(self, recipe: Recipe, folder: Path, main: bool) -> None:
        self.config: Log = recipe.log
        self.folder = folder
        self.main = main
        self.console = Console(highlight=False, quiet=not main)
        self.status = Status(folder, main)
        self.progress = Bar(self.console, "train", recipe.steps)
        self.metrics = LinesFile(folder / METRICS)
        self.raised = LinesFile(folder / ALARMS)
        self.skips_completions = False  # whether the last completions could not be written
        self.meter: MemoryMeter | None = None  # measures each stage of a step on a GPU

    def say(self, text: str) -> None:
        """Prints a line for the user."""
        self.console.print(masked(text), markup=False, soft_wrap=True)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Writes one step's metrics to metrics.jsonl and the progress display."""
        if not self.main:
            return
        error = self.metrics.add(metrics_line(step, metrics))
        if error is not None and len(self.metrics.unwritten) == 1:
            self.say(
                f"{shown_path(self.metrics.path)} cannot be written ({reason(error)}): the lines "
                f"from step {step} on are kept, and written with the next that can be; the run "
                "continues"
            )
        now = {"step": step, "time": time.time(), "seconds": heartbeat.seconds()}
        self.status.add(finished=now)
        shown = f"reward {metrics['reward']:.3f}  length {metrics['completions/mean_length']:.0f}"
        if "eval/accuracy" in metrics:
            shown += f"  held-out {metrics[f'eval/{measure_of(metrics)}']:.3f}"
        below, cut = times(metrics), metrics.get("completions/clipped_ratio", 0.0)
        if cut > 0.5:
            below = (
                f"{cut:.0%} of completions cut off by generation.max_completion_tokens | {below}"
            )
        self.progress.update(step, shown, below=below, always="eval/accuracy" in metrics)

    def alarmed(self, step: int, kind: str, raised: Sequence[Raised]) -> None:
        """Prints alarms, or the rule that ends the run, and adds them to alarms.jsonl.

        Args:
            kind: "alarm" or "stop".
        """
        for name, message in raised:
            self.say(f"alarm: {message}" if kind == "alarm" else message)
            if self.main:
                line = {"step": step, "kind": kind, "name": name, "message": message}
                self.raised.add(line | {"time": time.time()})

    def sync(self) -> None:
        """Waits until metrics.jsonl is on the disk, as it must be before a checkpoint is."""
        if not (self.main and self.metrics.path.exists()):
            return
        with contextlib.suppress(OSError), self.metrics.path.open("rb") as file:
            sync(file)
            sync_folder(self.folder)

    def keeps_completions(self, step: int) -> bool:
        """Returns whether the step's completions are stored; the same on every process."""
        every = self.config.completions_every
        return every > 0 and (step == 1 or step % every == 0)

    def completions(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Stores and prints one step's completions, each a `completion_row`."""
        if not (self.main and rows):
            return
        path = self.folder / "completions" / f"step-{step}.parquet"
        try:
            write_parquet(path, rows)
            self.skips_completions = False
        except OSError as error:
            if not self.skips_completions:
                self.say(
                    f"{shown_path(path)} cannot be written ({reason(error)}): left out, as are "
                    "those after it until they can be; the run continues"
                )
            self.skips_completions = True
        self.console.print(completions_table(step, rows[:1]))

    def rewind(self, step: int) -> None:
        """Cuts metrics.jsonl and alarms.jsonl back to `step`: later steps will be repeated.

        The rule that ended the run is dropped too: it is written again when the run ends again.
        """
        if not self.main:
            return
        self.progress.start_at(step)
        for path in (self.metrics.path, self.raised.path):
            kept = []
            for line in read_text(path).splitlines() if path.exists() else ():
                with contextlib.suppress(UserError):  # a line torn by a crash
                    found = json_object(line, METRICS, "step")
                    if found["step"] <= step and found.get("kind") != "stop":
                        kept.append(f"{line}\n")
            if path.exists():
                write_text(path, "".join(kept))

    def close(self) -> None:
        """Ends the progress display, also after a failure."""
        self.progress.close()
        if (error := self.metrics.write()) is not None:
            self.say(
                f"{shown_path(self.metrics.path)}: its last {len(self.metrics.unwritten)} lines "
                f"are lost ({reason(error)})"
            )
            self.metrics.unwritten.clear()

    def finish(self, summary: dict[str, Any]) -> None:
        """Writes summary.json and prints the closing table.

        Raises:
            TrainingError: summary.json or metrics.jsonl cannot be written.
        """
        with needed(self.metrics.path):
            if (error := self.metrics.write()) is not None:
                raise error
        self.close()
        if not self.main:
            return
        with needed(path := self.folder / "summary.json"):
            write_text(path, json.dumps(summary, indent=2) + "\n")
        metrics = read_lines(self.metrics.path)
        self.console.print(closing_table(metrics, summary))
        for what in ("best_checkpoint", "last_checkpoint"):
            if summary[what] is not None:
                self.say(f"{what.replace('_', ' ')}: {summary[what]}")
        folder = shown_path(self.folder)
        self.say(f"{clock(summary['seconds'])} in all; metrics and summary: {folder}")


class LinesFile:
    """A file of JSON lines; those that a full disk refuses are written with the next ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unwritten: list[str] = []

    def add(self, line: Mapping[str, Any]) -> OSError | None:
        """Appends a line; returns the error if that fails."""
        self.unwritten.append(json.dumps(line) + "\n")
        return self.write()

    def write(self) -> OSError | None:
        """Appends the unwritten lines, all of them or none; returns the error if that fails."""
        if not self.unwritten:
            return None
        size = None
        try:
            size = self.path.stat().st_size if self.path.exists() else 0
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(self.unwritten))
        except OSError as error:
            if size is not None:
                with contextlib.suppress(OSError):  # removes a partial line
                    os.truncate(self.path, size)
            return error
        self.unwritten.clear()
        return None


@contextlib.contextmanager
def needed(path: Path) -> Iterator[None]:
    """Turns an OSError while a finished run writes `path` into a TrainingError."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"the run is done, but {shown_path(path)} cannot be written: {reason(error)}"
        ) from error


def completions_table(step: int, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns completions as a table to be printed, with a column for each reward."""
    numbers = [*(key for key in rows[0] if key.startswith("rewards/")), "reward", "advantage"]
    table = Table("prompt", "completion", title=f"completion 1 of step {step}", show_lines=True)
    for key in numbers:
        table.add_column(key.removeprefix("rewards/"), justify="right", overflow="fold")
    for row in rows:
        prompt, text = row["prompt"], row["completion"]
        if prompt.startswith('[{"role": '):  # a chat: its last message
            prompt = conversations.text_of(json.loads(prompt)[-1]["content"])
        prompt = prompt if len(prompt) < 200 else "…" + prompt[-199:]
        text = text if len(text) < 400 else text[:399] + "…"
        values = ("" if row[key] is None else f"{row[key]:.3g}" for key in numbers)
        table.add_row(Text(masked(prompt)), Text(masked(text)), *values)
    return table


def versions() -> dict[str, str]:
    """Returns the versions of the packages that numbers depend on."""
    packages = (grpo_cli, torch, transformers, accelerate, datasets)
    own, *others = ((package.__name__, package.__version__) for package in packages)
    return dict([own, ("python", platform.python_version()), *others])


def closing_table(metrics: list[dict[str, Any]], summary: dict[str, Any]) -> Table:
    """Returns the table of results before and after the run."""
    table = Table(
        "", "before", "after", title=f"{summary['recipe']}: {counted(summary['steps'], 'step')}"
    )
    evaluations = [summary[when] or {} for when in ("before", "after")]
    if any(evaluations):
        if not any("graded" in e for e in evaluations):
            cells = (with_interval(e) if e else "" for e in evaluations)
            table.add_row("held-out accuracy", *cells)
        rewards = ["" if e.get("reward") is None else f"{e['reward']:.3f}" for e in evaluations]
        table.add_row("held-out reward", *rewards)
    if metrics:
        tenth = max(1, len(metrics) // 10)
        titles = {
            "reward": "training reward, first and last tenth",
            "completions/mean_length": "completion length, the same",
        }
        for key, title in titles.items():
            parts = (metrics[:tenth], metrics[-tenth:])
            values = [[m[key] for m in part if m.get(key) is not None] for part in parts]
            table.add_row(title, *(f"{sum(v) / len(v) if v else math.nan:.3f}" for v in values))
    return table


def with_interval(result: dict[str, Any]) -> str:
    low, high = result["interval_95"]
    return f"{result['accuracy']:.3f} [{low:.3f}, {high:.3f}]"


def metrics_line(step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
    """Returns a step's line of metrics.jsonl."""
    return {"step": step, **{k: finite(v) for k, v in metrics.items()}}


def finite(value: float) -> float | None:
    """Returns None for NaN and infinity, which JSON lacks."""
    return value if math.isfinite(value) else None


def readable(metrics: dict[str, float]) -> dict[str, Any]:
    """Returns the metrics of an evaluation during training in the form of summary.json."""
    plain = {key.removeprefix("eval/"): value for key, value in metrics.items()}
    own = {k: v for k, v in plain.items() if "/" not in k or k.startswith("rewards/")}
    of_benchmarks = {k: finite(v) for k, v in plain.items() if k not in own}
    return nested(own) | ({"benchmarks": of_benchmarks} if of_benchmarks else {})


def nested(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Returns a task's numbers in the form of eval.json and summary.json: accuracy, interval_95."""
    out: dict[str, Any] = {}
    intervals: dict[str, list[float]] = {}
    for key, value in metrics.items():
        parts = key.split("/")
        if key.endswith(("_low", "_high")):
            continue
        plain: float | int | None = None if math.isnan(value) else value  # JSON has no NaN
        if parts[-1] in ("n", "completions"):
            plain = int(value)
        bounds = (f"{key}_low", f"{key}_high")
        ends = [metrics[name] for name in bounds if name in metrics]
        if len(parts) > 2 and parts[0] != "rewards":  # level/3/accuracy
            column, kind, number = parts[0], "/".join(parts[1:-1]), parts[-1]
            inner = out.setdefault("by", {}).setdefault(column, {}).setdefault(kind, {})
            inner[number] = plain
            if ends:
                inner["interval_95"] = ends
            continue
        out[key] = plain
        if ends and key == "accuracy":
            out["interval_95"] = ends
        elif ends:
            intervals[key] = ends
    if intervals:
        out["intervals_95"] = intervals
    return out
