"""`grpo replay RUN --step=N`: recomputes a step that a run has kept, and compares its metrics.

A mistake on the command line is found before torch is imported.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.checkpoints import paths, provenance
from grpo_cli.config.knob import knob
from grpo_cli.config.user_code import off_import_path
from grpo_cli.config.words import described, parse_with_runs
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.files import read_yaml
from grpo_cli.reporting.run_folder import RunFolder

USAGE = """\
grpo replay RUN --step=N [--json]

Recomputes loss and gradient of a step that a run has kept (log.keep_steps) from
its stored completions, and compares the metrics of the update with the recorded
ones. Ends with exit code 1 if the loss or the norm of the gradient differ.

  RUN                      Folder of a run.
"""
# Metrics that are compared with the recorded ones. If the first two differ, the step was not
# reproduced.
COMPARED = ("loss", "grad_norm", "policy_loss", "kl", "entropy", "aux_loss")
DECISIVE = COMPARED[:2]
NOT_READ = (  # sections of the recipe, since the rollouts are stored with their rewards
    "defaults", "dataset", "reward", "benchmark", "scoring", "eval", "stop", "checkpoint",
    "log", "tracking", "callbacks", "hub",
)  # fmt: skip


@dataclass
class ReplayOptions:
    """The options of `grpo replay`."""

    step: int | None = knob(None, "Step of the run, counted from 1, which it has kept.", ge=1)
    tolerance: float = knob(
        1e-6,
        "Largest difference to the recorded loss and gradient norm; relative to them if above 1.",
        gt=0,
    )
    device: str | None = knob(
        None, "Device to compute on; null: that of the run.", choices=("auto", "cpu", "cuda", "mps")
    )
    json: bool = knob(False, "Print one JSON object.")
    trust: bool = knob(
        False, "Trust the run's recipe completely, even if someone else made it. It can run code."
    )


HELP = USAGE + described(ReplayOptions, dashes=True)


def main(argv: list[str]) -> None:
    """Checks the command line, recomputes the step and prints it.

    Raises:
        UserError: a mistake on the command line; the step was not kept.
        TrainingError: loss or gradient are not the recorded ones.
    """
    (given,), settings = parse_with_runs(ReplayOptions, argv, "grpo replay")
    run = RunFolder.open(given)
    number, recorded = find(run, settings)
    kept = paths.kept_path(run.path, number)
    trust = settings.trust or provenance.is_own(kept)
    if not trust:
        check_recipe(kept)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("grpo replay: runs in one process; start it without torchrun.")
    from grpo_cli.training import kept_steps

    with off_import_path(not trust):
        again = kept_steps.recompute(run.path, kept, settings.device, trust)
    checks, device = compared(recorded, again.metrics, settings.tolerance), again.device
    if settings.json:
        data = {"run": str(run.path), "step": number, "device": device}
        print(json.dumps(data | {"processes": again.processes, "checks": checks}))
    else:
        print(f"{run.path}, step {number}, on {device}", *map(line_of, checks), sep="\n")
    wrong = [c for c in checks if not c["agrees"] and c["name"] in DECISIVE]
    if wrong:
        raise TrainingError(
            f"step {number} of {run.path}: not recomputed to {settings.tolerance:g}: "
            f"{'; '.join(map(line_of, wrong))}; another device, other versions of torch and "
            "another number of threads or processes round differently (--tolerance), and dropout "
            "of several processes cannot be drawn again in one."
        )


def find(run: RunFolder, settings: ReplayOptions) -> tuple[int, Mapping[str, Any]]:
    """Returns the step to recompute and its line of metrics.jsonl.

    Raises:
        UserError: no step is given, or the step was not kept or is not complete yet.
    """
    kept = paths.steps_kept(run.path)
    there = f"it has kept the steps {', '.join(map(str, kept))}" if kept else "it has kept none"
    if settings.step is None:
        raise UserError(f"--step: is missing; {run.path}: {there} (log.keep_steps).")
    if settings.step not in kept:
        raise UserError(
            f"--step = {settings.step}: {run.path} has not kept what is needed of this step; "
            f"{there}. A run keeps the steps that log.keep_steps=[{settings.step}] names."
        )
    lines = [line for line in run.metrics() if line.get("step") == settings.step]
    if not lines:
        raise UserError(
            f"--step = {settings.step}: {run.path / 'metrics.jsonl'} has no line of this step yet."
        )
    return settings.step, lines[-1]


def check_recipe(path: Path) -> None:
    """Raises a UserError if another user's kept step has a recipe with untrusted settings."""
    stored = read_yaml(path / provenance.RECIPE)
    provenance.check(path, provenance.unusual(stored), "--trust")
    read = {section: value for section, value in stored.items() if section not in NOT_READ}
    provenance.check(path, provenance.refused(read, path), "--trust")


def compared(
    recorded: Mapping[str, Any], recomputed: Mapping[str, float], tolerance: float
) -> list[dict[str, Any]]:
    """Returns the recorded and the recomputed metrics of an update, and whether they agree.

    Args:
        tolerance: largest difference; relative to the recorded value if that is above 1.

    A value that is not finite, or was not measured, is None.
    """
    out = []
    for name in COMPARED:
        if name in recorded or name in recomputed:
            before, now = (
                value if value is not None and math.isfinite(value) else None
                for value in (recorded.get(name), recomputed.get(name))
            )
            agrees = before == now  # also if neither is finite, as with overflows of float16
            if before is not None and now is not None:
                agrees = abs(now - before) <= tolerance * max(1.0, abs(before))
            out.append({"name": name, "recorded": before, "recomputed": now, "agrees": agrees})
    return out


def line_of(check: Mapping[str, Any]) -> str:
    """Returns a compared metric as text."""
    verb = "equals" if check["agrees"] else "differs from"
    now, before = check["recomputed"], check["recorded"]
    if None in (now, before):
        return f"{check['name']}: {now} {verb} the recorded {before}"
    apart = f"{abs(now - before):.1e}"
    return f"{check['name']}: {now:.9g} {verb} the recorded {before:.9g} (apart by {apart})"
