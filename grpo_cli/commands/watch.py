"""`grpo watch RUN`: a live view of a run in the terminal, or one block of text elsewhere."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from rich.console import Console

from grpo_cli.config.knob import knob
from grpo_cli.config.words import described, parse_with_run
from grpo_cli.reporting.live.following import Followed
from grpo_cli.reporting.run_folder import RunFolder

USAGE = """\
grpo watch RUN [--every=SECONDS] [--once]

Shows a run that goes on or has ended: progress and the time that is left, curves, the stages of
the newest step, completions with high and low rewards, alarms. It only reads the run's folder, also
on another node of a shared file system. ? lists its keys. Without a terminal it prints one block of
text.

  RUN                      Folder of a run, or a checkpoint.
"""


@dataclass
class Settings:
    """The options of `grpo watch`."""

    every: float = knob(1.0, "Seconds between two looks at the folder.", ge=0.1)
    once: bool = knob(False, "Print the view as one block of text, and end.")


def main(argv: list[str]) -> None:
    """Checks the command line and shows the run.

    Raises:
        UserError: a mistake on the command line; there is no run.
    """
    if not argv or {"-h", "--help"} & {*argv}:
        print(USAGE + described(Settings, dashes=True), end="")
        return
    given, settings = parse_with_run(Settings, argv, "grpo watch")
    run = Followed(RunFolder.open(given, starting=True))
    if settings.once or not has_screen():
        print_block(run)
        return
    from grpo_cli.commands.watch_screen import WatchApp

    error = WatchApp(run, settings.every).run(mouse=False)  # the mouse selects text, as elsewhere
    if error is not None:
        raise error


def has_screen() -> bool:
    """Whether keys come from a terminal, and the view goes to one: textual writes to stderr."""
    is_terminal = all(s.isatty() for s in (sys.stdin, sys.stdout, sys.stderr))
    return is_terminal and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def print_block(run: Followed) -> None:
    """Prints the view as one block without control characters."""
    from grpo_cli.reporting.live.pager import Pager
    from grpo_cli.reporting.live.panels import plain

    console = Console(
        highlight=False, color_system=None, force_terminal=False, legacy_windows=False
    )
    run.poll()
    pager = Pager(run)
    pager.load()
    for row in plain(run, pager.pages, pager.step, console.width):
        console.print(row, soft_wrap=True)
