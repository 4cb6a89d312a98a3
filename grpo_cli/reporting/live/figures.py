"""Computes the figures of a run's live view: its state, the time left, curves, shares.

Plain arithmetic on the files that `following` reads; `panels` draws the figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from grpo_cli.distributed import heartbeat
from grpo_cli.reporting.live.following import Followed
from grpo_cli.reporting.progress import measure_of
from grpo_cli.reporting.run_folder import LOST_SECONDS

RECENT = 20  # steps from which the time of the next ones is estimated
QUIET_SECONDS = 15.0  # without news, which are then mentioned
LEVELS = "▁▂▃▄▅▆▇█"
ENDS = ("ended", "stopped", "failed")


class Health(NamedTuple):
    """The state of a run, with a sentence about it."""

    state: str  # starting, training, evaluating, saving, ended, stopped, failed, dead or unknown
    text: str  # a sentence about it

    @property
    def is_live(self) -> bool:
        return self.state not in (*ENDS, "dead", "unknown")


def health(run: Followed) -> Health:
    """Returns the state of a run, from its status and the status's age."""
    status, age = run.status, run.age
    if status is None or age is None:
        if run.summary is not None:
            return Health("ended", f"ended after step {run.step}")
        return Health("unknown", "has no status.json: may run or not")
    state, where = str(status.get("state")), activity(status)
    if state in ENDS:
        message = status.get("message")
        return Health(state, f"{state} after step {run.step}" + (f": {message}" if message else ""))
    if age > LOST_SECONDS:
        text = f"seems dead: no news from {status.get('node')} for {duration(age)}; last in {where}"
        return Health("dead", text)
    if age > QUIET_SECONDS:
        return Health(state, f"{where}; no news for {duration(age)}")
    return Health(state, where)


def activity(status: Mapping[str, Any]) -> str:
    """Returns the activity of a process, such as `step 12, generate for 5 s`."""
    step, stage = status.get("step"), status.get("stage", "")
    inside = max(0.0, float(status.get("time", 0)) - float(status.get("since", 0)))
    name = "loading and building" if stage == heartbeat.START else stage
    where = f"{name} for {duration(inside)}" if inside >= 1 else f"{name}"
    return where if step is None else f"step {step}, {where}"


def duration(seconds: float) -> str:
    """Formats seconds in the two largest units: 45 s, 2 min 05 s, 3 h 20 min, 2 d 4 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def seconds_left(run: Followed) -> float | None:
    """Returns the expected seconds until the end of a run, None before its first step.

    It assumes that the steps left take as long as those that this process has done, evaluations,
    saving and the time between steps included.
    """
    times, steps = run.values("step_time"), run.steps
    if not times or steps is None:
        return None
    per_step, passed = math.fsum(times[-RECENT:]) / len(times[-RECENT:]), 0.0
    status = run.status or {}
    if finished := status.get("finished"):
        seconds = finished["seconds"]
        spent = math.fsum(s for name, s in seconds.items() if name != heartbeat.START)
        per_step = spent / max(1, finished["step"] - int(status.get("first_step") or 0))
        passed = float(status["time"] - finished["time"])
    return max(0.0, (steps - run.step) * per_step - passed)


def resample(values: Sequence[float], width: int) -> list[float]:
    """Returns at most `width` values: each the mean of an equal share of consecutive ones.

    For example, resample([1, 2, 3, 4, 5], 2) is [1.5, 4.0].
    """
    if len(values) <= width:
        return list(values)
    ends = [i * len(values) // width for i in range(width + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(ends)]


def sparkline(values: Sequence[float], width: int) -> str:
    """Returns a curve as a line of characters, from the lowest value to the highest."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite or not width:
        return " " * width
    shown = resample(finite, width)
    low, span = min(shown), max(shown) - min(shown)
    most = len(LEVELS) - 1
    levels = [round((v - low) / span * most) if span > 0 else most // 2 for v in shown]
    return "".join(LEVELS[level] for level in levels).ljust(width)


class Evaluation(NamedTuple):
    """The measure of an evaluation, with its 95 % interval if it has one."""

    value: float
    low: float | None = None
    high: float | None = None


def evaluations(run: Followed) -> list[Evaluation]:
    """Returns the accuracy, or the reward, of each evaluation, the one before training included."""
    found = []
    if (before := run.before) and before.get(name := measure_of(before, "")) is not None:
        of_accuracy = before.get("interval_95") if name == "accuracy" else None
        interval = of_accuracy or (before.get("intervals_95") or {}).get(name) or ()
        found.append(Evaluation(before[name], *interval))
    for line in run.metrics:
        if "eval/accuracy" in line:
            name = measure_of(line)
            value, low, high = (line.get(f"eval/{name}{end}") for end in ("", "_low", "_high"))
            if value is not None:
                found.append(Evaluation(value, low, high))
    return found
