"""What the user sees and finds: progress, metrics.jsonl, completions, curves, the closing table."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from grpo_cli import tracking
from grpo_cli.config import Log, Recipe
from grpo_cli.distributed import Workers
from grpo_cli.errors import TrainingError
from grpo_cli.evaluate import nested
from grpo_cli.progress import Bar, clock
from grpo_cli.rollouts import Group

SHORT = {"old_logprobs": "old", "ref_logprobs": "ref", "forward_backward": "fwd/bwd"}
COLUMNS = 98  # that a step's line of times may take; two more indent it


class Reporter:
    """Writes on the main process; on the others every method does nothing."""

    def __init__(self, recipe: Recipe, folder: Path, main: bool) -> None:
        self.config: Log = recipe.log
        self.folder = folder
        self.main = main
        self.console = Console(highlight=False, quiet=not main)
        self.trackers: list[tracking.Tracker] = []
        self.progress = Bar(self.console, "train", recipe.steps)
        self.unwritten: list[str] = []  # lines that metrics.jsonl could not take so far
        self.skips_completions = False  # since they cannot be written

    @property
    def metrics_file(self) -> Path:
        return self.folder / "metrics.jsonl"

    def say(self, text: str) -> None:
        """A line for the user."""
        self.console.print(text, markup=False, soft_wrap=True)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Writes one step's metrics, everywhere, once."""
        if not self.main:
            return
        line = {"step": step, **{k: finite(v) for k, v in metrics.items()}}
        self.unwritten.append(json.dumps(line) + "\n")
        error = self.write_lines()
        if error is not None and len(self.unwritten) == 1:
            self.say(
                f"{self.metrics_file} cannot be written ({reason(error)}): the lines from step "
                f"{step} on are kept, and written with the next that can be; the run goes on"
            )
        for tracker in self.trackers:
            tracker.log({k: v for k, v in metrics.items() if math.isfinite(v)}, step)
        shown = f"reward {metrics['reward']:.3f}  length {metrics['completions/mean_length']:.0f}"
        if "eval/accuracy" in metrics:
            shown += f"  held-out {metrics['eval/accuracy']:.3f}"
        evaluated = "eval/accuracy" in metrics
        self.progress.update(step, shown, below=times(metrics), always=evaluated)

    def write_lines(self) -> OSError | None:
        """Appends to metrics.jsonl what it does not have yet; returns why that cannot be done."""
        path, size = self.metrics_file, None
        try:
            size = path.stat().st_size if path.exists() else 0
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(self.unwritten))
        except OSError as error:
            if size is not None:
                with contextlib.suppress(OSError):  # half a line
                    os.truncate(path, size)
            return error
        self.unwritten.clear()
        return None

    def keeps_completions(self, step: int) -> bool:
        """Whether the step is one of those whose completions are kept; on every process alike."""
        every = self.config.completions_every
        return every > 0 and (step == 1 or step % every == 0)

    def completions(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Writes and shows one step's completions, each a `completion_row`."""
        if not (self.main and rows):
            return
        path = self.folder / "completions" / f"step-{step}.parquet"
        try:
            write_parquet(path, rows)
            self.skips_completions = False
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            if not self.skips_completions:
                self.say(
                    f"{path} cannot be written ({reason(error)}): left out, as are those after it "
                    "until they can be; the run goes on"
                )
            self.skips_completions = True
        for row in rows[: self.config.completions_shown]:
            prompt = row["prompt"] if len(row["prompt"]) < 200 else "…" + row["prompt"][-199:]
            text = row["completion"]
            text = text if len(text) < 400 else text[:399] + "…"
            self.say(f"  step {step}  {prompt!r} -> {text!r}  reward {row['reward']}")

    def rewind(self, step: int) -> None:
        """Cuts metrics.jsonl back to `step`: what came after is about to be done again."""
        if not self.main:
            return
        self.progress.start_at(step)
        if self.metrics_file.exists():
            lines = self.metrics_file.read_text(encoding="utf-8").splitlines()
            kept = [s for s in lines if s.endswith("}") and json.loads(s)["step"] <= step]
            write_text(self.metrics_file, "".join(s + "\n" for s in kept))

    def close(self) -> None:
        """Ends the live display and the trackers, whether the run ended well or not."""
        self.progress.close()
        for tracker in self.trackers:
            tracker.close()
        self.trackers = []
        if self.unwritten and (error := self.write_lines()) is not None:
            self.say(
                f"{self.metrics_file}: its last {len(self.unwritten)} lines are lost "
                f"({reason(error)})"
            )
            self.unwritten.clear()

    def finish(self, summary: dict[str, Any]) -> None:
        """summary.json, curves.png and the table before/after.

        Raises:
            TrainingError: one of these, or metrics.jsonl, cannot be written.
        """
        with needed(self.metrics_file):
            if self.unwritten and (error := self.write_lines()) is not None:
                raise error
        self.close()
        if not self.main:
            return
        with needed(path := self.folder / "summary.json"):
            write_text(path, json.dumps(summary, indent=2) + "\n")
        metrics = read_metrics(self.metrics_file)
        if self.config.plots and metrics:
            with needed(path := self.folder / "curves.png"):
                draw_curves(path, metrics, summary)
        self.console.print(closing_table(metrics, summary))
        for what in ("best_checkpoint", "last_checkpoint"):
            if summary[what] is not None:
                self.say(f"{what.replace('_', ' ')}: {summary[what]}")
        self.say(f"{clock(summary['seconds'])} in all; metrics, curves and summary: {self.folder}")


@contextlib.contextmanager
def needed(path: Path) -> Iterator[None]:
    """Around the writing of what a run that is done leaves."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"the run is done, but {path} cannot be written: {reason(error)}"
        ) from error


def reason(error: OSError) -> str:
    """Why a file cannot be written, in a few words."""
    return error.strerror or str(error)


def times(metrics: dict[str, float]) -> str:
    """Where a step's time went, in a line: its stages, tokens a second, and MFU of the training.

    Stages below 1 % of the step are left out, then the shortest until the line fits.
    """
    rate = f" | {metrics['tokens_per_second']:,.0f} tok/s"
    used = metrics.get("mfu/forward_backward")
    if used is not None:
        rate += f" | MFU {100 * used:.{0 if used >= 0.0995 else 1}f} %"
    stages = {
        SHORT.get(name, name): seconds
        for key, seconds in metrics.items()
        if key.startswith("time/")
        and "/" not in (name := key.removeprefix("time/"))
        and seconds >= 0.01 * metrics["step_time"]
    }
    while True:
        parts = [f"{name} {_seconds(s)}" for name, s in stages.items()]
        line = " · ".join([f"{part} s" for part in parts[:1]] + parts[1:]) + rate
        if len(line) <= COLUMNS or not stages:
            return line.removeprefix(" | ")
        del stages[min(stages, key=stages.__getitem__)]


def _seconds(seconds: float) -> str:
    return f"{seconds:.{2 if seconds < 1 else 1 if seconds < 100 else 0}f}"


def rows_of_all(workers: Workers, step: int, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Every process's completions as rows, in the order of prompts; the main process gets them."""
    own = [(g.position, completion_row(step, g, i)) for g in groups for i in range(len(g.rollouts))]
    parts = workers.gather_on_main(own)
    return [row for _, row in sorted(chain.from_iterable(parts), key=itemgetter(0))]


def completion_row(step: int, group: Group, sample: int) -> dict[str, Any]:
    """A rollout as a row of a table; what it has of each token as arrays, for they travel."""
    r = group.rollouts[sample]
    text = group.prompt.text
    return {
        "step": step,
        "row": group.prompt.row,
        "sample": sample,
        "prompt": text if isinstance(text, str) else text[-1]["content"],
        "completion": r.text,
        "reward": finite(r.reward),
        **{f"rewards/{name}": value for name, value in r.reward_parts.items()},
        **{f"extras/{name}": value for name, value in r.extras.items()},
        "columns": json.dumps(group.prompt.columns, ensure_ascii=False, default=str),
        "advantage": r.advantage,
        "token_advantages": None if r.token_advantages is None else r.token_advantages.tolist(),
        "finish_reason": r.completion.finish_reason,
        "prompt_ids": np.array(group.prompt.ids, dtype=np.int64),
        "completion_ids": np.array(r.completion.ids, dtype=np.int64),
        "sampling_logprobs": np.array(r.completion.logprobs, dtype=np.float64),
    }


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_text(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old text or the new, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Rows as a Parquet file."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: parquet_column([row.get(name) for row in rows]) for name in names}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def parquet_column(values: list[Any]) -> Any:
    """A column as pyarrow has it; as JSON text where the values are of no one type."""
    import pyarrow

    try:
        return pyarrow.array(values)
    except (pyarrow.ArrowException, TypeError, OverflowError):
        return pyarrow.array([json.dumps(v, ensure_ascii=False, default=str) for v in values])


def draw_curves(path: Path, metrics: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """A picture of how the run went."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [
        ("reward", "reward"),
        ("eval/accuracy", "held-out accuracy"),
        ("completions/mean_length", "completion length (tokens)"),
        ("entropy", "entropy (nats a token)"),
        ("grad_norm", "gradient norm"),
        ("kl", "KL to the reference") if "kl" in metrics[-1] else ("step_time", "seconds a step"),
    ]
    figure, axes = plt.subplots(2, 3, figsize=(13, 6.5), constrained_layout=True)
    for axis, (key, title) in zip(axes.flat, panels, strict=True):
        points = [(m["step"], m[key]) for m in metrics if m.get(key) is not None]
        if key == "eval/accuracy" and summary["before"] is not None:
            points.insert(0, (0, summary["before"]["accuracy"]))
        if points:
            marker = "o" if len(points) < 25 else None
            axis.plot(*zip(*points, strict=True), lw=1.2, marker=marker, ms=3)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.grid(alpha=0.3)
    figure.suptitle(f"{summary['recipe']}  (seed {summary['seed']})", fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def closing_table(metrics: list[dict[str, Any]], summary: dict[str, Any]) -> Table:
    """Before and after, side by side."""
    table = Table("", "before", "after", title=f"{summary['recipe']}: {summary['steps']} steps")
    before, after = summary["before"], summary["after"]
    if before is not None and after is not None:
        table.add_row("held-out accuracy", with_interval(before), with_interval(after))
        rewards = ["" if e["reward"] is None else f"{e['reward']:.3f}" for e in (before, after)]
        table.add_row("held-out reward", *rewards)
    if metrics:
        tenth = max(1, len(metrics) // 10)
        for key, title in (
            ("reward", "training reward"),
            ("completions/mean_length", "completion length"),
        ):
            first, last = metrics[:tenth], metrics[-tenth:]
            table.add_row(title, *(f"{_average(part, key):.3f}" for part in (first, last)))
    return table


def _average(lines: list[dict[str, Any]], key: str) -> float:
    values = [m[key] for m in lines if m.get(key) is not None]
    return sum(values) / len(values) if values else math.nan


def with_interval(result: dict[str, Any]) -> str:
    low, high = result["interval_95"]
    return f"{result['accuracy']:.3f} [{low:.3f}, {high:.3f}]"


def finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def readable(metrics: dict[str, float]) -> dict[str, Any]:
    """What an evaluation while training has found, as summary.json has it."""
    plain = {key.removeprefix("eval/"): value for key, value in metrics.items()}
    own = {k: v for k, v in plain.items() if "/" not in k or k.startswith("rewards/")}
    of_benchmarks = {k: finite(v) for k, v in plain.items() if k not in own}
    return nested(own) | ({"benchmarks": of_benchmarks} if of_benchmarks else {})
