"""`grpo show`: which completions are printed."""

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from grpo_cli.data.stored_completions import completion_row, write_parquet
from tests.conftest import Grpo, make_group, make_rollout
from tests.episodes import make_episode


@pytest.fixture
def show(grpo: Grpo) -> Grpo:
    """Runs a command line in a folder with a run that has stored completions of two steps."""
    for step in (1, 20):
        groups = []
        for row, rewards in ((4, (math.nan, 0.5)), (7, (0.9, -1.0))):
            plain = make_rollout(text=f"plain {step}", row=row, reward=rewards[1])
            episode = replace(make_episode((0.5, None)), prompt=plain.prompt, reward=rewards[0])
            rollouts = [episode, plain]
            groups.append(make_group(row, rollouts))
        rows = [completion_row(step, g, i) for g in groups for i in range(2)]
        write_parquet(Path("run/completions") / f"step-{step}.parquet", rows)
    return partial(grpo, "show")


def test_the_newest_step(show: Grpo) -> None:
    code, out, err = show("run", "--number", "2")
    assert (code, err) == (0, "")
    assert out.count("· row 4 ·") == 2
    assert "reward of the turn: 0.5" in out
    assert "plain 20" in out
    assert out.endswith("2 of 4 completions in run/completions/step-20.parquet\n")


def test_a_step_a_row_and_a_file(show: Grpo) -> None:
    code, out, _ = show("run", "--step=1", "--row=7")
    assert code == 0
    assert "· row 7 ·" in out
    assert "· row 4 ·" not in out
    assert "plain 1\n" in out
    assert out.endswith("2 of 2 completions in run/completions/step-1.parquet\n")
    assert show("run/completions/step-1.parquet")[1].count("step 1 ·") == 3


@pytest.mark.parametrize(("order", "numbers"), [("best", "0.9 0.5 -1"), ("worst", "-1 0.5 0.9")])
def test_by_reward(show: Grpo, order: str, numbers: str) -> None:
    _, out, _ = show("run", f"--order={order}", "--number=4")
    found = re.findall(r"· (no reward|reward \S+)", out)
    assert found == [*(f"reward {number}" for number in numbers.split()), "no reward"]
