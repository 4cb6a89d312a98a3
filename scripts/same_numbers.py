"""Compares the numbers of two commits: `python scripts/same_numbers.py BASE [--runs dapo,real]`.

BASE is unpacked beside the work tree. Both train the same runs on this machine, each on one
thread, with micro-batches and oneDNN's instruction set fixed. The weights (by their hash) and the
metrics that `COMPARED` names have to be equal to the last digit. BASE's own copy of this script,
where it has one, says how a run is written there: a knob may have another name.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import real_model

ROOT = Path(__file__).resolve().parent.parent
# Prefixes of the keys of metrics.jsonl that are compared.
COMPARED = (
    "loss", "reward", "rewards/", "frac_", "completions/", "num_tokens", "entropy", "kl", "grad_",
    "clip_ratio/", "sampling/", "learning_rate", "eval/", "tools/", "episode",
)  # fmt: skip
GONE = ("episode/stop/episode_seconds",)  # metrics that a commit has removed on purpose
MOST_SECONDS = 3600  # of one run
EVALUATED: tuple[str, ...] = ("accuracy", "interval", "mean_length", "clipped_ratio", "no_answer")
EVALUATED += ("turns", "unscored", "rows")
SAME = ["device=cpu", "steps=5", "eval.every=5", "checkpoint.every=5", "overwrite=true"]
SUMS = ["recipe=arithmetic_tiny", "prompts_per_step=16", "update.tokens_per_micro_batch=256"]
SUMS += ["update.minibatches=2", "dataset.eval_limit=32"]
CHAT = ["recipe=chat_sums", f"model.path={real_model.folder()}", "steps=2", "eval.every=2"]
CHAT += ["checkpoint.every=2", "prompts_per_step=2", "generation.num_generations=4"]
CHAT += ["generation.max_completion_tokens=16", "dataset.eval_limit=4"]
PROBLEMS = ["benchmark=gsm8k", "mode=cot,tir", "limit=4", "device=cpu"]
PROBLEMS += ["benchmark.gsm8k.data=pkg://grpo_cli/samples/benchmarks/gsm8k.jsonl"]
KL = ["loss.beta=0.04", "loss.reference_every=2"]


def runs() -> dict[str, list[str]]:
    """Returns the words of each run by its name."""
    found: dict[str, list[str]] = {}
    for group, prefix in (("loss", ""), ("advantage", "rule ")):
        for path in sorted((ROOT / "recipes" / group).glob("*.yaml")):
            found[prefix + path.stem] = [*SUMS, f"{group}={path.stem}"]
    return found | {
        "moving reference": [*SUMS, *KL],
        "dynamic sampling": [*SUMS, "generation.dynamic_sampling=true"],
        "resume": SUMS,
        "fsdp2": [*SUMS, "distributed=fsdp2"],
        "lora": ["recipe=arithmetic_tiny_lora", *SUMS[1:]],
        "dora": ["recipe=arithmetic_tiny_lora", "adapter=dora", *SUMS[1:]],
        "qlora": ["recipe=arithmetic_tiny_lora", "adapter=qlora", *SUMS[1:]],
        "vision": ["recipe=shapes_tiny", "prompts_per_step=8", "dataset.eval_limit=16"],
        "calculator": ["recipe=calculator", "prompts_per_step=8", "dataset.eval_limit=16"],
        "guess_number": ["recipe=guess_number", "prompts_per_step=8", "dataset.eval_limit=16"],
        "tir": ["recipe=gsm8k_tiny", "prompts_per_step=8", "dataset.eval_limit=8"],
        "real": CHAT,
        "real bf16": [*CHAT, "mixed_precision=bf16"],
    }


def runs_of(tree: Path) -> dict[str, list[str]]:
    """Returns the runs in the words of a tree."""
    script = tree / "scripts" / "same_numbers.py"
    return runpy.run_path(str(script))["runs"]() if script.exists() else runs()


def train(tree: Path, name: str, words: Sequence[str], folder: Path) -> None:
    """Trains a run with the code of `tree`."""
    program = ["-m", "grpo_cli.cli"]
    if "bf16" in name:
        program = [str(ROOT / "scripts" / "half_products.py"), *program]
    if name == "fsdp2":
        program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *program]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    environment |= {"ONEDNN_MAX_CPU_ISA": "AVX2", "HF_HUB_OFFLINE": "1"}
    given = [*SAME, *words, f"output_dir={folder}"]
    parts = [["train", *given]]
    if name == "resume":
        parts.insert(0, ["train", *given, "steps=3", "checkpoint.every=3"])
        parts[1] += ["overwrite=false", "resume=auto"]
    if name == "tir":
        parts.append(["eval", str(folder), *PROBLEMS])
    how: dict[str, Any] = {"cwd": tree, "env": environment, "capture_output": True, "text": True}
    for part in parts:
        done = subprocess.run([sys.executable, *program, *part], timeout=MOST_SECONDS, **how)
        if done.returncode:
            raise SystemExit(f"{name}, {tree}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def numbers(folder: Path) -> dict[str, Any]:
    """Returns the compared numbers of a run: hashes of weights by file, metrics by step and key."""
    *_, last = sorted((folder / "checkpoints").glob("step-*"), key=lambda p: int(p.name[5:]))
    weights = sorted(last.glob("*.safetensors"))
    found: dict[str, Any] = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in weights}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        step = json.loads(line)
        compared = {k: v for k, v in step.items() if k.startswith(COMPARED) and k not in GONE}
        found |= {f"step {step['step']}: {key}": value for key, value in compared.items()}
    for path in folder.glob("eval/**/eval.json"):
        found |= flat(json.loads(path.read_text(encoding="utf-8")))
    return found


def flat(value: Any, key: str = "eval") -> dict[str, Any]:
    """Returns the numbers in nested results whose keys are compared."""
    if isinstance(value, dict):
        return {k: v for name in value for k, v in flat(value[name], f"{key}.{name}").items()}
    is_compared = key.rpartition(".")[2].startswith(EVALUATED)
    return {key: value} if is_compared else {}


def compare(name: str, base: Path, scratch: Path) -> bool:
    """Trains a run with both trees and prints what differs."""
    sides = []
    for side, tree in (("base", base), ("here", ROOT)):
        words = runs_of(tree)[name]
        folder = scratch / f"{name.replace(' ', '-')}-{side}"
        train(tree, name, words, folder)
        sides.append(numbers(folder))
        shutil.rmtree(folder)
    before, after = sides
    differing = [k for k in before.keys() | after.keys() if before.get(k) != after.get(k)]
    print(f"{name:18} {'NOT EQUAL' if differing else 'equal'}: {len(before)} numbers", flush=True)
    for key in sorted(differing)[:8]:
        print(f"    {key}: {before.get(key)} -> {after.get(key)}", flush=True)
    return not differing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="commit to compare the work tree with")
    parser.add_argument("--runs", help=f"some of: {', '.join(runs())}")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    given = parser.parse_args()
    chosen = given.runs.split(",") if given.runs else list(runs())
    with tempfile.TemporaryDirectory(prefix="same-numbers-") as scratch:
        base = Path(scratch) / "base"
        content = subprocess.check_output(["git", "-C", str(ROOT), "archive", given.base])
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extractall(base, filter="data")
        with ThreadPoolExecutor(given.jobs) as pool:
            equal = list(pool.map(lambda name: compare(name, base, Path(scratch)), chosen))
    print(f"{sum(equal)} of {len(equal)} runs equal")
    return int(not all(equal))


if __name__ == "__main__":
    sys.exit(main())
