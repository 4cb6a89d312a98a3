"""`grpo show RUN`: prints stored completions turn by turn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from rich.console import Console

from grpo_cli.checkpoints import provenance
from grpo_cli.config.knob import knob
from grpo_cli.config.words import described, parse_with_runs
from grpo_cli.data import stored_completions
from grpo_cli.errors import UserError

USAGE = """\
grpo show RUN [--step=N] [--number=K] [--row=N] [--order=worst]

Prints completions that a run or an evaluation has stored, turn by turn: the
messages of the model, of tools and of environments (dimmed), the reward at each
turn, and why the episode ended. A prompt with images has their number; their
tokens are shown as <image>.

  RUN                      Folder of a run, a checkpoint or an evaluation, or a
                           file of completions.
"""


@dataclass
class ShowOptions:
    """The options of `grpo show`."""

    step: int | None = knob(
        None, "Step of the run; null: the newest whose completions are stored.", ge=1
    )
    number: int = knob(3, "Number of completions to print, from the first.", ge=1)
    row: int | None = knob(
        None, "Row of the data set, from 0, whose completions to print; null: of all rows.", ge=0
    )
    order: str = knob(
        "stored",
        "Order of the completions: as stored, or by reward, the best or the worst first.",
        choices=("stored", "best", "worst"),
    )


HELP = USAGE + described(ShowOptions, dashes=True)


def main(argv: list[str]) -> None:
    """Checks the command line and prints the completions."""
    (given,), settings = parse_with_runs(ShowOptions, argv, "grpo show")
    root = Path(given).expanduser()
    if root.is_dir():
        root = root.parent.parent if root.parent.name == "checkpoints" else root
        provenance.check_links(root, "RUN")
    path = find(Path(given).expanduser(), settings.step)
    samples = stored_completions.load(path, {}, "RUN")
    if settings.row is not None:
        rows = [s.columns.get("row") for s in samples]
        samples = [s for s, row in zip(samples, rows, strict=True) if row == settings.row]
        if not samples:
            raise UserError(f"--row = {settings.row}: {path} holds no completions of this row.")
    if settings.order != "stored":
        sign = -1 if settings.order == "best" else 1
        rewards = [s.columns.get("reward") for s in samples]
        keys = [sign * r if isinstance(r, int | float) else math.inf for r in rewards]
        samples = [s for _, s in sorted(zip(keys, samples, strict=True), key=itemgetter(0))]
    from grpo_cli.reporting.trajectories import trajectory

    console = Console(highlight=False)
    shown = samples[: settings.number]
    for sample in shown:
        console.print(trajectory(sample), soft_wrap=True)
    console.print(
        f"{len(shown)} of {len(samples)} completions in {path}", soft_wrap=True, markup=False
    )


def find(path: Path, step: int | None) -> Path:
    """Returns the file of completions of a run, or of one of its steps.

    Raises:
        UserError: there is no such file.
    """
    if not path.exists():
        raise UserError(f"RUN = {path}: there is no such folder or file.")
    if step is None:
        return stored_completions.find(path, "RUN")
    file = path / "completions" / f"step-{step}.parquet"
    if file.exists() or file.is_symlink():
        return file
    there = stored_completions.steps_stored(path)
    if not there:
        raise UserError(f"--step = {step}: {path} is not a run with stored completions.")
    raise UserError(
        f"--step = {step}: {path} has no completions of this step; it has those of the steps "
        f"{', '.join(map(str, there))} (log.completions_every)."
    )
