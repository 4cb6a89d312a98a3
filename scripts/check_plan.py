"""Compares the plan of runs on this machine with what they measure: peak memory and time by stage.

    python scripts/check_plan.py [CASE ...]

Each case trains a random model for a few steps and reads its plan.json: the prediction is for the
mean length of the completions and the share of groups with a gradient that the run had. Times are
seconds of the processor, of one thread, so that other programs on the machine change little. The
process gives freed memory back at once, so that resident memory is memory in use; that makes a step
a little slower. docs/plan.md has the table.
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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_setup
import yaml
from bench import GIVES_BACK, machine
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
    "10M, long": Case("small", LONG, steps=5),
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
    parser = argparse.ArgumentParser(description="Compare plans with runs on this machine.")
    parser.add_argument("cases", nargs="*", help="names of cases; none: all")
    parser.add_argument("--one", action="store_true", help="run one case in this process")
    args = parser.parse_args()
    if args.one:
        time.perf_counter = time.process_time
        with tempfile.TemporaryDirectory(prefix="grpo-plan-") as root:
            case = CASES[args.cases[0]]
            print(row(args.cases[0], trained(Path(root), case, case.steps)), flush=True)
        return
    print(machine(), flush=True)
    header = ["configuration", "parameters", "mean length"]
    header += [f"{side} {what}" for what in ("peak", "step") for side in ("predicted", "measured")]
    print(f"| {' | '.join(header)} |\n" + "| --- " * len(header) + "|", flush=True)
    scripts = Path(bench_setup.__file__).parent
    paths = os.pathsep.join([str(scripts), str(scripts.parent)])
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **GIVES_BACK}
    for name in args.cases or CASES:
        command = [sys.executable, __file__, name, "--one"]
        subprocess.run(command, env={**os.environ, **variables}, check=True)


def trained(root: Path, case: Case, steps: int) -> dict[str, Any]:
    """Trains a case; returns its plan.json."""
    words = [
        f"output_dir={root / 'run'}", f"steps={steps}", "eval.at_start=false", "device=cpu",
        "eval.at_end=false", "eval.every=0", "checkpoint.every=0", "log.plots=false",
        *case.overrides,
    ]  # fmt: skip
    recipe = case.recipe or str(make(root, case))
    words.insert(0, f"recipe={recipe}")
    grpo("train", *words)
    found: dict[str, Any] = json.loads((root / "run" / "plan.json").read_text(encoding="utf-8"))
    return found


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


def row(name: str, found: Mapping[str, Any]) -> str:
    """Returns a case's line of the table, the measured figure with the error of the predicted."""
    p, m = found["predicted"], found["measured"]

    def error(key: str, bound: float) -> str:
        share = p[key] / m[key] - 1
        text = f"{100 * share:+.0f} %"
        return text if abs(share) <= bound else f"**{text}**"

    cells = [
        name,
        f"{p['parameters'] / 1e6:.3g} M",
        f"{m['completion_tokens']:.3g}",
        f"{p['peak'] / 1e6:,.0f} MB",
        f"{m['peak'] / 1e6:,.0f} MB ({error('peak', MEMORY_BOUND)})",
        f"{p['step_seconds']:.3g} s",
        f"{m['step_seconds']:.3g} s ({error('step_seconds', TIME_BOUND)})",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
