"""`grpo report RUN [OTHER]`: writes the report of a run, or of two, as one HTML file."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.checkpoints.paths import shown, step_of
from grpo_cli.config.knob import knob
from grpo_cli.config.words import described, parse_with_runs
from grpo_cli.errors import UserError
from grpo_cli.reporting.report import facts, page
from grpo_cli.reporting.report.completions import ReportLimits
from grpo_cli.reporting.run_folder import RunFolder

USAGE = """\
grpo report RUN [OTHER] [--output=FILE] [--completions=N]

Writes one HTML file that any browser opens without a network: what was run, the
results before and after, curves, the time by stage, the plan beside what was
measured, rewards, alarms, and the stored completions with search, filters and
colours of tokens. With two runs it shows both: curves, paired evaluations of
the same held-out problems, and the knobs in which they differ. The run may
still be going on, or may have been killed.

  RUN                      Folder of a run, or a checkpoint in it.
  OTHER                    Folder of another run, to be compared with the first.
"""


@dataclass
class ReportOptions:
    """The options of `grpo report`."""

    output: str | None = knob(None, "File to write; null: report.html in the folder of RUN.")
    completions: int = knob(
        ReportLimits.completions,
        "Most completions in the report; of more, those of evenly spread steps; 0: none.",
        ge=0,
    )


HELP = USAGE + described(ReportOptions, dashes=True)


def main(argv: list[str]) -> None:
    """Checks the command line and writes the report."""
    given, settings = parse_with_runs(ReportOptions, argv, "grpo report", 2)
    runs = [RunFolder.open(word, name) for word, name in zip(given, ("RUN", "OTHER"), strict=False)]
    path = output_path(runs, settings.output)
    limits = ReportLimits().divided(len(runs), settings.completions)
    compared = compare(*runs) if len(runs) == 2 else None
    data = [page.read(run, limits) for run in runs]
    try:
        size = page.write(data, path, compared)
    except OSError as error:
        raise UserError(f"--output = {path}: cannot be written: {error.strerror}.") from error
    print(f"report: {shown(path.resolve())} ({size / 1e6:.1f} MB)")


def output_path(runs: Sequence[RunFolder], given: str | None) -> Path:
    """Returns the file to write.

    Raises:
        UserError: it is a folder, a device, or a file of a run that the report would replace.
    """
    path = runs[0].path / page.NAME if given is None else Path(given).expanduser()
    if path.exists() and not path.is_file():
        raise UserError(f"--output = {given}: is no file; give one such as report.html.")
    real = Path(os.path.realpath(path))  # `resolve` raises at a loop of links
    is_of_run = any(real.is_relative_to(run.path.resolve()) for run in runs)
    if is_of_run and path.exists() and not page.is_report(path):
        raise UserError(f"--output = {path}: is a file of the run; give a new one.")
    return path


def compare(first: RunFolder, second: RunFolder) -> dict[str, Any]:
    """Returns the differences of two runs: knobs, and evaluations of the same held-out problems."""
    found: dict[str, Any] = {"recipe": facts.listed(first.recipe, second.recipe)}
    evaluations = [[p for p in r.evaluations() if step_of(p) >= 0] for r in (first, second)]
    if lacking := [r.path.name for r, e in zip((first, second), evaluations, strict=True) if not e]:
        return found | {
            "why": "Paired by problem only where both runs have been evaluated by grpo eval RUN; "
            f"not evaluated: {' and '.join(lacking)}."
        }
    from rich.console import Console

    from grpo_cli.evaluation import compare

    one, other = (e[-1] for e in evaluations)  # the newest of the held-out rows
    try:
        paired = compare.compare(one, other, Console(file=io.StringIO()))
    except UserError as error:
        return found | {"why": str(error)}
    return found | {"paired": paired}
