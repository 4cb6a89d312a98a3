"""Compares the plan of runs with what they measure on this machine: peak memory and time of a step.

    python scripts/check_plan.py [CASE ...]

Each case trains a random model for a few steps and reads its plan.json: the prediction is for the
mean length of the completions and the share of groups with a gradient that the run had. One thread
computes, and freed memory goes back to the system at once, so that resident memory is memory in
use. Let nothing else run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import GIVES_BACK, machine

MEMORY_BOUND, TIME_BOUND = 0.15, 0.25  # beyond these an error is printed in bold
BUILT = "recipe=gsm8k_tiny model.build.warmup_steps=0 prompts_per_step=4"
SMALL = f"{BUILT} model.build.hidden_size=384 model.build.num_layers=6"
LARGE = f"{BUILT} model.build.hidden_size=768 model.build.num_layers=16"
CASES = {  # words of `grpo train`
    "arithmetic_tiny, as shipped": "recipe=arithmetic_tiny steps=8",
    "gsm8k_tiny, as shipped": "recipe=gsm8k_tiny",
    "6M": SMALL,
    "6M, reference": f"{SMALL} loss.beta=0.04",
    "50M": LARGE,
    "50M, LoRA": f"{LARGE} adapter=lora adapter.rank=16",
    "50M, checkpointing": f"{LARGE} model.gradient_checkpointing=true",
}
ALWAYS = "steps=3 device=cpu dataset.eval=null eval.every=0 checkpoint.every=0 log.report=false"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare plans with runs on this machine.")
    parser.add_argument("cases", nargs="*", help="names of cases; none: all")
    given = parser.parse_args()
    print(machine(), flush=True)
    header = ["configuration", "parameters", "mean length"]
    header += [f"{side} {what}" for what in ("peak", "step") for side in ("predicted", "measured")]
    print(f"| {' | '.join(header)} |\n" + "| --- " * len(header) + "|", flush=True)
    variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **GIVES_BACK}
    for name in given.cases or CASES:
        with tempfile.TemporaryDirectory(prefix="grpo-plan-") as folder:
            words = [*ALWAYS.split(), *CASES[name].split(), f"output_dir={folder}/run"]
            command = [sys.executable, "-m", "grpo_cli.cli", "train", *words]
            environment = {**os.environ, **variables}
            subprocess.run(command, env=environment, stdout=sys.stderr, check=True)
            found = json.loads((Path(folder) / "run" / "plan.json").read_text(encoding="utf-8"))
        print(row(name, found), flush=True)


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
