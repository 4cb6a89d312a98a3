"""Compares `grpo plan` with runs on this machine: peak memory and time of a step, by stage.

    python scripts/check_plan.py [CASE ...] [--json FILE]
    python scripts/check_plan.py --table FILE         prints the tables of stored results

Each case trains a random model for a few steps, and reads what the run has measured from its
plan.json. Then `grpo plan` predicts the same recipe, with the mean length of the completions and
the share of groups with a gradient that were measured, which nobody knows before. Times are seconds
of the processor, of one thread, so that other programs on the machine change little. Memory is that
of a second run, whose malloc gives freed memory back at once: then resident memory is memory in
use. It makes a step slower, so that times are those of the first. docs/plan.md has the tables.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_setup
import yaml
from bench import GIVES_BACK, machine, say
from bench_setup import MODELS, Job, Workload, make_folder, make_recipe

MODELS |= {
    "1m": {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "eos": 64,
    },
    "40m": {
        "vocab_size": 8000, "hidden_size": 512, "intermediate_size": 1536,
        "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4, "eos": 128,
    },
    "150m": {
        "vocab_size": 16_000, "hidden_size": 896, "intermediate_size": 2432,
        "num_hidden_layers": 16, "num_attention_heads": 14, "num_key_value_heads": 2, "eos": 128,
    },
}  # fmt: skip
MEMORY_BOUND, TIME_BOUND = 0.15, 0.25
MEMORY_STEPS = 3  # a CPU's memory is measured from the second step on
SIDES: dict[str, dict[str, str]] = {"times": {}, "memory": GIVES_BACK}  # variables of the process
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
    steps: int = 3


LORA = ("adapter=lora", "adapter.rank=16")
CASES = {
    "arithmetic_tiny, as shipped": Case("", recipe="arithmetic_tiny", steps=8),
    "gsm8k_tiny, as shipped": Case("", recipe="gsm8k_tiny"),
    "1M, short": Case("1m", SHORT, steps=6),
    "1M, long": Case("1m", LONG, steps=6),
    "10M, long, packed": Case("small", LONG, steps=5),
    "10M, long, padded": Case("small", LONG, ("update.packing=false",), steps=5),
    "10M, short, reference": Case("small", SHORT, ("loss.beta=0.04",)),
    "40M, short": Case("40m", SHORT),
    "40M, long, LoRA": Case("40m", dataclasses.replace(LONG, prompts=2), LORA),
    "40M of vocabulary 151,936": Case("wide", dataclasses.replace(SHORT, prompts=4)),
    "110M": Case("110m", LARGE, steps=2),
    "110M, LoRA": Case("110m", LARGE, (*LORA, "seed=1"), steps=2),  # whose groups differ
    "110M, checkpointing": Case("110m", LARGE, ("model.gradient_checkpointing=true",), steps=2),
    "150M": Case("150m", LARGE, steps=2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare grpo plan with runs on this machine.")
    parser.add_argument("cases", nargs="*", help="names of cases; none: all")
    parser.add_argument("--json", type=Path, help="file to which lines with results are added")
    parser.add_argument("--table", type=Path, help="file of results, which are only printed")
    parser.add_argument("--side", choices=list(SIDES), help="run one side in this process")
    args = parser.parse_args()
    if args.table:
        print(tables(read(args.table)))
        return
    if args.side:
        run_side(args.side, args.cases, args.json)
        return
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="grpo-plan-") as root:
        path = args.json or Path(root) / "results.jsonl"
        for side in SIDES:
            call(side, args.cases or list(CASES), path)
        print(tables(read(path)))


def call(side: str, cases: Sequence[str], path: Path) -> None:
    """Runs one side of some cases in a process of its own."""
    scripts = Path(bench_setup.__file__).parent
    paths = os.pathsep.join([str(scripts), str(scripts.parent)])
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, *cases, "--side", side, "--json", str(path)]
    subprocess.run(command, env={**os.environ, **variables, **SIDES[side]}, check=True)


def run_side(side: str, cases: Sequence[str], path: Path) -> None:
    """Measures one side of some cases, and adds a line to the file for each."""
    time.perf_counter = time.process_time
    measure = {"times": times, "memory": peaks}[side]
    for name in cases:
        with tempfile.TemporaryDirectory(prefix="grpo-plan-") as root:
            found = measure(Path(root), CASES[name])
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"case": name, **found}) + "\n")
        say(f"{side}: {name}")


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the results of the cases of which both sides are there, in their order."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        result = json.loads(line)
        found.setdefault(result.pop("case"), {}).update(result)
    return {name: found[name] for name in CASES if {*found.get(name, {})} >= {"times", "memory"}}


def times(root: Path, case: Case) -> dict[str, Any]:
    """Returns the prediction of a case and what its run measures, for the times."""
    words, measured = trained(root, case, case.steps)
    known = (
        f"mean_tokens={measured['completion_tokens']}",
        f"longest_tokens={measured['longest_tokens']}",
        f"signal={min(max(measured['signal'], 0.01), 1.0)}",
    )
    predicted = json.loads(grpo("plan", *words, *known, "--json"))
    return {"predicted": predicted, "times": measured}


def peaks(root: Path, case: Case) -> dict[str, Any]:
    """Returns what the run of a case measures, for the memory."""
    return {"memory": trained(root, case, min(case.steps, MEMORY_STEPS))[1]}


def trained(root: Path, case: Case, steps: int) -> tuple[list[str], dict[str, Any]]:
    """Trains a case; returns the words of its recipe, and what plan.json says was measured."""
    words = [
        f"output_dir={root / 'run'}", f"steps={steps}", "eval.at_start=false", "device=cpu",
        "eval.at_end=false", "eval.every=0", "checkpoint.every=0", "log.plots=false",
        *case.overrides,
    ]  # fmt: skip
    recipe = case.recipe or str(make(root, case))
    words.insert(0, f"recipe={recipe}")
    grpo("train", *words)
    stored = json.loads((root / "run" / "plan.json").read_text(encoding="utf-8"))
    return words, stored["measured"]


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
    recipe, absent = make_recipe(job)
    assert not absent
    recipe["defaults"].insert(1, {"adapter": "none"})
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return root / "recipe.yaml"


def error(predicted: float, measured: float) -> float:
    """Returns by how much a prediction is above the measurement, as a share of it."""
    return predicted / measured - 1


def percent(share: float, bound: float) -> str:
    """Returns an error in percent; bold where it is beyond the bound."""
    text = f"{100 * share:+.0f} %"
    return text if abs(share) <= bound else f"**{text}**"


def row(name: str, found: Mapping[str, Any]) -> str:
    """Returns a case's line of the first table."""
    p, m = found["predicted"], found["times"]
    peak = found["memory"]["peak"]
    cells = [
        name,
        f"{p['parameters'] / 1e6:.3g} M",
        f"{m['completion_tokens']:.3g}",
        f"{p['peak'] / 1e6:,.0f} MB",
        f"{peak / 1e6:,.0f} MB",
        percent(error(p["peak"], peak), MEMORY_BOUND),
        f"{m['peak'] / 1e6:,.0f} MB",
        f"{p['step_seconds']:.3g} s",
        f"{m['step_seconds']:.3g} s",
        percent(error(p["step_seconds"], m["step_seconds"]), TIME_BOUND),
    ]
    return f"| {' | '.join(cells)} |"


