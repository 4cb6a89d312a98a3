"""The parts of scripts/bench.py that neither train nor sample."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.programs import ROOT

sys.path.append(str(ROOT / "scripts"))

import bench
import bench_probe
import bench_setup
from bench_setup import WORKLOADS, Job


def step(seconds: float, tokens: list[int], memory: int | None = None) -> dict[str, Any]:
    return {"lengths": [(10, tokens)], "seconds": {"step": seconds}, "memory": memory}


def test_figure_spreads_over_rounds() -> None:
    figure = bench.Figure.of([[1.0, 2.0, 9.0], [4.0, 5.0, 6.0]])
    assert figure == bench.Figure(median=4.5, low=2.0, high=5.0)


def test_figure_of_one_round_spreads_over_steps() -> None:
    assert bench.Figure.of([[3.0, 1.0, 2.0]]) == bench.Figure(2.0, 1.0, 3.0)
    assert bench.Figure(62.14, 60.0, 1234.5).text("s") == "62.1 s (60.0..1,234)"


def test_row_has_workload_stage_and_ratio() -> None:
    found = {"ours": [[step(2.0, [50, 50])]], "trl": [[step(10.6, [51, 50])]]}
    first, second = bench.rows("tail", found)
    words = " ".join(first.split())
    assert words == "tail step ours 2.00 s (2.00..2.00) trl 10.6 s (10.6..10.6) 5.3x"
    assert second.split()[:2] == ["tail", "tokens"]
    assert second.endswith("1.01x")


def test_row_compares_by_the_token_where_tokens_differ() -> None:
    found = {"ours": [[step(2.0, [50, 50])]], "trl": [[step(10.0, [100, 100])]]}
    assert bench.rows("tail", found)[0].endswith("5.0x  by the token 2.5x")


def test_rows_of_memory_need_it_on_both_sides() -> None:
    ours, theirs = [[step(1.0, [9], 2**20)]], [[step(1.0, [9], 3 * 2**20)]]
    (memory,) = [r for r in bench.rows("tail", {"ours": ours, "trl": theirs}) if "memory" in r]
    assert "1.00 MiB" in memory
    assert memory.endswith("3.0x")
    unmeasured = bench.rows("tail", {"ours": ours, "trl": [[step(1.0, [9])]]})
    assert not [r for r in unmeasured if "memory" in r]


def test_prompts_have_as_many_tokens_as_asked_for() -> None:
    rows = bench_setup.make_prompts(50, (30, 130), half_flat=True)
    lengths = [len(r["prompt"]) for r in rows]
    assert min(lengths) >= 30
    assert max(lengths) <= 130
    assert len(set(lengths)) > 20
    assert [r["flat"] for r in rows[:4]] == [False, True, False, True]
    assert rows == bench_setup.make_prompts(50, (30, 130), half_flat=True)
    assert {len(r["prompt"]) for r in bench_setup.make_prompts(9, (12, 12), False)} == {12}


def test_tokens_are_characters() -> None:
    tokenizer = bench_setup.make_tokenizer(200)
    (row,) = bench_setup.make_prompts(1, (40, 40), half_flat=False)
    ids = tokenizer(row["prompt"])["input_ids"]
    assert len(ids) == 40
    assert tokenizer.decode(ids) == row["prompt"]
    assert len(tokenizer) == 200
    assert isinstance(tokenizer.decode([199]), str)


def test_reward_is_drawn_from_the_text() -> None:
    texts = [f"completion {i}" for i in range(2000)]
    rewards = bench_setup.reward(texts, [False] * 2000)
    assert rewards == bench_setup.reward(texts, [False] * 2000)
    assert sum(rewards) / 2000 == pytest.approx(0.3, abs=0.04)
    assert bench_setup.reward(texts, [True] * 2000) == [0.0] * 2000
    messages = [[{"content": "call"}, {"content": text}] for text in texts]
    assert bench_setup.reward(messages, [False] * 2000) == rewards


def test_sides_must_have_the_same_prompts() -> None:
    ours = [{"prompts": "a"}, {"prompts": "b"}]
    bench.check_prompts({"ours": ours, "trl": [*ours]})
    with pytest.raises(SystemExit, match="different prompts"):
        bench.check_prompts({"ours": ours, "trl": [*reversed(ours)]})


def test_a_job_comes_back_from_its_file_and_makes_a_recipe(tmp_path: Path) -> None:
    workload = replace(WORKLOADS["short"], prompts=2)
    job = Job("ours", workload, str(tmp_path), str(tmp_path), steps=2, bf16=False)
    job.write(tmp_path / "job.json")
    assert Job.read(str(tmp_path / "job.json")) == job
    recipe = bench_setup.make_recipe(job)
    assert recipe["prompts_per_step"] == 2
    assert recipe["generation"]["max_completion_tokens"] == 24
    recipe = bench_setup.make_recipe(replace(job, workload=WORKLOADS["tools"]))
    assert recipe["tools"] == {"multiply": bench_setup.TOOL}


def test_meter_sees_what_is_freed_again() -> None:
    with bench_probe.peak_memory(torch.device("cpu")) as seen:
        known = torch.ones(2**26)  # 256 MiB
        del known
    before, highest = seen
    assert highest - before == pytest.approx(2**28, rel=0.1)
