"""Computes what a live view of a run shows: its state, the time that is left, curves, shares.

Plain arithmetic on what `following` has read; `panels` draws it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from grpo_cli.distributed import heartbeat
from grpo_cli.reporting.live.following import EVALUATION, Followed
from grpo_cli.reporting.metric_names import STAGES, measure_of

RECENT = 20  # steps from which the time of the next ones is estimated
FRESH_SECONDS = 5.0  # in which a process has written its status, even on a busy disk
LOST_SECONDS = 90.0  # the same for another node, whose files may be seen a minute later (NFS)
LEVELS = "▁▂▃▄▅▆▇█"
ENDS = ("ended", "stopped", "failed")
NOT_TRAINING = (heartbeat.START, "evaluate", "checkpoint", "hub")


class Health(NamedTuple):
    """The state of a run, for people."""

    state: str  # starting, training, evaluating, saving, ended, stopped, failed, dead or unknown
    text: str  # a sentence about it

    @property
    def is_live(self) -> bool:
        return self.state not in (*ENDS, "dead", "unknown")


def health(run: Followed) -> Health:
    """Returns the state of a run, from its status, the status's age and the lock of its folder.

    A status that changes is of a living process, whatever the lock says: some file systems have no
    locks. Without news, a free lock means at once that the process is gone; of another node, whose
    locks are not seen, only the age tells.
    """
    status, age = run.status, run.age
    if status is None or age is None:
        return _health_without_status(run)
    state, where = str(status.get("state")), activity(status)
    if state in ENDS:
        message = status.get("message")
        return Health(state, f"{state} after step {run.step}" + (f": {message}" if message else ""))
    if run.holds_lock is False and age > FRESH_SECONDS:
        return Health("dead", f"its process was killed: last in {where}")
    if run.holds_lock is None and age > LOST_SECONDS:
        text = f"seems dead: no news from {status.get('node')} for {duration(age)}; last in {where}"
        return Health("dead", text)
    if age > 3 * FRESH_SECONDS:
        return Health(state, f"{where}; no news for {duration(age)}")
    return Health(state, where)


def _health_without_status(run: Followed) -> Health:
    """Returns the state of a run that has just begun, or whose status.json is lost."""
    if run.holds_lock:
        return Health("training" if run.step else "starting", "runs; it has no status.json")
    if run.summary is not None:
        return Health("ended", f"ended after step {run.step}")
    if run.holds_lock is None:
        return Health("unknown", "of another node, and without status.json: may run or not")
    return Health("stopped", "does not run, and has not ended")


def activity(status: Mapping[str, Any]) -> str:
    """Returns what a process does, such as `step 12, generate for 0:05`."""
    step, stage = status.get("step"), status.get("stage", "")
    inside = max(0.0, float(status.get("time", 0)) - float(status.get("since", 0)))
    name = "loading and building" if stage == heartbeat.START else stage
    where = f"{name} for {duration(inside)}" if inside >= 1 else f"{name}"
    return where if step is None else f"step {step}, {where}"


def duration(seconds: float) -> str:
    """Returns seconds by the two largest units: 45 s, 2 min 05 s, 3 h 20 min, 2 d 4 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def evaluations_left(recipe: Mapping[str, Any], done: int, steps: int) -> int:
    """Returns how many evaluations are due after the steps from `done` + 1 to `steps`."""
    config = recipe.get("eval") or {}
    every, delay = config.get("every") or 0, config.get("delay") or 0
    due = max(0, steps // every - (max(done + 1, delay) - 1) // every) if every else 0
    at_end = bool(config.get("at_end", True)) and done < steps
    return due + int(at_end and (not every or steps % every > 0 or steps < delay))


def seconds_left(run: Followed) -> float | None:
    """Returns the expected seconds until the end of a run, None before its first step.

    The steps that are left take as long as the last ones, with the time between steps and of saving
    that this process has spent on average; evaluations are counted by their schedule.
    """
    times, steps = run.series["step_time"], run.steps
    if not times.values or steps is None:
        return None
    left = steps - run.step
    per_step = math.fsum(times.values[-RECENT:]) / len(times.values[-RECENT:])
    finished = (run.status or {}).get("finished")
    if not finished or finished.get("step") != run.step:
        return left * per_step
    assert run.status is not None
    first, seconds = int(run.status.get("first_step") or 0), finished["seconds"]
    since = sum(step > first for step in times.steps)  # steps of this process
    if not since:
        return left * per_step
    in_steps = math.fsum(times.values[-since:])
    in_training = math.fsum(s for name, s in seconds.items() if name not in NOT_TRAINING)
    saving = seconds.get("checkpoint", 0.0) + seconds.get("hub", 0.0)
    per_step += (max(0.0, in_training - in_steps) + saving) / since
    evaluated = sum(step > first for step in run.series[EVALUATION].steps)
    evaluated += first == 0 and run.status.get("before") is not None
    per_evaluation = seconds.get("evaluate", 0.0) / evaluated if evaluated else 0.0
    total: float = left * per_step + evaluations_left(run.recipe, run.step, steps) * per_evaluation
    passed = float(run.status["time"] - finished["time"])
    return max(0.0, total - max(0.0, passed))


def may_end_early(recipe: Mapping[str, Any]) -> bool:
    """Whether a rule of the recipe or a callback may end the run before its last step."""
    rules = recipe.get("stop") or {}
    named = any(limit for name, limit in rules.items() if name != "steps")
    patience = (recipe.get("eval") or {}).get("patience")
    return bool(named or patience or recipe.get("callbacks"))


def resample(values: Sequence[float], width: int) -> list[float]:
    """Returns at most `width` values: each the mean of an equal share of consecutive ones.

    For example, resample([1, 2, 3, 4, 5], 2) is [1.5, 4.0].
    """
    if len(values) <= width:
        return list(values)
    ends = [i * len(values) // width for i in range(width + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(ends)]


def sparkline(values: Sequence[float], width: int, height: int = 1) -> list[str]:
    """Returns the lines of a curve, the top one first, from the lowest value to the highest."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite or width <= 0:
        return [" " * max(0, width)] * height
    shown = resample(finite, width)
    low, high = min(shown), max(shown)
    span, most = high - low, len(LEVELS) * height - 1
    levels = [round((v - low) / span * most) if span > 0 else most // 2 for v in shown]
    rows = []
    for row in reversed(range(height)):
        cells = (level - row * len(LEVELS) for level in levels)
        rows.append("".join(" " if c < 0 else LEVELS[min(c, len(LEVELS) - 1)] for c in cells))
    return [line.ljust(width) for line in rows]


def stage_seconds(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the seconds of each stage of a step, `other` for what is in none; {} without times.

    Args:
        line: of metrics.jsonl.
    """
    total = line.get("step_time")
    if not isinstance(total, (int, float)) or total <= 0:
        return {}
    seconds = {name: line.get(f"time/{name}") or 0.0 for name in STAGES if f"time/{name}" in line}
    other = max(0.0, total - math.fsum(seconds.values()))
    return {name: s for name, s in {**seconds, "other": other}.items() if s > 0}


def widths(shares: Sequence[float], width: int) -> list[int]:
    """Divides `width` characters in proportion, so that they sum to it (largest remainder).

    For example, widths([1, 1, 1], 10) is [4, 3, 3].
    """
    total = math.fsum(shares)
    if total <= 0:
        return [0] * len(shares)
    exact = [share / total * width for share in shares]
    cells = [int(e) for e in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: cells[i] - exact[i])
    for i in by_remainder[: width - sum(cells)]:
        cells[i] += 1
    return cells


class Evaluation(NamedTuple):
    """The measure of an evaluation, with its 95 % interval if it has one."""

    name: str
    value: float
    low: float | None
    high: float | None


def newest_evaluation(run: Followed) -> Evaluation | None:
    """Returns the newest evaluation during training, or the one before; None without any."""
    line = run.evaluation
    if line:
        name = measure_of(line)
        value, low, high = (line.get(f"eval/{name}{end}") for end in ("", "_low", "_high"))
        return None if value is None else Evaluation(name, value, low, high)
    before = (run.status or {}).get("before") or (run.summary or {}).get("before")
    if not before:
        return None
    name = measure_of(before, "")
    low, high = before.get("interval_95") or (None, None)
    if name != "accuracy":
        low, high = (before.get("intervals_95") or {}).get(name) or (None, None)
    return None if before.get(name) is None else Evaluation(name, before[name], low, high)


def evaluation_values(run: Followed) -> list[float]:
    """Returns the measure of all evaluations, that before the first step included."""
    values = run.series[EVALUATION].values
    before = (run.status or {}).get("before") or (run.summary or {}).get("before")
    first = (before or {}).get(measure_of(before or {}, ""))
    return values if first is None else [first, *values]
