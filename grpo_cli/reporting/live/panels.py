"""Draws the panels of `grpo watch` as `rich.text.Text`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from rich.console import Console
from rich.text import Text

from grpo_cli.checkpoints.manifest import in_words
from grpo_cli.config.interpolation import printable
from grpo_cli.data.sample import Sample
from grpo_cli.reporting.live import figures
from grpo_cli.reporting.live.figures import Health, duration
from grpo_cli.reporting.live.following import Followed
from grpo_cli.reporting.progress import times
from grpo_cli.reporting.trajectories import body, head

STATE_STYLES = {
    "starting": "bold cyan", "training": "bold green", "evaluating": "bold blue",
    "saving": "bold blue", "ended": "bold", "stopped": "bold yellow", "failed": "bold red",
    "dead": "bold red", "unknown": "bold yellow",
}  # fmt: skip
HELD_OUT = "held-out"  # the curve of the evaluations
CURVES = {
    "reward": "reward",
    HELD_OUT: HELD_OUT,
    "completions/mean_length": "length",
    "entropy": "entropy",
    "kl": "KL",
    "grad_norm": "grad norm",
}
VALUE = 7  # characters of a curve's newest value
LABEL = 10  # characters of a curve's name
GAP = 2  # characters between two curves
TWO_COLUMNS = 70  # width from which curves are drawn in two columns
ALARMS = 3  # number of alarms that are shown
PROMPT_CHARACTERS = 200  # shown of the prompt's end


def stacked(lines: Sequence[Text], width: int) -> Text:
    """Joins lines into one text, each truncated to a width."""
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join(lines)


def header(run: Followed, health: Health, width: int) -> Text:
    """Draws the run's name and devices, its state, its progress and its newest alarms."""
    status = run.status or {}
    name = run.recipe.get("recipe")
    about = [str(name)] if name else []
    if processes := status.get("processes"):
        device = status.get("device", "")
        about.append(f"{processes} process{'es' if processes > 1 else ''} on {device}")
    if node := status.get("node"):
        about.append(f"node {node}")
    style = STATE_STYLES.get(health.state, "bold")
    said = printable(" ".join(health.text.removeprefix(health.state).split()))
    state = f"● {health.state}  "
    rows = textwrap.wrap(state + said, max(len(state) + 1, width), max_lines=3, placeholder=" …")
    first = Text.assemble((state, style), rows[0].removeprefix(state))
    lines = [
        Text.assemble(
            (printable(str(run.folder.path)), "bold"), printable("  " + " · ".join(about))
        ),
        first,
        *map(Text, rows[1:]),
        progress(run, health, width),
        *alarms(run),
    ]
    return stacked(lines, width)


def progress(run: Followed, health: Health, width: int) -> Text:
    """Draws a bar of the complete steps, with the time per step and the time left."""
    steps, times = run.steps, run.values("step_time")
    said = f"step {run.step:,}" + (f" of {steps:,}" if steps else "")
    more = ""
    if recent := times[-figures.RECENT :]:
        mean = math.fsum(recent) / len(recent)
        more = f"{mean:.{2 if mean < 10 else 1}f} s" if mean < 60 else duration(mean)
        more = f" · {more} a step"
    left = figures.seconds_left(run)
    if health.is_live and left is not None and run.step < (steps or 0):
        more += f" · {duration(left)} left"
    if steps is None:
        return Text(said + more)
    done = min(1.0, run.step / steps)
    share = f" {100 * done:.0f} %"
    room = max(5, min(60, width - len(said) - len(more) - len(share) - 1))
    full = round(done * room)
    bar = ("━" * full, "green"), ("─" * (room - full), "dim")
    return Text.assemble(said, " ", *bar, share, more)


def alarms(run: Followed) -> list[Text]:
    """Draws the number of alarms and the newest ones, the last one first."""
    raised = [a for a in run.alarms if a.get("kind") != "stop"]  # the state shows stop rules
    if not raised:
        return [Text("no alarms", style="dim")]
    lines = []
    for alarm in raised[: -ALARMS - 1 : -1]:
        message = printable(str(alarm.get("message") or alarm.get("name", "")))
        step = f"step {alarm.get('step')}: "
        lines.append(step + " ".join(message.split()).removeprefix(step))
    count = len(raised)
    lines[0] = f"{count} alarm{'s, the newest in' if count > 1 else ' in'} {lines[0]}"
    return [Text(f"! {said}", style="bold red") for said in lines]


