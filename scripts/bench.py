"""A step beside TRL's and transformers', on random models made here: `make bench`.

    python scripts/bench.py [--workloads tail,short] [--rounds 3]

The sides take turns, each in a process of its own: ours, TRL, ours, TRL ... They get the same
weights, prompt tokens (checked), rewards, sampling settings and limits; what they sample differs by
chance. bench_setup.py has the workloads; bench_side.py says what is counted to which stage and how
memory is measured. Without TRL, or with --sides, fewer sides are measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pickle
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import half_products
import torch
from bench_setup import MODELS, WARM_UP, WORKLOADS, Job, Workload, make_folder, write_recipe

from grpo_cli.cli import settings_of_cpu
from grpo_cli.reporting.machine import processor

SCRIPTS = Path(__file__).resolve().parent
SIDES = ("ours", "trl", "generate")
STAGES = ("step", "generate", "update", "memory", "tokens")
UNITS = {"memory": "MiB", "tokens": ""}  # of the other stages: seconds
TOLERANCE = 0.03  # sides whose tokens differ by more are compared by the token too
# Freed memory goes back to the system at once, so that resident memory is memory in use.
GIVES_BACK = {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}
GIVES_BACK |= {"MALLOC_MMAP_MAX_": "1000000"}

Step = dict[str, Any]  # the fields of bench_side.Step
Rounds = list[list[Step]]  # the counted steps of each round


def value(step: Step, stage: str) -> float | None:
    """Returns a stage's value in a step: seconds, MiB or tokens; None if it was not measured."""
    if stage == "memory":
        return None if step["memory"] is None else step["memory"] / 2**20
    found: float | None = step["tokens"] if stage == "tokens" else step["seconds"].get(stage)
    return found


def figure(rounds: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Returns the median over all steps, and the lowest and highest round (of one round: step)."""
    each = [statistics.median(r) for r in rounds] if len(rounds) > 1 else list(rounds[0])
    return statistics.median(v for r in rounds for v in r), min(each), max(each)


def number(value: float) -> str:
    """Writes three digits, or all before the point."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"


def rows(workload: str, found: Mapping[str, Rounds]) -> list[str]:
    """Returns the table of a workload: a row for each stage of each side, beside ours."""
    lines = []
    for stage in STAGES:
        medians: dict[str, float] = {}
        for side, rounds in found.items():
            values = [[value(step, stage) for step in r] for r in rounds]
            if values[0][0] is None:
                continue
            medians[side], low, high = figure(values)  # type: ignore[arg-type]
            unit = UNITS.get(stage, "s")
            text = f"{number(medians[side])} {unit} ({number(low)}..{number(high)})"
            line = f"{workload:8} {stage:9} {side:9} {text:34}"
            if side != "ours" and "ours" in medians:
                line += f" {medians[side] / medians['ours']:.2f}x"
                tokens, own = (
                    sum(s["tokens"] for r in found[x] for s in r) for x in (side, "ours")
                )
                share = tokens / len(rounds) / (own / len(found["ours"]))
                if unit == "s" and abs(share - 1) > TOLERANCE:
                    line += f"  by the token {medians[side] / medians['ours'] / share:.2f}x"
            lines.append(line.rstrip())
    return lines


def environment(root: Path, metered: bool) -> dict[str, str]:
    """Returns the environment of every side."""
    path = os.pathsep.join(filter(None, [str(SCRIPTS.parent), os.environ.get("PYTHONPATH")]))
    own = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(root / "datasets"), "PYTHONPATH": path}
    own |= GIVES_BACK if metered else {}
    return settings_of_cpu() | os.environ | own  # as `grpo` sets them


