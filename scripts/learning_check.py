"""Trains the tiny arithmetic recipe with every loss and every advantage rule, over several seeds.

python scripts/learning_check.py --seeds 0 1 2 --jobs 2 --out outputs/learning

Each run takes two optimizer steps a batch, so that ratios leave 1 and the losses differ. What ran
is kept in OUT and not run again; the table is printed as Markdown (docs/experiments.md has one).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

LONGER = {"rewarded steps": 2}  # by this factor: a token's own credit is a weaker signal at first


def variants() -> dict[str, list[str]]:
    """Overrides by the name in the table: each YAML of loss/ and advantage/, and rewarded steps."""
    out = {}
    for group in ("loss", "advantage"):
        for path in sorted((ROOT / "recipes" / group).glob("*.yaml")):
            out[f"{group}={path.stem}"] = [f"{group}={path.stem}"]
    out["rewarded steps"] = [
        "reward.exact_match.weight=0",  # measured, and no part of the reward
        "reward.digits.function=scripts.learning_check:digits",
    ]
    return out


def digits(completions: list[str], answer: list[str], **_: Any) -> list[list[tuple[int, float]]]:
    """1 at each digit that is right; 0 at a wrong one, a needless one, and one that is missing.

    A missing digit has to cost something, at the end: steps are normalised together, so where later
    ones are harder than the first, stopping after the first would be the best policy.
    """
    return [
        [
            (min(i, len(text) - 1), float(text[i : i + 1] == right[i : i + 1]))
            for i in range(max(len(text), len(right)) if text else 0)
        ]
        for text, right in zip(completions, map(str, answer), strict=True)
    ]


def words(name: str, seed: int, steps: int, folder: Path) -> list[str]:
    """Returns the words of `grpo train` for one run."""
    return [
        "recipe=arithmetic_tiny", "loss=dapo", *variants()[name], "update.minibatches=2",
        f"seed={seed}", f"steps={steps}", "eval.every=0", "checkpoint.every=0",
        "log.report=false", "log.completions_every=0", "overwrite=true", f"output_dir={folder}",
    ]  # fmt: skip


def run(name: str, seed: int, steps: int, out: Path) -> dict[str, float]:
    """Trains in a process of its own, unless the run is there; returns its `result`."""
    folder = out / f"{name.replace('=', '-').replace(' ', '-')}-seed{seed}"
    if not (folder / "summary.json").exists():
        command = [sys.executable, "-m", "grpo_cli", "train", *words(name, seed, steps, folder)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}, seed {seed}: {done.stderr}")
    return result(folder)


def result(folder: Path) -> dict[str, float]:
    """Returns the accuracy on the held-out sums before and after a run."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return {"before": summary["before"]["accuracy"], "after": summary["after"]["accuracy"]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Does every loss and every advantage rule learn?")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "learning")
    given = parser.parse_args()
    jobs = [(name, seed) for seed in given.seeds for name in variants()]

    def job(name_and_seed: tuple[str, int]) -> dict[str, float]:
        name, seed = name_and_seed
        steps = given.steps * LONGER.get(name, 1)
        reached = run(name, seed, steps, given.out.resolve())
        print(f"{name} seed {seed}: {reached['before']:.3f} -> {reached['after']:.3f}", flush=True)
        return reached

    with ThreadPoolExecutor(given.jobs) as pool:
        found = dict(zip(jobs, pool.map(job, jobs), strict=True))
    print(f"\n| choice | before, mean | after: seeds {given.seeds} | gain, mean | gain, lowest |")
    print("| --- | --- | --- | --- | --- |")
    for name in variants():
        results = [found[name, seed] for seed in given.seeds]
        gains = [r["after"] - r["before"] for r in results]
        after = ", ".join(f"{r['after']:.3f}" for r in results)
        before = statistics.mean(r["before"] for r in results)
        print(
            f"| `{name}` | {before:.3f} | {after} | {statistics.mean(gains):+.3f} "
            f"| {min(gains):+.3f} |"
        )


if __name__ == "__main__":
    main()
