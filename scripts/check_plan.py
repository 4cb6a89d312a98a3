"""Compares `grpo plan` with runs on this machine: peak memory and time of a step.

    python scripts/check_plan.py [CASE ...]

Each case trains a random model for a few steps, and reads what the run has measured from its
plan.json. Then `grpo plan` predicts the same recipe, with the mean length of the completions and
the share of groups with a gradient that were measured. Times are seconds of the processor, of one
thread, so that other programs on the machine change little. Memory is that of a second run, whose
malloc gives freed memory back at once, so that resident memory is memory in use; that makes a step
slower. docs/plan.md has the table.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from bench import GIVES_BACK, machine
from bench_setup import Job, Workload, make_folder, make_recipe

BOUNDS = {"peak": 0.15, "step_seconds": 0.25}  # errors beyond them are bold
SHORT = Workload("short", (24, 24), limit=48, prompts=8, min_tokens=48)
LONG = Workload("long", (30, 130), limit=256, prompts=4)
LARGE = Workload("large", (64, 64), limit=56, prompts=2, generations=4, min_tokens=56)


@dataclass(frozen=True)
class Case:
    """One configuration: a model, lengths, and what differs from the recipe."""

    model: str  # "": the recipe `recipe`, as it is shipped
    workload: Workload = SHORT
    overrides: tuple[str, ...] = ()
    recipe: str = ""
    steps: int = 3  # a CPU's memory is measured from the second step on


LORA = ("adapter=lora", "adapter.rank=16")
CASES = {
    "arithmetic_tiny, as shipped": Case("", recipe="arithmetic_tiny", steps=8),
    "gsm8k_tiny, as shipped": Case("", recipe="gsm8k_tiny"),
    "10M, long, packed": Case("small", LONG, steps=5),
    "10M, long, padded": Case("small", LONG, ("update.packing=false",), steps=5),
    "10M, short, reference": Case("small", SHORT, ("loss.beta=0.04",)),
    "40M of vocabulary 151,936": Case("wide", dataclasses.replace(SHORT, prompts=4)),
    "110M": Case("110m", LARGE, steps=2),
    "110M, LoRA": Case("110m", LARGE, (*LORA, "seed=1"), steps=2),  # whose groups differ
    "110M, checkpointing": Case("110m", LARGE, ("model.gradient_checkpointing=true",), steps=2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", help="names of cases; none: all")
    parser.add_argument("--side", choices=("times", "memory"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(run_side(args.side, CASES[args.cases[0]])))
        return
    print(machine())
    print(
        "| configuration | predicted peak | measured | error | predicted step | measured | error |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in args.cases or CASES:
        timed, metered = (call(name, side) for side in ("times", "memory"))
        predicted = timed["predicted"]
        cells = [name]
        for key, measured in (("peak", metered["peak"]), ("step_seconds", timed["step_seconds"])):
            error = predicted[key] / measured - 1
            bold = "**" if abs(error) > BOUNDS[key] else ""
            size = {"peak": "{:,.0f} MB", "step_seconds": "{:.3g} s"}[key]
            unit = 1e6 if key == "peak" else 1
            cells += [size.format(v / unit) for v in (predicted[key], measured)]
            cells.append(f"{bold}{100 * error:+.0f} %{bold}")
        print(f"| {' | '.join(cells)} |", flush=True)


def call(name: str, side: str) -> dict[str, Any]:
    """Returns what one side of a case measures in a process of its own."""
    scripts = Path(__file__).resolve().parent
    paths = os.pathsep.join([str(scripts), str(scripts.parent)])
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    variables |= GIVES_BACK if side == "memory" else {}
    command = [sys.executable, __file__, name, "--side", side]
    done = subprocess.run(
        command, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_side(side: str, case: Case) -> dict[str, Any]:
    """Trains a case; returns what plan.json says was measured, and the plan made with it."""
    time.perf_counter = time.process_time
    with tempfile.TemporaryDirectory(prefix="grpo-plan-") as name:
        root = Path(name)
        words = [
            f"recipe={case.recipe or make(root, case)}", f"output_dir={root / 'run'}",
            f"steps={case.steps}", "eval.at_start=false", "device=cpu", "eval.at_end=false",
            "eval.every=0", "checkpoint.every=0", *case.overrides,
        ]  # fmt: skip
        grpo("train", *words)
        stored = json.loads((root / "run" / "plan.json").read_text(encoding="utf-8"))
        measured: dict[str, Any] = stored["measured"]
        if side == "times":
            known = (
                f"mean_tokens={measured['completion_tokens']}",
                f"longest_tokens={measured['longest_tokens']}",
                f"signal={min(max(measured['signal'], 0.01), 1.0)}",
            )
            measured["predicted"] = json.loads(grpo("plan", *words, *known, "--json"))
    return measured


def grpo(*words: str) -> str:
    """Runs a command of grpo in this process; returns what it prints."""
    from grpo_cli.cli import run_command  # late: its clocks take the one that is there now

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = run_command([*words])
    if code:
        raise SystemExit(f"{' '.join(words)}\n{out.getvalue()[-2000:]}")
    return out.getvalue()


def make(root: Path, case: Case) -> Path:
    """Writes model, prompts and recipe of a case; returns the recipe's file."""
    workload = dataclasses.replace(case.workload, model=case.model)
    make_folder(root / "folder", workload, steps=case.steps)
    job = Job("ours", workload, str(root / "folder"), str(root), steps=case.steps, bf16=False)
    recipe = make_recipe(job)
    recipe["defaults"].insert(1, {"adapter": "none"})
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return root / "recipe.yaml"


if __name__ == "__main__":
    main()
