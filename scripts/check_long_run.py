"""Checks that a long run keeps its memory, its open files and the time of a step.

    python scripts/check_long_run.py [--steps 5000] [KEY=VALUE ...]

Trains the recipe arithmetic_tiny, and looks every 20 seconds at the run's process and its folder.
Afterwards it prints, for the first and the last fifth of the samples after step 500, memory,
threads, open files, processor seconds of a step, and the bytes of the folder. docs/performance.md
has the figures of 5,000 steps.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from bench import machine

SETTLED = 500  # steps after which memory is expected to be flat
MIB = 2**20

Sample = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("overrides", nargs="*", help="knobs of the recipe, as for grpo train")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--every", type=float, default=20, help="seconds between two samples")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/long_run"), help="folder, overwritten"
    )
    given = parser.parse_args()
    print(machine(), flush=True)
    words = ["recipe=arithmetic_tiny", f"steps={given.steps}", f"output_dir={given.output}"]
    samples = watch([*words, "overwrite=true", *given.overrides], given.output, given.every)
    print("\n".join(table(samples)))


def watch(words: Sequence[str], folder: Path, every: float) -> list[Sample]:
    """Trains in a process of its own; returns what it held, sample by sample."""
    samples = []
    with subprocess.Popen([sys.executable, "-m", "grpo_cli.cli", "train", *words]) as run:
        while run.poll() is None:
            with contextlib.suppress(psutil.Error, OSError):
                samples.append(look(psutil.Process(run.pid), folder))
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(every)
    if run.returncode:
        raise SystemExit(f"the run ended with {run.returncode}")
    return samples


def look(process: psutil.Process, folder: Path) -> Sample:
    """Returns what a run's process and its folder hold now."""
    times = process.cpu_times()
    files = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return {
        "step": (folder / "metrics.jsonl").read_bytes().count(b"\n"),
        "resident MiB": process.memory_info().rss / MIB,
        "threads": process.num_threads(),
        "open files": process.num_fds(),
        "processor seconds": times.user + times.system,
        "files in the folder": len(files),
        "MiB in the folder": sum(files) / MIB,
    }


def table(samples: Sequence[Sample], settled: int = SETTLED) -> list[str]:
    """Returns a Markdown table of the medians of the first and the last fifth of the samples."""
    # After the last step a run draws its curves and writes its report.
    late = [s for s in samples if settled < s["step"] < samples[-1]["step"]]
    fifth = max(len(late) // 5, 2)
    if len(late) < 2 * fifth:
        raise SystemExit(f"only {len(late)} samples after step {settled}")
    parts = late[:fifth], late[-fifth:]
    spans = [f"steps {part[0]['step']:,} to {part[-1]['step']:,}" for part in parts]
    lines = [f"| | {' | '.join(spans)} |", "| --- | --- | --- |"]
    for name in samples[0]:
        if name == "processor seconds":
            values = [(p[-1][name] - p[0][name]) / (p[-1]["step"] - p[0]["step"]) for p in parts]
            lines.append(f"| processor seconds a step | {values[0]:.3f} | {values[1]:.3f} |")
        elif name != "step":
            values = [statistics.median(sample[name] for sample in part) for part in parts]
            lines.append(f"| {name} | {values[0]:,.1f} | {values[1]:,.1f} |")
    return lines


if __name__ == "__main__":
    main()