def tables(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns both tables as Markdown: of the step, and the errors by stage."""
    header = [
        "configuration", "parameters", "mean length", "predicted peak", "measured", "error",
        "resident", "predicted step", "measured", "error",
    ]  # fmt: skip
    lines = [f"| {' | '.join(header)} |", "| --- " * len(header) + "|"]
    lines += [row(name, found) for name, found in results.items()]
    stages = ("generate", "ref_logprobs", "forward_backward", "optimizer")
    header = [f"{what}: {stage}" for what in ("memory", "time") for stage in stages]
    lines += ["", f"| configuration | {' | '.join(header)} |", "| --- " * (len(header) + 1) + "|"]
    for name, found in results.items():
        cells = [
            by_stage(found, what, stage, bound)
            for what, bound in (("memory", MEMORY_BOUND), ("time", TIME_BOUND))
            for stage in stages
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def by_stage(found: Mapping[str, Any], what: str, stage: str, bound: float) -> str:
    """Returns the error of a stage, with its share of the step's time in brackets."""
    own = found["memory" if what == "memory" else "times"]
    p, m = found["predicted"][what].get(stage, 0.0), own[what].get(stage, 0.0)
    if not (p and m):
        return ""
    share = f" ({100 * m / own['step_seconds']:.0f} %)" if what == "time" else ""
    return percent(error(p, m), bound) + share


if __name__ == "__main__":
    main()
