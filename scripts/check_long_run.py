"""Checks that a long run keeps its memory, its open files and the time of a step.

    python scripts/check_long_run.py [--steps 5000] [--plot FILE] [KEY=VALUE ...]
    python scripts/check_long_run.py --from outputs/long_run.jsonl --plot FILE      stored samples

Trains the recipe arithmetic_tiny, and looks every 20 seconds at the run's processes and at the
files of its folder. Afterwards it prints, of every process, the slopes of its memory after the
first 500 steps, its threads and open files, and the processor time of a step at the beginning and
at the end; and the sizes of the files. docs/performance.md has the figures of 5,000 steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from bench import machine
from least_squares import fit_line
from plots import neutral_pyplot

MIB = 2**20
SETTLED = 500  # steps after which memory is expected to be flat
FEWEST = 10  # samples of a process that a line is fitted to
PARTS = ("metrics.jsonl", "completions", "checkpoints")  # of the run's folder
MEMORY = {"rss": "resident", "pss": "proportional"}

Sample = dict[str, Any]  # seconds, steps, processes: {id: values}, bytes and files by part


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("overrides", nargs="*", help="knobs of the recipe, as for grpo train")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--every", type=float, default=20, help="seconds between two samples")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("outputs/long_run"),
        help="folder of the run; an earlier run in it is discarded",
    )
    parser.add_argument("--plot", type=Path, help="file of the curves, such as long_run.svg")
    parser.add_argument("--from", type=Path, dest="stored", help="samples that are only shown")
    given = parser.parse_args()
    path = given.stored or given.output.with_suffix(".jsonl")
    if given.stored is None:
        print(machine(), flush=True)
        words = [f"steps={given.steps}", f"output_dir={given.output}", *given.overrides]
        # A run that resumes adds its samples to those that are there.
        if not any(word.startswith("resume=") for word in given.overrides):
            path.unlink(missing_ok=True)
            words.append("overwrite=true")
        watch(["recipe=arithmetic_tiny", *words], given.output, path, given.every)
    samples = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    print("\n".join([*of_processes(samples), "", *of_files(samples)]))
    if given.plot is not None:
        plot(given.plot, samples)


def watch(words: Sequence[str], folder: Path, path: Path, every: float) -> None:
    """Trains in a process of its own, and adds a line to the file for each sample."""
    command = [sys.executable, "-m", "grpo_cli.cli", "train", *words]
    path.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with path.open("a", encoding="utf-8") as file, subprocess.Popen(command) as run:
        while run.poll() is None:
            sample = {"seconds": time.monotonic() - began, **look(psutil.Process(run.pid), folder)}
            if sample["processes"]:
                file.write(json.dumps(sample) + "\n")
                file.flush()
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(every)
    if run.returncode:
        raise SystemExit(f"the run ended with {run.returncode}; its samples are in {path}")


def look(main_process: psutil.Process, folder: Path) -> Sample:
    """Returns what the processes of a run hold now, and what its folder holds."""
    with contextlib.suppress(OSError):
        steps = (folder / "metrics.jsonl").read_bytes().count(b"\n")
        return {"steps": steps, "processes": processes(main_process), **sizes(folder)}
    return {"steps": 0, "processes": processes(main_process), **sizes(folder)}


def processes(main_process: psutil.Process) -> dict[str, dict[str, Any]]:
    """Returns memory, processor time, threads and open files of each process, by its id."""
    found: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(psutil.Error):
        for process in [main_process, *main_process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error), process.oneshot():
                memory, times = process.memory_full_info(), process.cpu_times()
                words = [Path(word).name for word in process.cmdline()[1:3]]
                found[str(process.pid)] = {
                    "name": "run" if process == main_process else " ".join(words),
                    "rss": memory.rss, "pss": memory.pss, "cpu": times.user + times.system,
                    "threads": process.num_threads(), "files": process.num_fds(),
                }  # fmt: skip
    return found


def sizes(folder: Path) -> dict[str, dict[str, int]]:
    """Returns bytes and number of files of the run's folder, by its parts."""
    found = {"bytes": dict.fromkeys((*PARTS, "all"), 0), "files": dict.fromkeys(PARTS, 0)}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            with contextlib.suppress(OSError):  # a file of an old checkpoint, deleted just now
                size = path.stat().st_size
                found["bytes"]["all"] += size
                part = path.relative_to(folder).parts[0]
                if part in PARTS:
                    found["bytes"][part] += size
                    found["files"][part] += 1
    return found


