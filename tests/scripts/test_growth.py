"""The fits of scripts/least_squares.py, and the tables of bench_growth.py and check_long_run.py."""

import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.programs import ROOT

sys.path.append(str(ROOT / "scripts"))

import bench_growth
import check_long_run
from least_squares import fit_line, fit_power


def test_line_by_hand() -> None:
    line = fit_line([0, 1, 2], [0, 1, 1])
    # Residuals -1/6, 1/3, -1/6: their squares are 1/6 together; sum (x - 1)² = 2.
    assert (line.slope, line.intercept) == pytest.approx((1 / 2, 1 / 6))
    assert line.error == pytest.approx(math.sqrt(1 / 6 / 2))
    assert math.isnan(fit_line([0, 1], [0, 1]).error)


def test_exponents_of_powers() -> None:
    assert fit_power([1, 2, 4], [3, 6, 12]).slope == pytest.approx(1)
    line = fit_power([10, 100, 1000], [5 * 10**1.5, 5 * 10**3, 5 * 10**4.5])
    assert (line.slope, line.error) == pytest.approx((1.5, 0), abs=1e-6)
    assert bench_growth.exponent([1, 2, 4], [1, 2, 2]) == "0.50 ± 0.29 (0.00)"


def test_axes_change_one_quantity_over_five_points() -> None:
    axes = bench_growth.axes()
    assert {short: len(axis.points) for short, axis in axes.items()} == dict.fromkeys(axes, 5)
    for axis in axes.values():
        assert all(a < b for a, b in pairwise(axis.points)), axis.name
    assert bench_growth.tokens_of(axes["group"].points[16]) == 8 * (32 + 16 * 32)
    assert axes["completion"].points[512].min_tokens == 512


def test_numbers_of_the_plot_are_brief() -> None:
    assert [bench_growth.brief(n) for n in (512, 1024, 131_072, 1_702_912)] == [
        "512", "1.0k", "131k", "1.7M"
    ]  # fmt: skip


def test_memory_is_above_the_model() -> None:
    mib = 2**20
    parts = {"weights": 4 * mib, "moments": 8 * mib}
    plan = {
        "predicted": {
            "parts": {
                "generate": {**parts, "keys and values": 3 * mib},
                "forward_backward": {**parts, "gradients": 4 * mib, "activations": 20 * mib},
            }
        },
        "measured": {"memory": {"generate": 16 * mib, "forward_backward": 37 * mib}},
    }
    assert bench_growth.memory_of({"plan": plan, "process": 50 * mib}) == {
        "sampling MiB": 4, "sampling plan": 3, "update MiB": 21, "update plan": 20,
        "process MiB": 50,
    }  # fmt: skip


def test_tables_of_growth_have_a_row_for_each_point_and_axis() -> None:
    measures = {"update": 0.5, "step": 0.8, "sampling MiB": 2.0, "update MiB": 9.0}
    rest = {"process MiB": 90.0, "sampling plan": 2.0, "update plan": 9.5}
    points = [
        {"value": n, "tokens": 10.0 * n, "sampling": 0.1 * n, **measures, **rest} for n in (4, 8)
    ]
    _, _, first, _ = bench_growth.table("prompts of a step", points)
    assert first.startswith("| 4 | 40 | 0.400 s | 0.500 s | 0.800 s | 20.0 ms | 2.00 MiB |")
    row = bench_growth.exponents({"prompts": points})[-1]
    assert row.split(" | ")[:2] == ["| prompts", "1.00 ± nan (1.00)"]
    assert "-1.00 ± nan (-1.00)" in row  # of the step by the token


def sample(steps: int, rss: int, cpu: float, **more: dict[str, Any]) -> check_long_run.Sample:
    own = {"name": "run", "rss": rss, "pss": rss, "cpu": cpu, "threads": 8, "files": 10}
    kept = {"metrics.jsonl": steps * 1000, "completions": 0, "checkpoints": 5_000_000}
    return {
        "steps": steps,
        "processes": {"7": own, **more},
        "bytes": {**kept, "all": sum(kept.values())},
        "files": {"metrics.jsonl": 1, "completions": 0, "checkpoints": 2},
    }


def test_slopes_leave_out_the_first_steps_and_the_end() -> None:
    early = [sample(100 * n, n * 2**30, 9.0 * n) for n in range(5)]
    late = [sample(1000 * n, (300 + 2 * n) * 2**20, 250.0 * n) for n in range(1, 20)]
    end = sample(20_000, 2**40, 5001.0)
    row = check_long_run.of_processes([*early, *late, end], settled=500)[2]
    assert row == (
        "| run | 338.0 MiB | 2.00 ± 0.00 MiB | 338.0 MiB | 2.00 ± 0.00 MiB | 8 | 10 "
        "| 0.250 ± 0.000 s | 0.250 ± 0.000 s |"
    )


def test_processes_that_were_seen_briefly_are_only_counted() -> None:
    own = [sample(1000 * n, 2**20, 1.0 * n) for n in range(1, 21)]
    own[3]["processes"]["8"] = {**own[3]["processes"]["7"], "name": "pool_worker"}
    lines = check_long_run.of_processes(own)
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| run", "\n1 more processes were seen fewer than 10 times."
    ]  # fmt: skip


def test_files_at_half_and_at_the_end(tmp_path: Path) -> None:
    lines = check_long_run.of_files([sample(n, 1, 1.0) for n in (0, 500, 1000)])
    assert lines[0] == "| part | after 500 steps | after 1,000 steps | most files |"
    assert lines[2] == "| metrics.jsonl | 0.50 MB | 1.00 MB | 1 |"
    (tmp_path / "completions").mkdir()
    (tmp_path / "completions" / "step-1.parquet").write_bytes(b"123")
    (tmp_path / "other").write_bytes(b"4567")
    found = check_long_run.sizes(tmp_path)
    assert (found["bytes"]["completions"], found["bytes"]["all"]) == (3, 7)
    assert found["files"]["completions"] == 1
