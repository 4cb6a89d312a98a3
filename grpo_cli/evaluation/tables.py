"""Writes and prints an evaluation: eval.json, completions.parquet, and the paper's table."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grpo_cli.data.stored_completions import rows_by_group, write_parquet
from grpo_cli.errors import UserError
from grpo_cli.evaluation.settings import Mode
from grpo_cli.evaluation.tasks import TaskResult
from grpo_cli.files import read_json, write_text
from grpo_cli.reporting.reporter import nested, with_interval

WRITTEN = ("eval.json", "completions.parquet", "table.md")


def set_aside(folder: Path, settings: Mapping[str, Any]) -> Path | None:
    """Renames the folder of an evaluation of another model or other settings; returns its path.

    Args:
        settings: has `checkpoint_hash` and `settings_hash` of the evaluation to be written.
    """
    if not os.path.lexists(folder / "eval.json"):
        return None
    report = dict[str, Any]()
    with suppress(UserError):  # damaged
        report = read_json(folder / "eval.json")
    same = ("checkpoint_hash", "settings_hash")
    if all(report.get(key) == settings[key] for key in same):
        return None
    folder, number = folder.resolve(), 1  # "." has no name
    while (aside := folder.with_name(f"{folder.name}_{number}")).exists():
        number += 1
    aside.mkdir()
    for name in WRITTEN:
        if (folder / name).is_file():
            (folder / name).rename(aside / name)
    return aside


def write(
    folder: Path, subject: str, results: Sequence[TaskResult], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Writes an evaluation into its folder; returns the content of eval.json.

    Args:
        subject: the checkpoint that was evaluated.
        settings: the evaluation's settings, for eval.json.
    """
    for name in WRITTEN:  # files of the same evaluation, or of one to be overwritten
        (folder / name).unlink(missing_ok=True)
    report = {"checkpoint": subject, "benchmarks": entries(results), **settings}
    write_parquet(folder / "completions.parquet", [*completion_rows(results)])
    if results[0].task.mode is not None:
        write_text(folder / "table.md", markdown(subject, results))
    # Written last: if it exists, the evaluation is complete.
    write_text(folder / "eval.json", json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    return report


def entries(results: Sequence[TaskResult]) -> dict[str, Any]:
    """Returns the numbers by benchmark: the first mode's, and each mode's under `by_mode`."""
    out: dict[str, Any] = {}
    for result in results:
        task, numbers = result.task, nested(result.metrics)
        if task.mode is None:
            out[task.name] = numbers
            continue
        entry = out.setdefault(task.name, {**numbers, "mode": task.mode, "by_mode": {}})
        entry["by_mode"][task.mode] = numbers
    return out


def completion_rows(results: Sequence[TaskResult]) -> Iterator[dict[str, Any]]:
    """Yields every completion as a row of a table: a run's row with other numbers."""
    of_tasks = [(result.task, group) for result in results for group in result.groups]
    rows_of = rows_by_group([group for _, group in of_tasks])
    for (task, group), rows in zip(of_tasks, rows_of, strict=True):
        for r, row in zip(group.rollouts, rows, strict=True):
            del row["step"]
            yield (
                {"benchmark": task.name, "mode": task.mode}
                | row
                | {
                    "correct": r.reward_parts[task.right] == 1,
                    "tool_calls": r.completion.tool_calls,
                    "tool_errors": r.completion.tool_errors,
                    "tool_timeouts": r.completion.tool_timeouts,
                }
            )


# Numbers of a task that the terminal shows, if the task has them.
SHOWN = (
    "reward", "mean_length", "clipped_ratio", "no_answer",
    "tool_calls", "tool_errors", "tool_timeouts", "turns", "unscored",
)  # fmt: skip


def show(console: Console, subject: str, results: Sequence[TaskResult]) -> None:
    """Prints the numbers: vertically for one task, one row per task for several."""
    console.print(escape(subject), soft_wrap=True)
    if len(results) == 1:
        console.print(_of_one(results[0]))
        return
    found = {r.task.label: nested(r.metrics) for r in results}
    # A benchmark's reward is its accuracy.
    shown = SHOWN if any(r.task.mode is None for r in results) else SHOWN[1:]
    heads = [key for key in shown if any(key in n for n in found.values())]
    table = Table()
    for head in ("", "accuracy [95 %]", "rows", *(key.replace("_", " ") for key in heads)):
        table.add_column(head, no_wrap=head in ("", "accuracy [95 %]"))
    for label, numbers in found.items():
        cells = (_cell_of(numbers.get(key)) for key in heads)
        table.add_row(label, with_interval(numbers), f"{numbers['n']:,}", *cells)
    console.print(table)
    for title, rows_of in (("completions", _of_samples), ("by kind of problem", _of_kinds)):
        rows = [(label, *row) for label, numbers in found.items() for row in rows_of(numbers)]
        if rows:
            below = Table("", title, "[95 %]", "rows")
            for row in rows:
                below.add_row(*row)
            console.print(below)


def _of_one(result: TaskResult) -> Table:
    numbers = nested(result.metrics)
    table = Table("", result.task.label)
    if "graded" not in numbers:  # else the rewards below say more than the share of ones
        table.add_row("accuracy [95 %]", with_interval(numbers))
    for name, value, _ in _of_samples(numbers):
        table.add_row(name, value)
    own = [k for k in numbers if k.startswith("rewards/")] if result.task.mode is None else []
    for key in (*(SHOWN if own else SHOWN[1:]), *own):
        if key in numbers:
            shown = key if "/" in key else key.replace("_", " ")
            table.add_row(shown, _cell_of(numbers[key]))
    for name, value, rows in _of_kinds(numbers):
        table.add_row(name, f"{value} of {rows}")
    table.add_row("rows", f"{numbers['n']:,}")
    return table


def _of_samples(numbers: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for key, ends in numbers.get("intervals_95", {}).items():
        yield key, f"{numbers[key]:.3f} [{ends[0]:.3f}, {ends[1]:.3f}]", f"{numbers['n']:,}"


def _of_kinds(numbers: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for column, kinds in numbers.get("by", {}).items():
        for kind, inner in kinds.items():
            yield f"{column} {kind}", with_interval(inner), f"{inner['n']:,}"


def _cell_of(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def markdown(subject: str, results: Sequence[TaskResult]) -> str:
    """Formats our mean accuracies with 95 % intervals, below the published ones, as Markdown."""
    known = {r.task.name: r.task.benchmark for r in results if r.task.benchmark is not None}
    names = sorted(known, key=lambda name: (known[name].column is None, known[name].column or 0))
    samples = {round(r.metrics.get("completions", 0) / r.metrics["n"]) for r in results} - {0, 1}
    model = short_name(subject) + "".join(f" (mean@{n})" for n in samples)
    text = [_line("Model", [known[name].title or name for name in names])]
    text.append("| --- |" + " --- |" * len(names))
    for mode in dict.fromkeys(r.task.mode for r in results):
        assert mode is not None, "held-out rows have no table"
        modes = {name: benchmark.modes.get(mode, Mode()) for name, benchmark in known.items()}
        own = {r.task.name: r.metrics for r in results if r.task.mode == mode}
        title = next((title for name in own if (title := modes[name].title)), mode)
        text.append(f"| **{title}** |" + "  |" * len(names))
        for other in dict.fromkeys(model for name in names for model in modes[name].published):
            published = [modes[name].published.get(other) for name in names]
            text.append(_line(other, ["–" if v is None else f"{v:.1f}%" for v in published]))
        found = {
            n: [100 * m[f"accuracy{end}"] for end in ("", "_low", "_high")] for n, m in own.items()
        }
        shown = {
            n: f"{value:.1f}% [{low:.1f}, {high:.1f}]" for n, (value, low, high) in found.items()
        }
        text.append(_line(model, [shown.get(name, "–") for name in names]))
    return "\n".join(text) + "\n"


def _line(head: str, cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (head, *cells)) + " |"


def short_name(subject: str) -> str:
    """Returns a model's name in tables: RUN/step-N for a run's checkpoint."""
    path = Path(subject)
    if path.parent.name == "checkpoints":
        return f"{path.parent.parent.name}/{path.name}"
    return path.name if path.exists() else subject
