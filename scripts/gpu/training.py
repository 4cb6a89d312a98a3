"""Stages demo and resume: trains on the GPU, and repeats the second half from a checkpoint."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from cases import Case, Figures, Setting

TINY = (  # of the dry run
    "prompts_per_step=2 dataset.train_limit=20 dataset.eval_limit=2 model.build.warmup_steps=0 "
    "model.build.hidden_size=32 generation.num_generations=2 generation.max_completion_tokens=4"
)


def cases(setting: Setting) -> list[Case]:
    precision = "no" if setting.dry else "bf16"
    return [
        Case("demo", f"grpo train device={setting.device} mixed_precision={precision}",
             lambda: demo(setting, precision)),
        Case("resume", "the second half of the demo again", lambda: resume(setting)),
    ]  # fmt: skip


def demo(setting: Setting, precision: str) -> Figures:
    """Trains the demo's recipe; returns the held-out accuracy before and after."""
    steps = 2 if setting.dry else 60
    folder = setting.scratch / "demo"
    given = f"recipe=arithmetic_tiny device={setting.device} mixed_precision={precision} "
    given += f"steps={steps} checkpoint.every={steps // 2} eval.every={steps} log.plots=false "
    given += "log.report=false " + (TINY if setting.dry else "")
    train(setting, folder, given.split())
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    last = json.loads(lines[-1])
    return {
        "steps": steps,
        "accuracy before": summary["before"]["accuracy"],
        "after": summary["after"]["accuracy"],
        "seconds": summary["seconds"],
        "s a step": last["step_time"],
        "tokens/s": last["tokens_per_second"],
    }


def resume(setting: Setting) -> Figures:
    """Resumes the demo from its middle; returns how far its last weights are from the first ones.

    On the CPU they are equal to the last bit; kernels of a GPU may add in another order.
    """
    from safetensors.torch import load_file

    first, second = setting.scratch / "demo", setting.scratch / "resumed"
    steps = 2 if setting.dry else 60
    last = f"checkpoints/step-{steps}"
    if not (first / last).exists():
        return {"status": "failed", "error": f"the demo has left no {last}"}
    shutil.copytree(first, second, symlinks=True)
    shutil.rmtree(second / last)
    command = json.loads((setting.scratch / "demo.json").read_text(encoding="utf-8"))
    train(setting, second, [*command, f"resume={second / 'checkpoints' / f'step-{steps // 2}'}"])
    one, other = (load_file(f / last / "model.safetensors") for f in (first, second))
    apart = max((one[name].double() - other[name].double()).abs().max().item() for name in one)
    largest = max(weight.double().abs().max().item() for weight in one.values())
    is_right = apart == 0 if setting.dry else apart < 0.02 * largest
    return {"largest difference": apart, "equal bits": apart == 0} | (
        {} if is_right else {"status": "wrong", "error": "the resumed run ends elsewhere"}
    )


def train(setting: Setting, folder: Path, given: list[str]) -> None:
    """Runs `grpo train`.

    Raises:
        RuntimeError: it fails.
    """
    kept = [word for word in given if not word.startswith("resume=")]
    (setting.scratch / "demo.json").write_text(json.dumps(kept), encoding="utf-8")
    command = [sys.executable, "-m", "grpo_cli", "train", *given, f"output_dir={folder}"]
    code, printed = setting.run_program(command)
    if code:
        words = printed.strip().splitlines()
        raise RuntimeError(words[-1] if words else f"grpo train ended with {code}")
