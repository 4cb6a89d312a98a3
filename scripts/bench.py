"""A step beside TRL's and transformers', on random models made here: `make bench`.

    python scripts/bench.py [--workloads tail,short] [--rounds 3]

The sides take turns, each in a process of its own: ours, TRL, ours, TRL ... They get the same
weights, prompt tokens (checked), rewards, sampling settings and limits; what they sample differs by
chance. bench_setup.py has the workloads, bench_probe.py says how memory is measured, bench_trl.py
what is counted to which of TRL's stages.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import half_products
import real_model
import torch
from bench_setup import MODELS, OURS, WARM_UP, WORKLOADS, Job, Workload, make_folder, write_recipe

from grpo_cli.cli import spin_count
from grpo_cli.reporting.machine import processor

SCRIPTS = Path(__file__).resolve().parent
LABELS = {
    "ours": "ours",
    "trl": "trl",
    "generate": "model.generate",
    "all": "no skip",
    "vllm": "ours, vLLM",
    "trl_vllm": "trl, vLLM",
}
STAGES = {  # that a side is compared in
    "trl": ("step", "generate", "update", "memory", "tokens"),
    "generate": ("generate", "tokens"),
    "all": ("step", "update"),
    "ours": ("step", "generate", "update", "tokens"),
    "trl_vllm": ("step", "generate", "update", "tokens"),
}  # fmt: skip
TOLERANCE = 0.03  # sides whose tokens differ by more are compared by the token too
# Freed memory goes back to the system at once, so that resident memory is memory in use.
GIVES_BACK = {
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_MMAP_MAX_": "1000000",
}

Rounds = list[list[dict[str, Any]]]  # the counted steps of each round


@dataclass(frozen=True)
class Figure:
    """A median with its spread."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, rounds: Sequence[Sequence[float]]) -> Figure:
        """The median over all steps; lowest and highest round, or, of one round, step."""
        each = [statistics.median(r) for r in rounds] if len(rounds) > 1 else list(rounds[0])
        return cls(statistics.median(v for r in rounds for v in r), min(each), max(each))

    def text(self, unit: str) -> str:
        unit = f" {unit}" if unit else ""
        return f"{number(self.median)}{unit} ({number(self.low)}..{number(self.high)})"


def number(value: float) -> str:
    """Three digits, or all before the point."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"


def times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 2 else f"{ratio:.1f}x"


def tokens_of(step: Mapping[str, Any]) -> int:
    """Sampled tokens of a step."""
    return sum(sum(completions) for _, completions in step["lengths"])


def measured(rounds: Rounds, stage: str) -> list[list[float]] | None:
    """A stage's value in each round's steps: seconds, MiB or tokens; None if it has none."""
    if stage == "tokens":
        return [[float(tokens_of(s)) for s in r] for r in rounds]
    if stage == "memory":
        found = [[s["memory"] for s in r] for r in rounds]
        return [[m / 2**20 for m in r] for r in found] if None not in found[0] else None
    if stage not in rounds[0][0]["seconds"]:
        return None
    return [[s["seconds"][stage] for s in r] for r in rounds]


def per_token(rounds: Rounds, stage: str) -> float:
    """Median of a stage's value by the sampled token."""
    values = measured(rounds, stage)
    assert values is not None, "asked only of stages that were measured"
    steps = zip((s for r in rounds for s in r), (v for r in values for v in r), strict=True)
    return statistics.median(value / tokens_of(step) for step, value in steps)


def rows(workload: str, found: Mapping[str, Rounds]) -> list[str]:
    """The table of a workload: a row for each stage of each side that the first is held against."""
    (first, ours), *others = found.items()
    lines = []
    for side, theirs in others:
        for stage in STAGES.get(side, ()):
            left, right = measured(ours, stage), measured(theirs, stage)
            if left is None or right is None:
                continue
            unit = {"memory": "MiB", "tokens": ""}.get(stage, "s")
            a, b = Figure.of(left), Figure.of(right)
            line = (
                f"{workload:8} {stage:9} {LABELS[first] + ' ' + a.text(unit):32} "
                f"{LABELS[side] + ' ' + b.text(unit):42} {times(b.median / a.median)}"
            )
            counts = [statistics.mean(tokens_of(s) for r in x for s in r) for x in (ours, theirs)]
            if unit == "s" and abs(counts[1] / counts[0] - 1) > TOLERANCE:
                ratio = per_token(theirs, stage) / per_token(ours, stage)
                line += f"  by the token {times(ratio)}"
            lines.append(line)
    return lines


