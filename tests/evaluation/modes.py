"""Benchmarks with prompts of a test's own, and tasks without rows."""

from dataclasses import replace
from typing import Any

from grpo_cli.evaluation.settings import Benchmark, Mode
from grpo_cli.evaluation.tasks import Task


def prompted(base: Benchmark | None = None, **changes: Any) -> Benchmark:
    """A copy of a benchmark with changes, of which `cot` and `tir` are its prompts."""
    base = base or Benchmark()
    prompts = {mode: changes.pop(mode) for mode in ("cot", "tir") if mode in changes}
    modes = {m: replace(base.modes.get(m, Mode()), prompt=p) for m, p in prompts.items()}
    return replace(base, modes={**base.modes, **modes}, **changes)


def task_of(name: str, mode: str, benchmark: Benchmark | None = None) -> Task:
    """A task that only names what was evaluated."""
    task: Any = Task.__new__(Task)
    for key, value in {"name": name, "mode": mode, "key": name, "benchmark": benchmark}.items():
        object.__setattr__(task, key, value)
    return task  # type: ignore[no-any-return]
