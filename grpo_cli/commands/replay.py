"""`grpo replay RUN --step=N`: recomputes a step that a run has kept, and explains it.

`replayed_step.py` recomputes it. The two are apart because a mistake on the command line should
show before torch is imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from grpo_cli.checkpoints import paths, provenance
from grpo_cli.config.knob import knob
from grpo_cli.config.user_code import off_import_path
from grpo_cli.config.words import described, option, parse, split, without_dashes
from grpo_cli.errors import TrainingError, UserError, listed
from grpo_cli.reporting.run_folder import RunFolder

USAGE = """\
grpo replay RUN --step=N [--row=I] [--sample=J] [--iteration=K] [--json]

Recomputes loss and gradient of a step that a run has kept (log.keep_steps), checks that they are
the recorded ones, and explains each completion: reward, advantage and baseline, ratio, clipped
tokens, KL, and its share of the gradient. Ends with exit code 1 if the loss or the norm of the
gradient differ from the recorded ones.

  RUN                      Folder of a run.
"""


NOT_READ = (  # sections of the recipe, since the rollouts are stored with their rewards
    "defaults", "dataset", "reward", "benchmark", "scoring", "eval", "stop", "alarms", "checkpoint",
    "log", "tracking", "callbacks", "hub",
)  # fmt: skip


@dataclass
class Settings:
    """The options of `grpo replay`."""

    step: int | None = knob(None, "Step of the run, counted from 1, which it has kept.", ge=1)
    row: int | None = knob(
        None,
        "Row of the data set, from 0, whose completions to print token by token; the others are "
        "taken together.",
        ge=0,
    )
    sample: int | None = knob(
        None, "Completion of the row to print, from 0; null: all of them.", ge=0
    )
    iteration: int = knob(
        1, "Pass over the step's rollouts (update.num_iterations) to print, from 1.", ge=1
    )
    tolerance: float = knob(
        1e-6,
        "Largest difference to the recorded loss and gradient norm; relative to them if above 1.",
        gt=0,
    )
    device: str | None = knob(
        None,
        "Device to compute on; null: that of the run.",
        choices=("auto", "cpu", "cuda", "mps"),
    )
    json: bool = knob(False, "Print everything as one JSON object, with all iterations.")
    trust: bool = knob(
        False, "Obey all that the run's recipe says, though another user has made the run."
    )


def main(argv: list[str]) -> None:
    """Checks the command line, recomputes the step and prints it.

    Raises:
        UserError: a mistake on the command line; the step was not kept.
        TrainingError: loss or gradient are not the recorded ones.
    """
    if not argv or {"-h", "--help"} & {*argv}:
        print(USAGE + described(Settings, dashes=True), end="")
        return
    own, rest = split(Settings, without_dashes(Settings, argv, "grpo replay"))
    settings = parse(Settings, own, option)
    if len(rest) != 1:
        raise UserError(
            f"grpo replay: give one run, such as outputs/NAME; got {' '.join(rest) or 'nothing'}."
        )
    run = RunFolder.open(rest[0])
    number, recorded = find(run, settings)
    kept = paths.kept_path(run.path, number)
    trust = settings.trust or provenance.is_own(kept)
    if not trust:
        check_recipe(kept)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("grpo replay: runs in one process; start it without torchrun.")
    from grpo_cli.commands import replayed_step
    from grpo_cli.records import Group
    from grpo_cli.training.replay import results

    def is_chosen(group: Group, sample: int) -> bool:
        return group.prompt.row == settings.row and settings.sample in (None, sample)

    chosen = None if settings.row is None else is_chosen
    with off_import_path(not trust):
        found = replayed_step.replay(run.path, number, chosen, settings.device, trust)
    checks = results.compared(recorded, found.metrics, settings.tolerance)
    data = {"run": str(run.path), **results.as_data(found, checks)}
    if settings.json:
        print(json.dumps(data, ensure_ascii=False))
    else:
        show(data, settings)
    wrong = [c for c in checks if not c["agrees"] and c["name"] in results.DECISIVE]
    if wrong:
        raise TrainingError(disagreement(data, wrong, settings.tolerance))


def find(run: RunFolder, settings: Settings) -> tuple[int, Mapping[str, Any]]:
    """Returns the step to recompute and its line of metrics.jsonl.

    Raises:
        UserError: no step is given, it was not kept, or it is not complete yet.
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
    if settings.sample is not None and settings.row is None:
        raise UserError("--sample: is only read with --row.")
    lines = [line for line in run.metrics() if line.get("step") == settings.step]
    if not lines:
        raise UserError(
            f"--step = {settings.step}: {run.path / 'metrics.jsonl'} has no line of this step yet."
        )
    return settings.step, lines[-1]


def check_recipe(path: Path) -> None:
    """Raises a UserError if the recipe of another user's kept step asks for more than is obeyed."""
    stored = provenance.read(path)
    provenance.check(path, provenance.unusual(stored), "--trust")
    read = {section: value for section, value in stored.items() if section not in NOT_READ}
    provenance.check(path, provenance.refused(read, path), "--trust")


def show(data: Mapping[str, Any], settings: Settings) -> None:
    """Prints a recomputed step.

    Raises:
        UserError: it has no such iteration.
    """
    from grpo_cli.reporting import replay_tables

    iterations = max((update["iteration"] for update in data["updates"]), default=1)
    if settings.iteration > iterations:
        raise UserError(
            f"--iteration = {settings.iteration}: the step has {iterations} "
            "(update.num_iterations)."
        )
    shown = [
        (completion, update)
        for update in data["updates"]
        for completion in update["completions"]
        if update["iteration"] == settings.iteration
    ]
    console = Console(highlight=False)
    of_processes = f", trained by {data['processes']} processes" if data["processes"] > 1 else ""
    title = f"{data['run']}, step {data['step']}, on {data['device']}{of_processes}"
    console.print(title, soft_wrap=True, markup=False)
    replay_tables.print_checks(console, data)
    replay_tables.print_table(console, data, settings.iteration)
    if settings.row is not None:
        for completion, update in shown:
            replay_tables.print_completion(console, data, completion, update)
    for line in replay_tables.legend(data):
        console.print(line, soft_wrap=True, markup=False)


def disagreement(
    data: Mapping[str, Any], wrong: Sequence[Mapping[str, Any]], tolerance: float
) -> str:
    """Returns the sentence about a step that could not be recomputed."""
    apart = listed(
        f"{c['name']} ({_shown(c['recomputed'])}, recorded {_shown(c['recorded'])}"
        + (")" if None in (c["recomputed"], c["recorded"]) else
           f", apart by {abs(c['recomputed'] - c['recorded']):.1e})")
        for c in wrong
    )  # fmt: skip
    why = "another device, other versions of torch or another number of threads round differently"
    if data["processes"] > 1:
        why += f", and so do {data['processes']} processes"
        if data["dropout"]:
            why = "the random numbers of dropout were drawn by several processes"
    return (
        f"step {data['step']} of {data['run']}: not recomputed to {tolerance:g}: {apart}; {why} "
        "(--tolerance)."
    )


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.9g}"
