"""The parts of scripts/bench.py that neither train nor sample."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_cli.config import parsing
from tests.composed import composed
from tests.programs import ROOT

sys.path.append(str(ROOT / "scripts"))

import bench
import bench_setup
import bench_side
from bench_setup import WORKLOADS, Job


def step(seconds: float, tokens: int) -> dict[str, Any]:
    return {"tokens": tokens, "seconds": {"step": seconds}, "memory": None}


def test_figure_spreads_over_rounds_or_over_the_steps_of_one() -> None:
    assert bench.figure([[1.0, 2.0, 9.0], [4.0, 5.0, 6.0]]) == (4.5, 2.0, 5.0)
    assert bench.figure([[3.0, 1.0, 2.0]]) == (2.0, 1.0, 3.0)


def test_rows_have_workload_stage_side_and_ratio() -> None:
    found = {"ours": [[step(2.0, 100)]], "trl": [[step(10.6, 101)]]}
    rows = [" ".join(row.split()) for row in bench.rows("tail", found)]
    assert rows == [
        "tail step ours 2.00 s (2.00..2.00)",
        "tail step trl 10.6 s (10.6..10.6) 5.30x",
        "tail tokens ours 100 (100..100)",
        "tail tokens trl 101 (101..101) 1.01x",
    ]


def test_rows_compare_by_the_token_where_tokens_differ() -> None:
    found = {"ours": [[step(2.0, 100)]], "trl": [[step(10.0, 200)]]}
    assert bench.rows("tail", found)[1].endswith("5.00x  by the token 2.50x")


@pytest.mark.parametrize(("name", "model"), [("short", "small"), ("lora", "110m")])
def test_a_job_makes_a_recipe(name: str, model: str, tmp_path: Path) -> None:
    job = Job("ours", WORKLOADS[name], str(tmp_path), str(tmp_path), steps=2)
    assert job.workload.model == model
    recipe = composed(f"recipe={bench_setup.write_recipe(job)}", parse=parsing.parse)
    assert recipe.prompts_per_step == job.workload.prompts
    assert recipe.generation.min_completion_tokens == job.workload.min_tokens
    assert recipe.adapter.rank == (job.workload.lora_rank or recipe.adapter.rank)


def test_meter_sees_what_is_freed_again() -> None:
    with bench_side.peak_memory(torch.device("cpu")) as seen:
        known = torch.ones(2**26)  # 256 MiB
        del known
    before, highest = seen
    assert highest - before == pytest.approx(2**28, rel=0.1)
