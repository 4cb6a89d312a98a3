"""Replays the metrics of finished runs through the alarms, as a run does: which would be raised?

    python scripts/check_alarms.py outputs/*            # the folders of runs

Prints the alarms of each run, and the share of runs in which each was raised. The thresholds in
docs/alarms.md were chosen with it, on the runs that are listed there.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from pathlib import Path
from typing import Any

from grpo_cli.config.parsing import parse
from grpo_cli.config.schema import Recipe
from grpo_cli.reporting.alarms import Alarms, Raised
from grpo_cli.reporting.run_folder import RunFolder


def replayed(recipe: Recipe, lines: list[dict[str, Any]]) -> list[tuple[int, Raised]]:
    """Returns (step, alarm) of each alarm that these lines of metrics.jsonl raise."""
    alarms = Alarms(recipe)
    found = []
    for line in lines:
        metrics = {key: math.nan if v is None else v for key, v in line.items()}
        metrics.setdefault("frac_zero_advantage", metrics["frac_reward_zero_std"])  # before 0.2
        found += [(line["step"], raised) for raised in alarms.follow(line["step"], metrics)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folders", nargs="+", type=Path, help="folders of runs")
    folders = parser.parse_args().folders
    counts: Counter[str] = Counter()
    for folder in folders:
        run = RunFolder.open(folder)
        recipe = parse({key: v for key, v in run.recipe.items() if key != "defaults"})
        found = replayed(recipe, run.metrics())
        counts.update({raised.name for _, raised in found})
        print(f"{folder}: {len(run.metrics())} steps, {len(found)} alarms")
        for _, raised in found:
            print(f"  {raised.name}: {raised.message}")
    for name, count in counts.most_common():
        print(f"{name}: {count} of {len(folders)} runs")
    if not counts:
        print(f"no alarm in {len(folders)} runs")


if __name__ == "__main__":
    main()