def parts(run: Followed, width: int) -> Text:
    """Draws the mean of each reward function in the newest step; nothing for a single function."""
    means = {
        key.removeprefix("rewards/").removesuffix("/mean"): value
        for key, value in run.newest.items()
        if key.startswith("rewards/") and key.endswith("/mean") and value is not None
    }
    said = " · ".join(f"{printable(name)} {number(value)}" for name, value in means.items())
    return stacked([Text(f"reward parts: {said}")] if len(means) > 1 else [], width)


def curves(run: Followed, width: int) -> Text:
    """Draws the newest values of the metrics and their curves, in one column or two."""
    columns = 2 if width >= TWO_COLUMNS else 1
    cell = (width - GAP * (columns - 1)) // columns
    cells = [_curve(run, key, title, cell) for key, title in CURVES.items()]
    rows = [cells[first : first + columns] for first in range(0, len(cells), columns)]
    return stacked([Text(" " * GAP).join(row) for row in rows], width)


def _curve(run: Followed, key: str, title: str, width: int) -> Text:
    """Returns the line of one curve, `width` characters wide."""
    evaluations = figures.evaluations(run) if key == HELD_OUT else []
    values = [one.value for one in evaluations] or run.values(key)
    said = number(values[-1]) if values else "–"
    if evaluations and evaluations[-1].low is not None and evaluations[-1].high is not None:
        said += f" [{number(evaluations[-1].low)}, {number(evaluations[-1].high)}]"
    said = said.rjust(VALUE)
    curve = figures.sparkline(values, max(0, width - LABEL - len(said) - 2))
    style = "green" if key in ("reward", HELD_OUT) else "cyan"
    text = Text.assemble((title.ljust(LABEL), "bold"), " ", (curve, style), " ", said)
    text.truncate(width, pad=True)
    return text


def number(value: float) -> str:
    """Returns a number in at most seven characters."""
    if not math.isfinite(value):
        return "–"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}" if abs(value) >= 1 or value == 0 else f"{value:.3f}"
    return f"{value:.1e}"


def stages(run: Followed, width: int) -> Text:
    """Draws the stages and the rates of the newest step, and memory and checkpoints."""
    rows = []
    if said := times(run.newest):
        rows.append(Text(f"step {run.step:,}: {run.newest['step_time']:.3g} s: {said}"))
    return stacked([*rows, Text(" · ".join(_memory(run)))], width)


def _memory(run: Followed) -> Iterator[str]:
    """Yields the memory of the process, and its checkpoints."""
    memory = (run.status or {}).get("memory") or {}
    if "cuda_reserved" in memory:
        peak = f", peak {in_words(memory['cuda_peak'])}" if "cuda_peak" in memory else ""
        yield f"GPU {in_words(memory['cuda_reserved'])}{peak}"
    yield f"memory {in_words(memory['rss']) if 'rss' in memory else 'not recorded'}"
    steps = run.checkpoints
    listed = ", ".join(map(str, steps[-3:]))
    more = f" of {len(steps)}" if len(steps) > 3 else ""
    yield f"checkpoints{more}: {listed}" if steps else "no checkpoint yet"


def view(run: Followed, console: Console, height: int | None = None) -> list[Text]:
    """Returns the lines of the view, as wide as the console.

    Args:
        height: lines of the terminal, which completions are cut to; None: all lines.
    """
    width = console.width
    panels = [
        header(run, figures.health(run), width),
        curves(run, width),
        stages(run, width),
        parts(run, width),
    ]
    lines = [row for panel in panels if panel for row in panel.split("\n", allow_blank=True)]
    if not run.samples:
        every = (run.recipe.get("log") or {}).get("completions_every")
        said = "are stored: log.completions_every = 0" if every == 0 else "yet"
        return [*lines, Text(""), Text(f"no completions {said}", style="dim")]
    shown = [[Text(""), *completion(sample)] for sample in run.samples]
    if height is None:
        return lines + list(chain.from_iterable(shown))
    room = (height - len(lines)) // len(shown)
    for texts in shown:
        wrapped = chain.from_iterable(text.wrap(console, width) for text in texts)
        lines += islice(wrapped, max(0, room))
    return lines[:height]


def completion(sample: Sample) -> list[Text]:
    """Returns the lines of a completion: its heading, the end of its prompt, and its text."""
    return [Text(printable(head(sample)), style="bold"), *body(sample, PROMPT_CHARACTERS)]
