"""Stages tests, demo, speed and resume: pytest, a run, the benchmark, and the run's second half."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import sys
from functools import partial
from pathlib import Path

from check import ROOT, Cases, Figures, Setting

MARK = "@pytest.mark.gpu"
TINY = (  # of the dry run
    "prompts_per_step=2 dataset.train_limit=20 dataset.eval_limit=2 model.build.warmup_steps=0 "
    "model.build.hidden_size=32 generation.num_generations=2 generation.max_completion_tokens=4"
)


def cases(stage: str, setting: Setting) -> Cases:
    """Returns the cases of a stage."""
    name, run = {
        "tests": ("pytest -m gpu", run_tests),
        "demo": ("grpo train mixed_precision=bf16", demo),
        "speed": ("tail, beside model.generate", speed),
        "resume": ("the second half of the demo again", resume),
    }[stage]
    return {name: partial(run, setting)}


def run_tests(setting: Setting) -> Figures:
    """Runs the tests marked `gpu`, or only collects them; returns pytest's counts."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))  # to import all of them would take long
    files = [str(path) for path in found if MARK in path.read_text(encoding="utf-8")]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", *files]
    command += ["--collect-only"] if setting.dry else ["--durations=5", "--tb=short"]
    printed = setting.run_program(command)
    counts = re.findall(r"(\d+)[/ ]?\d* (passed|skipped|tests collected)", printed)
    return {what: int(count) for count, what in counts}


def words(setting: Setting) -> list[str]:
    """Returns the words of `grpo train` for the demo's recipe."""
    steps = 2 if setting.dry else 60
    given = f"recipe=arithmetic_tiny device={setting.device} steps={steps} "
    given += f"mixed_precision={'no' if setting.dry else 'bf16'} checkpoint.every={steps // 2} "
    given += f"eval.every={steps} log.report=false {TINY if setting.dry else ''}"
    return given.split()


def train(setting: Setting, folder: Path, given: list[str]) -> None:
    """Runs `grpo train`."""
    setting.run_program([sys.executable, "-m", "grpo_cli", "train", *given, f"output_dir={folder}"])


def demo(setting: Setting) -> Figures:
    """Trains the demo's recipe; returns the held-out accuracy before and after."""
    folder = setting.scratch / "demo"
    train(setting, folder, words(setting))
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    last = json.loads((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return {
        "steps": last["step"], "accuracy before": summary["before"]["accuracy"],
        "after": summary["after"]["accuracy"], "seconds": summary["seconds"],
        "s a step": last["step_time"], "tokens/s": last["tokens_per_second"],
    }  # fmt: skip


def speed(setting: Setting) -> Figures:
    """Returns the medians of a workload of scripts/bench.py, in bfloat16."""
    workload = "tail"
    path = setting.scratch / "bench.json"
    command = [sys.executable, "scripts/bench.py", f"--workloads={workload}", f"--json={path}"]
    command += ["--sides=ours,generate", "--rounds=1", "--steps=1"]
    size = ["--model=1m", "--limit=8"] if setting.dry else ["--model=0.5b", "--bf16"]
    setting.run_program([*command, *size])
    found = json.loads(path.read_text(encoding="utf-8"))[workload]
    figures: Figures = {}
    for side, (steps,) in found["timed"].items():
        for name in steps[0]["seconds"]:
            figures[f"{side}: {name} s"] = statistics.median(s["seconds"][name] for s in steps)
        figures[f"{side}: tokens"] = statistics.mean(s["tokens"] for s in steps)
    ((metered,),) = found["metered"]["ours"]
    return figures | {"update GiB above weights": metered["memory"] / 2**30}


def resume(setting: Setting) -> Figures:
    """Resumes the demo from its middle; returns how far its last weights are from the first ones.

    On the CPU they are equal to the last bit; kernels of a GPU may add in another order.
    """
    from safetensors.torch import load_file

    first, second = setting.scratch / "demo", setting.scratch / "resumed"
    middle, last = sorted((first / "checkpoints").glob("step-*"), key=lambda f: int(f.name[5:]))
    shutil.copytree(first, second, symlinks=True)
    shutil.rmtree(second / "checkpoints" / last.name)
    start = second / "checkpoints" / middle.name
    train(setting, second, [*words(setting), f"resume={start}"])
    resumed = second / "checkpoints" / last.name
    one, other = (load_file(f / "model.safetensors") for f in (last, resumed))
    apart = max((one[name].double() - other[name].double()).abs().max().item() for name in one)
    largest = max(weight.double().abs().max().item() for weight in one.values())
    is_right = apart == 0 if setting.dry else apart < 0.02 * largest
    figures: Figures = {"largest difference": apart, "equal bits": apart == 0}
    wrong = {"status": "wrong", "error": "the resumed run ends elsewhere"}
    return figures if is_right else figures | wrong
