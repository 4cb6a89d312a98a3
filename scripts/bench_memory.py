"""Compares the peak memory of training on this machine with the planning arithmetic.

    python scripts/bench_memory.py [CASE ...]

Each case trains a random model for two steps in a process of its own. The measured peak is the
largest resident memory of that process in a stage of a step, above its resident memory before the
model is loaded. Checkpoints, which are copied to the host's memory, do not count. The predicted
peak comes from `planning.memory.memory`. docs/memory.md has figures.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from bench import environment, machine, say
from bench_probe import check_meter, peak_memory
from bench_setup import WORKLOADS, Job, make_folder, make_recipe
from omegaconf import DictConfig

# Loaded before the measurement begins, as far as a run needs them.
import grpo_cli.train
from grpo_cli.config import compose, parsing
from grpo_cli.planning.memory import memory
from grpo_cli.planning.settings import Cluster, Settings
from grpo_cli.planning.shapes import Shape
from grpo_cli.reporting import stage_clock
from grpo_cli.training import build, prepare

# Two micro-batches of 2 * (64 + 8 * 56) = 1,024 tokens, prompts counted once for their group. The
# gradients of the first are there in the second.
WORKLOAD = dataclasses.replace(
    WORKLOADS["short"], prompts=4, generations=8, prompt_tokens=(64, 64), limit=56, min_tokens=56
)
COMMON = ["update.tokens_per_micro_batch=1024", "update.skip_zero_advantage=false"]
CHECKPOINTED = "model.gradient_checkpointing=true"
BF16 = ["model.dtype=bfloat16", "mixed_precision=bf16"]
CASES: dict[str, tuple[str, list[str]]] = {  # model, overrides
    "110M, all weights, AdamW": ("110m", []),
    "110M, all weights, AdamW, checkpointing": ("110m", [CHECKPOINTED]),
    "110M, all weights, AdamW, half of the layers checkpointed": (
        "110m",
        [CHECKPOINTED, "model.checkpointed_layers=0.5"],
    ),
    "110M, all weights, SGD": ("110m", ["optimizer=sgd"]),
    "110M, all weights, 8-bit AdamW": ("110m", ["optimizer=adamw_8bit"]),
    "110M, LoRA rank 16": ("110m", ["adapter=lora"]),
    "110M, LoRA rank 64, checkpointing": (
        "110m",
        ["adapter=lora", "adapter.rank=64", CHECKPOINTED],
    ),
    "300M, all weights, AdamW, checkpointing": ("300m", [CHECKPOINTED]),
    "300M in bfloat16, LoRA rank 16": ("300m", ["adapter=lora", *BF16]),
    "300M in nf4, LoRA rank 16": ("300m", ["adapter=qlora", *BF16]),
}


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        one(Path(sys.argv[2]))
        return
    print(machine(), flush=True)
    print("| case | predicted | measured | measured / predicted |\n| --- | --- | --- | --- |")
    for name in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory(prefix="grpo-bench-") as root:
            found = run(Path(root), *CASES[name])
        predicted, measured = found["predicted"], found["measured"]
        ratio = measured / predicted
        row = f"| {name} | {predicted / 1e9:.2f} GB | {measured / 1e9:.2f} GB | {ratio:.2f} |"
        print(row, flush=True)
        say("  " + ", ".join(f"{part} {size / 1e9:.3f}" for part, size in found["parts"].items()))


def run(root: Path, model: str, overrides: list[str]) -> dict[str, Any]:
    """Returns the predicted and the measured peak of a case, in bytes."""
    workload = dataclasses.replace(WORKLOAD, model=model)
    make_folder(root / "folder", workload, steps=2)
    job = Job("ours", workload, str(root / "folder"), str(root), steps=2, bf16=False)
    recipe, absent = make_recipe(job)
    assert not absent
    recipe["defaults"].insert(1, {"adapter": "none"})
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    (root / "job.json").write_text(json.dumps([*COMMON, *overrides]), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, __file__, "--one", str(root)], env=environment(root, metered=True),
        capture_output=True,
        text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(
            f"ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
        )
    result: dict[str, Any] = json.loads((root / "result.json").read_text(encoding="utf-8"))
    return result


def one(root: Path) -> None:
    """Trains in this process, and writes the peaks."""
    overrides = json.loads((root / "job.json").read_text(encoding="utf-8"))
    cpu = torch.device("cpu")
    check_meter(cpu)
    result: dict[str, Any] = {}

    def task(cfg: DictConfig) -> None:
        recipe = parsing.parse(cfg, compose.given_keys(cfg))
        with peak_memory(cpu) as building:
            live = build.build(prepare.for_training(recipe), sys.argv)
        peaks = meter_stages(cpu)
        try:
            grpo_cli.train.train(live)
        finally:
            live.close()
        live.workers.close()
        shape = Shape.of(live.policy.config)
        found = memory(shape, Cluster(1, math.inf), Settings.of(recipe, prepacks=True))
        result.update(predicted=found.peak, parts=found.at_peak, measured=max(peaks) - building[0])

    given = [f"recipe={root / 'recipe.yaml'}", f"output_dir={root / 'run'}", *overrides]
    compose.compose_and_call(given, task)
    (root / "result.json").write_text(json.dumps(result), encoding="utf-8")


def meter_stages(device: torch.device) -> list[int]:
    """Returns a list that gets the peak memory of each stage of a step from now on."""
    timed: Callable[..., Any] = stage_clock.Clock.stage
    peaks: list[int] = []

    @contextlib.contextmanager
    def stage(this: stage_clock.Clock, name: str) -> Iterator[None]:
        with timed(this, name), peak_memory(device) as seen:
            yield
        peaks.append(seen[1])

    stage_clock.Clock.stage = stage  # type: ignore[assignment, method-assign]
    return peaks


if __name__ == "__main__":
    main()
