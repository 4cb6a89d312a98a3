"""The folder of a run as `grpo train` leaves it, written without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpo_cli.data.stored_completions import completion_row, write_parquet
from tests.conftest import make_group, make_rollout
from tests.report_runs import line

NOW = 1_800_000_000.0  # unix time of the status


def write_run(folder: Path, *, steps: int = 400, done: int = 120, **status: Any) -> Path:
    """Writes a run of which some steps are done; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = f"recipe: tiny\nsteps: {steps}\neval:\n  every: 40\n  at_end: true\n"
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    lines = [json.dumps(line(step, steps)) + "\n" for step in range(1, done + 1)]
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    alarms = [{"step": s, "kind": "alarm", "name": "entropy", "message": f"entropy fell to 0.{s}"}
              for s in (30, 90)]  # fmt: skip
    (folder / "alarms.jsonl").write_text("".join(json.dumps(a) + "\n" for a in alarms))
    for step in range(100, done + 1, 100):
        (folder / "checkpoints" / f"step-{step}").mkdir(parents=True)
    seconds = {"start": 9.0, "generate": 2.0 * done, "evaluate": 12.0, "checkpoint": 3.0}
    written = {
        "state": "training", "step": done + 1, "steps": steps, "stage": "generate",
        "since": NOW - 3, "time": NOW, "node": "n7", "pid": 4242, "processes": 2, "device": "cpu",
        "first_step": 0, "before": {"accuracy": 0.125, "interval_95": [0.1, 0.15]},
        "memory": {"rss": 1_234_000_000}, "message": None,
        "finished": {"step": done, "time": NOW - 3, "seconds": seconds},
    }  # fmt: skip
    (folder / "status.json").write_text(json.dumps(written | status), encoding="utf-8")
    return folder


def write_completions(
    folder: Path, step: int, texts: list[str], rewards: list[float], prompt: Any = "1 + 1 ="
) -> Path:
    rollouts = [
        make_rollout(prompt=prompt, text=text, reward=r, parts={"exact": r}, advantage=r - 0.5)
        for text, r in zip(texts, rewards, strict=True)
    ]
    group = make_group(0, rollouts)
    path = folder / "completions" / f"step-{step}.parquet"
    write_parquet(path, [completion_row(step, group, i) for i in range(len(texts))])
    return path
