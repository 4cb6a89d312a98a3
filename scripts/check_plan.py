"""Compares `grpo plan` with runs on this machine: peak memory and time of a step, by stage.

    python scripts/check_plan.py [CASE ...] [--json FILE]
    python scripts/check_plan.py --table FILE ...     prints the tables of stored results

Each case trains a random model for a few steps in a process of its own, and reads what the run has
measured from its plan.json. Then `grpo plan` predicts the same recipe in another process, with the
mean length of the completions and the share of groups with a gradient that were measured, which
nobody knows before. Both processes have one thread and count its processor time in place of wall
time, so that other programs on the machine change little. docs/plan.md has the tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
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
    "110M, LoRA": Case("110m", LARGE, LORA, steps=2),
    "110M, checkpointing": Case("110m", LARGE, ("model.gradient_checkpointing=true",), steps=2),
    "150M": Case("150m", LARGE, steps=2),
}


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        time.perf_counter = time.process_time
        from grpo_cli.cli import run_command  # whose clocks take the one that is there now

        sys.exit(run_command(sys.argv[2:]))
    parser = argparse.ArgumentParser(description="Compare grpo plan with runs on this machine.")
    parser.add_argument("cases", nargs="*", help="names of cases; none: all")
    parser.add_argument("--json", type=Path, help="file to which a line for each case is added")
    parser.add_argument("--table", nargs="+", type=Path, help="files whose results are printed")
    args = parser.parse_args()
    if args.table:
        lines = [line for path in args.table for line in path.read_text("utf-8").splitlines()]
        found = {name: result for line in lines for name, result in json.loads(line).items()}
        print(tables({name: found[name] for name in CASES if name in found}))
        return
    print(machine(), flush=True)
    results: dict[str, dict[str, Any]] = {}
    for name in args.cases or CASES:
        say(name)
        with tempfile.TemporaryDirectory(prefix="grpo-plan-") as root:
            results[name] = compare(Path(root), CASES[name])
        if args.json:
            with args.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps({name: results[name]}) + "\n")
        say(row(name, results[name]))
    print(tables(results))


def compare(root: Path, case: Case) -> dict[str, Any]:
    """Returns what is predicted and measured of a case."""
    words = [
        f"output_dir={root / 'run'}", f"steps={case.steps}", "eval.at_start=false",
        "eval.at_end=false", "eval.every=0", "checkpoint.every=0", "log.plots=false",
        *case.overrides,
    ]  # fmt: skip
    if case.recipe:
        words.insert(0, f"recipe={case.recipe}")
    else:
        words.insert(0, f"recipe={make(root, case)}")
    call("train", *words)
    stored = json.loads((root / "run" / "plan.json").read_text(encoding="utf-8"))
    measured = stored["measured"]
    # Once more, with a malloc that gives freed memory back at once: then resident memory is memory
    # in use. It makes a step slower, so that times are those of the first run.
    call("train", *words, "overwrite=true", environment=GIVES_BACK)
    again = json.loads((root / "run" / "plan.json").read_text(encoding="utf-8"))["measured"]
    measured |= {"resident": measured["peak"], "peak": again["peak"], "memory": again["memory"]}
    known = (
        f"mean_tokens={measured['completion_tokens']}",
        f"signal={min(max(measured['signal'], 0.01), 1.0)}",
    )
    predicted = json.loads(call("plan", *words, *known, "--json"))
    return {"predicted": predicted, "measured": measured, "assumed": stored["predicted_at_mean"]}


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


def call(*words: str, environment: Mapping[str, str] | None = None) -> str:
    """Runs a command of grpo and returns what it prints."""
    scripts = Path(bench_setup.__file__).parent
    paths = os.pathsep.join([str(scripts), str(scripts.parent)])
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **variables, **(environment or {})}
    command = [sys.executable, __file__, "--one", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return done.stdout


def error(predicted: float, measured: float) -> float:
    """Returns by how much a prediction is above the measurement, as a share of it."""
    return predicted / measured - 1


def percent(share: float, bound: float) -> str:
    """Returns an error in percent; bold where it is beyond the bound."""
    text = f"{100 * share:+.0f} %"
    return text if abs(share) <= bound else f"**{text}**"


def row(name: str, found: Mapping[str, Any]) -> str:
    """Returns a case's line of the first table."""
    p, m = found["predicted"], found["measured"]
    cells = [
        name,
        f"{p['parameters'] / 1e6:.3g} M",
        f"{m['completion_tokens']:.3g}",
        f"{p['peak'] / 1e6:,.0f} MB",
        f"{m['peak'] / 1e6:,.0f} MB",
        percent(error(p["peak"], m["peak"]), MEMORY_BOUND),
        f"{m['resident'] / 1e6:,.0f} MB",
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
    p, m = (found[side][what].get(stage, 0.0) for side in ("predicted", "measured"))
    if not (p and m):
        return ""
    share = ""
    if what == "time":
        share = f" ({100 * m / found['measured']['step_seconds']:.0f} %)"
    return percent(error(p, m), bound) + share


if __name__ == "__main__":
    main()
