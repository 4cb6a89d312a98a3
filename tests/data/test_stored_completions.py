"""Episodes are stored as text beside their completion, and read again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_cli.data.sample import Sample
from grpo_cli.data.stored_completions import completion_row, episode_cells, load, write_parquet
from tests.conftest import make_group, make_rollout
from tests.episodes import MESSAGES, make_episode


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_an_episode_that_a_run_has_written_is_read_again(ending: str, tmp_path: Path) -> None:
    scored = make_episode((0.5, None), env_rewards={"Guess": 1.0}, env_metrics={"wrong": 2.0})
    failed = make_episode((None,), stop_reason="env_error", messages=(), env_error="no answer")
    group = make_group(0, [scored, failed, make_rollout()])
    rows = [completion_row(3, group, i) for i in range(3)]
    path = tmp_path / f"step-3.{ending}"
    if ending == "parquet":
        write_parquet(path, rows)
    else:
        path.write_text(
            "".join(json.dumps(row, default=np.ndarray.tolist) + "\n" for row in rows), "utf-8"
        )
    samples = load(path, {}, "input")
    assert [s.episode for s in samples] == [Sample.of(r).episode for r in group.rollouts]
    assert samples[0].episode is not None
    assert samples[2].episode is None
    assert episode_cells(group.rollouts[2].completion) == {}
    assert samples[0].episode["messages"] == list(MESSAGES)
    assert [s.environment_failed for s in samples] == [False, True, False]
    assert list(samples[0].columns["sampled"]) == [True, True, False, False, True, True]
    assert samples[1].columns["env_error"] == "no answer"
    assert not samples[0].columns.keys() & {"messages", "turns", "stop_reason", "env_rewards"}


def test_a_users_own_columns_are_no_episode(tmp_path: Path) -> None:
    row: dict[str, Any] = {"completion": "4", "messages": [{"role": "user", "content": "2+2"}]}
    row |= {"stop_reason": "done"}
    (tmp_path / "own.jsonl").write_text(json.dumps(row) + "\n", "utf-8")
    (sample,) = load(tmp_path / "own.jsonl", {}, "input")
    assert sample.episode is None
    assert sample.columns["messages"] == row["messages"]
