"""`grpo watch RUN`: a live view of a run in the terminal, or one block of text elsewhere."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live

from grpo_cli.config.knob import knob
from grpo_cli.config.words import described, parse_with_runs
from grpo_cli.reporting.live.following import Followed
from grpo_cli.reporting.live.panels import view
from grpo_cli.reporting.run_folder import RunFolder

USAGE = """\
grpo watch RUN [--every=SECONDS] [--once]

Shows a run while it runs or after its end: progress and the time left, curves,
the stages of the newest step, completions with the highest and the lowest
reward, alarms. It only reads the run's folder, also on another node of a shared
file system. Ctrl-C ends it. Without a terminal it prints one block of text.

  RUN                      Folder of a run, or a checkpoint.
"""


@dataclass
class WatchOptions:
    """The options of `grpo watch`."""

    every: float = knob(1.0, "Seconds between two looks at the folder.", ge=0.1)
    once: bool = knob(False, "Print the view as one block of text, and end.")


HELP = USAGE + described(WatchOptions, dashes=True)


def main(argv: list[str]) -> None:
    """Checks the command line and shows the run."""
    (given,), settings = parse_with_runs(WatchOptions, argv, "grpo watch")
    run = Followed(RunFolder.open(given, starting=True))
    console = Console(highlight=False)
    if settings.once or not console.is_terminal or console.is_dumb_terminal:
        # One block without control characters.
        console = Console(
            highlight=False, color_system=None, force_terminal=False, legacy_windows=False
        )
        run.poll()
        for row in view(run, console):
            console.print(row, soft_wrap=True)
    else:
        follow(run, console, settings.every)


def follow(run: Followed, console: Console, every: float) -> None:
    """Shows the view and keeps it up to date, until Ctrl-C."""
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            run.poll()
            live.update(Group(*view(run, console, console.height)), refresh=True)
            time.sleep(every)