def of_processes(samples: Sequence[Sample], settled: int = SETTLED) -> list[str]:
    """Returns a Markdown table of the processes, while they train.

    The slopes are of steps after `settled`. After the last step a run draws its curves and writes
    its report: these samples do not count.
    """
    header = [
        "process", "resident at the end", "a 1,000 steps", "proportional at the end",
        "a 1,000 steps", "threads", "open files", "first seconds a step", "last",
    ]  # fmt: skip
    lines = [f"| {' | '.join(header)} |", "| --- " * len(header) + "|"]
    late = [s for s in samples if settled < s["steps"] < samples[-1]["steps"]]
    brief = 0
    for pid, name in names(late).items():
        own = [(s["steps"], s["processes"][pid]) for s in late if pid in s["processes"]]
        if len(own) < FEWEST:
            brief += 1
            continue
        cells = [name]
        for measure in MEMORY:
            mib = [values[measure] / MIB for _, values in own]
            slope = fit_line([steps / 1000 for steps, _ in own], mib)
            cells += [f"{mib[-1]:,.1f} MiB", f"{slope.text()} MiB"]
        cells += [spread(values[what] for _, values in own) for what in ("threads", "files")]
        fifth = max(len(own) // 5, FEWEST // 2)
        for part in (own[:fifth], own[-fifth:]):
            seconds = fit_line([steps for steps, _ in part], [values["cpu"] for _, values in part])
            cells.append(f"{seconds.slope:.3f} ± {seconds.error:.3f} s")
        lines.append(f"| {' | '.join(cells)} |")
    if brief:
        lines.append(f"\n{brief} more processes were seen fewer than {FEWEST} times.")
    return lines


def names(samples: Iterable[Sample]) -> dict[str, str]:
    """Returns the names of all processes by their ids, in the order in which they appeared."""
    return {pid: p["name"] for s in samples for pid, p in s["processes"].items()}


def spread(values: Iterable[int]) -> str:
    """Returns the smallest and the largest value, or the only one."""
    seen = {*values}
    return str(min(seen)) if len(seen) == 1 else f"{min(seen)} to {max(seen)}"


def of_files(samples: Sequence[Sample]) -> list[str]:
    """Returns a Markdown table of the sizes at half of the run and at its end."""
    half = next(s for s in samples if s["steps"] >= samples[-1]["steps"] / 2)
    moments = [half, samples[-1]]
    header = ["part", *(f"after {s['steps']:,} steps" for s in moments), "most files"]
    lines = [f"| {' | '.join(header)} |", "| --- " * len(header) + "|"]
    for part in (*PARTS, "all"):
        cells = [f"{s['bytes'][part] / 1e6:,.2f} MB" for s in moments]
        cells.append(str(max(s["files"].get(part, 0) for s in samples)) if part in PARTS else "")
        lines.append(f"| {part} | {' | '.join(cells)} |")
    return lines


def plot(path: Path, samples: Sequence[Sample]) -> None:
    """Draws memory, processor time of a step, and sizes of files against the steps."""
    plt = neutral_pyplot()
    figure, (memory, seconds, files) = plt.subplots(1, 3, figsize=(10, 2.8))
    for pid, name in names(samples).items():
        own = [(s["steps"], s["processes"][pid]) for s in samples if pid in s["processes"]]
        for measure, label in MEMORY.items():
            mib = [values[measure] / MIB for _, values in own]
            memory.plot([steps for steps, _ in own], mib, lw=1, label=f"{name}, {label}")
        pairs = [(a, b) for a, b in pairwise(own) if b[0] > a[0]]
        costs = [(b[1]["cpu"] - a[1]["cpu"]) / (b[0] - a[0]) for a, b in pairs]
        seconds.plot([b[0] for _, b in pairs], costs, ".", ms=2, label=name)
    for part in (*PARTS, "all"):
        sized = [s["bytes"][part] / 1e6 for s in samples]
        files.plot([s["steps"] for s in samples], sized, lw=1, label=part)
    labels = ("memory, MiB", "processor seconds of a step", "files, MB")
    for cell, label in zip((memory, seconds, files), labels, strict=True):
        cell.set_ylim(bottom=0)
        cell.set_ylabel(label)
        cell.set_xlabel("step")
        cell.legend(frameon=False, fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110, transparent=True)


if __name__ == "__main__":
    main()
