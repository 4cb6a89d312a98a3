"""Completions by reward, read without the columns of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_cli.reporting.live.completions import Pages
from grpo_cli.reporting.reporter import completion_row, write_parquet
from tests.conftest import make_group, make_rollout
from tests.episodes import make_episode
from tests.pictures import image_groups, write_groups


def store(path: Path, rewards: list[float]) -> Path:
    rollouts = [
        make_rollout(prompt="1+1=", text=f"answer {i}", reward=r, parts={"exact": r})
        for i, r in enumerate(rewards)
    ]
    group = make_group(0, rollouts)
    write_parquet(path, [completion_row(3, group, i) for i in range(len(rewards))])
    return path


def test_good_ones_from_the_highest_and_bad_ones_from_the_lowest(tmp_path: Path) -> None:
    pages = Pages(store(tmp_path / "a.parquet", [0.5, 0.0, 1.0, float("nan"), 0.1]))
    assert pages.orders == {"good": [2, 0], "bad": [1, 4], "all": [0, 1, 2, 3, 4]}
    sample = pages.sample(2)
    assert (sample.text, sample.prompt) == ("answer 2", "1+1=")
    assert sample.columns["rewards/exact"] == 1.0
    assert pages.sample(3).columns["reward"] is None


def test_a_prompt_that_only_looks_like_a_conversation_is_a_text(tmp_path: Path) -> None:
    prompt = '[{"role": "x"}, null]'
    group = make_group(0, [make_rollout(prompt=prompt, text="a", reward=1.0)])
    write_parquet(tmp_path / "a.parquet", [completion_row(3, group, 0)])
    assert Pages(tmp_path / "a.parquet").sample(0).prompt == f" {prompt}"


def test_equal_rewards_are_good_and_bad(tmp_path: Path) -> None:
    pages = Pages(store(tmp_path / "a.parquet", [1.0, 1.0]))
    assert pages.orders == {"good": [0, 1], "bad": [0, 1], "all": [0, 1]}
    without = Pages(store(tmp_path / "b.parquet", [float("nan")] * 2))
    assert without.orders["good"] == [0, 1]


def test_columns_of_tokens_are_read_of_episodes_only(tmp_path: Path) -> None:
    pages = Pages(store(tmp_path / "a.parquet", [1.0]))
    assert not {"prompt_ids", "completion_ids", "sampling_logprobs"} & {*pages.table.column_names}
    episode = make_episode((0.5, None))
    group = make_group(0, [episode])
    write_parquet(tmp_path / "b.parquet", [completion_row(3, group, 0)])
    sample = Pages(tmp_path / "b.parquet").sample(0)
    assert sample.episode is not None
    assert sample.ids == episode.completion.ids
    turns = [turn for turn in sample.episode["turns"] if turn["by"] == "model"]
    assert turns[0]["reward"] == 0.5


def test_images_are_not_read(tmp_path: Path) -> None:
    write_groups(tmp_path / "a.parquet", image_groups())
    pages = Pages(tmp_path / "a.parquet")
    assert "images" not in pages.table.column_names
    assert pages.sample(0).images == ()


def test_what_is_no_file_of_completions(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"a\.parquet"):
        Pages(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_text("no parquet", encoding="utf-8")
    with pytest.raises(ValueError, match="Parquet"):
        Pages(tmp_path / "b.parquet")