class Bench:
    """Runs jobs in processes of their own, below one temporary folder."""

    def __init__(self, root: Path, bf16: bool) -> None:
        self.root, self.bf16 = root, bf16

    def run(self, job: Job) -> dict[str, Any]:
        """Returns the measurements of one process of one side."""
        output = Path(job.output)
        output.mkdir()
        if job.side in OURS:
            write_recipe(job)
        job.write(output / "job.json")
        script = "bench_ours.py" if job.side in OURS else "bench_trl.py"
        with (output / "log").open("w") as log:
            done = subprocess.run(
                [sys.executable, str(SCRIPTS / script), str(output / "job.json")],
                env=environment(self.root, job.metered), stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        if done.returncode:
            tail = "\n".join((output / "log").read_text(errors="replace").splitlines()[-30:])
            raise SystemExit(
                f"{job.workload.name}, {job.side}: ended with {done.returncode}\n{tail}"
            )
        result: dict[str, Any] = json.loads((output / "result.json").read_text())
        shutil.rmtree(output)  # a run leaves a checkpoint
        return result

    def job(self, workload: Workload, side: str, steps: int, **more: Any) -> Job:
        """The job of a side, with the workload's model and prompts made if they are not there."""
        folder = self.root / f"{workload.name}-{workload.model}-{steps}"
        if not folder.exists():
            make_folder(folder, workload, steps)
        return Job(
            side=side, workload=workload, folder=str(folder), output=str(self.root / "side"),
            steps=steps, bf16=self.bf16, **more,
        )  # fmt: skip

    def turn(self, workload: Workload, side: str, steps: int, **more: Any) -> list[dict[str, Any]]:
        """All steps of one process of a side; says how long they took."""
        found = self.run(self.job(workload, side, WARM_UP + steps, **more))["steps"]
        seen = [
            ", ".join(f"{name} {number(s)}" for name, s in step["seconds"].items())
            + (f", {step['memory'] / 2**20:,.0f} MiB" if step["memory"] is not None else "")
            for step in found[WARM_UP:]
        ]
        say(f"  {workload.name} {LABELS[side]}: {'; '.join(seen)}; load {os.getloadavg()[0]:.1f}")
        assert len(found) == WARM_UP + steps, "a process does the steps that it is told to"
        shortest = min(min(c) for step in found for _, c in step["lengths"])
        if shortest < workload.min_tokens:
            say(f"note: a completion of {shortest} tokens, fewer than {workload.min_tokens}")
        return list(found)

    def compare(self, workload: Workload, sides: Sequence[str], rounds: int) -> dict[str, Rounds]:
        """The counted steps of each side, after `rounds` rounds in which each has its turn."""
        found: dict[str, Rounds] = {side: [] for side in sides}
        for _ in range(rounds):
            turns = {side: self.turn(workload, side, workload.steps) for side in sides}
            check_prompts(turns)
            for side, steps in turns.items():
                found[side].append(steps[WARM_UP:])
        return found

    def memory(self, workload: Workload, sides: Sequence[str]) -> dict[str, Rounds]:
        """One more turn of each side, for memory: looking at it costs time."""
        sides = [s for s in sides if s == sides[0] or "memory" in STAGES.get(s, ())]
        if len(sides) < 2:
            return {}
        return {side: [self.turn(workload, side, 1, metered=True)[WARM_UP:]] for side in sides}


def environment(root: Path, metered: bool) -> dict[str, str]:
    """Returns the environment of every side."""
    path = os.pathsep.join(filter(None, [str(SCRIPTS.parent), os.environ.get("PYTHONPATH")]))
    chosen = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(root / "datasets"),
        "PYTHONPATH": path,
    }
    # As `grpo` sets it. OpenMP's own would be threads that spin: slower where others use the cores.
    # vLLM on a CPU: one small function takes 24 s to compile, and TRL's engine its memory by GiB.
    chosen |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return {
        "GOMP_SPINCOUNT": str(spin_count()),
        **os.environ,
        **chosen,
        **(GIVES_BACK if metered else {}),
    }