def run(root: Path, job: Job) -> list[Step]:
    """Returns the counted steps of one process of one side; says how long they took."""
    output = Path(job.output)
    output.mkdir()
    write_recipe(job)
    (output / "job.pickle").write_bytes(pickle.dumps(job))
    command = [sys.executable, str(SCRIPTS / "bench_side.py"), str(output / "job.pickle")]
    with (output / "log").open("w") as log:
        how: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT}
        done = subprocess.run(command, env=environment(root, job.metered), **how)
    if done.returncode:
        tail = "\n".join((output / "log").read_text(errors="replace").splitlines()[-30:])
        raise SystemExit(f"{job.workload.name}, {job.side}: ended with {done.returncode}\n{tail}")
    steps: list[Step] = json.loads((output / "result.json").read_text())
    shutil.rmtree(output)  # a run leaves a checkpoint
    assert len(steps) == job.steps, "the number of steps differs from the job's"
    assert min(step["shortest"] for step in steps) >= job.workload.min_tokens
    counted = steps[WARM_UP:]
    seen = (", ".join(f"{n} {number(s)}" for n, s in step["seconds"].items()) for step in counted)
    said = f"  {job.workload.name} {job.side}: {'; '.join(seen)}; load {os.getloadavg()[0]:.1f}"
    print(said, file=sys.stderr, flush=True)
    return counted


def compare(
    root: Path, workload: Workload, sides: Sequence[str], rounds: int, bf16: bool
) -> tuple[dict[str, Rounds], dict[str, Rounds]]:
    """Returns the counted steps of each side: of timed turns, and of one that measures memory."""
    folder = root / workload.name
    make_folder(folder, workload, WARM_UP + workload.steps)

    def turn(side: str, steps: int = workload.steps, *, metered: bool = False) -> list[Step]:
        output, steps = str(root / "side"), WARM_UP + steps
        return run(root, Job(side, workload, str(folder), output, steps, bf16, metered))

    found: dict[str, Rounds] = {side: [] for side in sides}
    for _ in range(rounds):
        for side in sides:
            found[side].append(turn(side))
    trained = [side for side in sides if side != "generate"]
    return found, {side: [turn(side, 1, metered=True)] for side in trained}


def machine() -> str:
    """Describes the machine and the versions that the figures come from."""
    packages = ("torch", "transformers", "trl")
    present = [p for p in packages if importlib.util.find_spec(p) is not None]
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in present)
    unit = torch.backends.cpu.get_cpu_capability()
    unit += ", products in bfloat16" if half_products.are_quick() else ""
    git = ["git", "-C", str(SCRIPTS), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True)
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} cores, {processor()} ({unit}), "
        f"{versions}, commit {commit.stdout.strip() or 'unknown'}, load {os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workloads", default="all", help=f"all, or some of {','.join(WORKLOADS)}")
    parser.add_argument("--sides", default=",".join(SIDES), help="some of the sides")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--steps", type=int, help="counted in a turn; each workload has its own")
    parser.add_argument("--model", choices=tuple(MODELS), help="in place of each workload's own")
    parser.add_argument("--bf16", action="store_true", help="mixed precision on both sides")
    parser.add_argument("--limit", type=int, help="longest completion, in place of each workload's")
    parser.add_argument("--json", type=Path, help="file for every step that was counted")
    given = parser.parse_args()
    names = list(WORKLOADS) if given.workloads == "all" else given.workloads.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        parser.error(f"--workloads: there is no {', '.join(unknown)}")
    sides = given.sides.split(",")
    if "trl" in sides and importlib.util.find_spec("trl") is None:
        print("TRL is not installed here (make bench makes a venv that has it): it is left out")
        sides.remove("trl")
    changes = {"steps": given.steps, "model": given.model, "limit": given.limit}
    changes = {key: value for key, value in changes.items() if value is not None}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the side, removes the folder
    print(machine(), flush=True)
    raw: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="grpo-bench-") as root:
        for name in names:
            workload = dataclasses.replace(WORKLOADS[name], **changes)
            # `model.generate` is compared with all weights in training only.
            own = [s for s in sides if s != "generate" or not workload.lora_rank]
            timed, metered = compare(Path(root), workload, own, given.rounds, given.bf16)
            lines = rows(name, timed) + [r for r in rows(name, metered) if " memory " in r]
            print("\n".join(lines), flush=True)
            raw[name] = {"timed": timed, "metered": metered}
            if given.json is not None:
                given.json.write_text(json.dumps(raw), encoding="utf-8")


if __name__ == "__main__":
    main()