def check_prompts(turns: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Raises unless every side was given the same prompt tokens in every step."""
    seen = {side: [step["prompts"] for step in steps] for side, steps in turns.items()}
    if any(digests != next(iter(seen.values())) for digests in seen.values()):
        raise SystemExit(f"the sides had different prompts: {seen}")


def say(text: str) -> None:
    """A line about what is going on, apart from the tables."""
    print(text, file=sys.stderr, flush=True)


def comparison(
    bench: Bench, chosen: Sequence[Workload], rounds: int, path: Path | None = None
) -> None:
    """Runs and prints the workloads.

    Args:
        path: of a JSON file that gets every counted step, written after each workload.
    """
    has_trl = importlib.util.find_spec("trl") is not None
    if not has_trl:
        print("TRL is not installed here (make bench makes a venv that has it): ours alone")
    raw: dict[str, Any] = {}
    for workload in chosen:
        if "vllm" in workload.sides and importlib.util.find_spec("vllm") is None:
            print(f"{workload.name}: vLLM is not installed here (make bench-vllm has it): left out")
            continue
        if workload.questions and not real_model.folder().exists():
            print(f"{workload.name}: make real-model has not been run: left out")
            continue
        sides = [s for s in workload.sides if has_trl or not s.startswith("trl")]
        found = bench.compare(workload, sides, rounds)
        metered = bench.memory(workload, sides)
        raw[workload.name] = {"timed": found, "metered": metered}
        lines = rows(workload.name, found)
        lines += [r for r in rows(workload.name, metered) if " memory " in r] if metered else []
        lines += [] if len(sides) > 1 else alone(workload.name, found[sides[0]])
        print("\n".join(lines), flush=True)
        if path is not None:
            path.write_text(json.dumps(raw), encoding="utf-8")


def alone(workload: str, ours: Rounds) -> list[str]:
    """Rows of our side where there is none to hold it against."""
    stages = [(stage, measured(ours, stage)) for stage in ("step", "generate", "update", "memory")]
    return [
        f"{workload:8} {stage:9} ours {Figure.of(v).text('MiB' if stage == 'memory' else 's')}"
        for stage, v in stages
        if v is not None
    ]


def machine() -> str:
    """Describes the machine and the versions that the figures come from."""
    packages = ("torch", "transformers", "trl")
    present = [p for p in packages if importlib.util.find_spec(p) is not None]
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in present)
    unit = torch.backends.cpu.get_cpu_capability()
    unit += ", products in bfloat16" if half_products.are_quick() else ""
    commit = subprocess.run(
        ["git", "-C", str(SCRIPTS), "describe", "--always", "--dirty"],
        capture_output=True, text=True,
    )  # fmt: skip
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} cores, {processor()} ({unit}), "
        f"{versions}, commit {commit.stdout.strip() or 'unknown'}, load {os.getloadavg()[0]:.1f}"
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workloads", default="all", help=f"all, or some of {','.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument(
        "--steps", type=int, help="counted steps in a turn; each workload has its own"
    )
    parser.add_argument("--model", choices=tuple(MODELS), help="in place of each workload's own")
    parser.add_argument("--bf16", action="store_true", help="mixed precision on both sides")
    parser.add_argument("--limit", type=int, help="longest completion, in place of each workload's")
    parser.add_argument("--json", type=Path, help="file for every step that was counted")
    given = parser.parse_args()
    names = list(WORKLOADS) if given.workloads == "all" else given.workloads.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        parser.error(f"--workloads: there is no {', '.join(unknown)}")
    changes = {"steps": given.steps, "model": given.model, "limit": given.limit}
    given.changes = {key: value for key, value in changes.items() if value is not None}
    given.workloads = [dataclasses.replace(WORKLOADS[name], **given.changes) for name in names]
    return given


def main() -> None:
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the side, removes the folder
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="grpo-bench-") as root:
        bench = Bench(Path(root), given.bf16)
        comparison(bench, given.workloads, given.rounds, given.json)


if __name__ == "__main__":
    main()
