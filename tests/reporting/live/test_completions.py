"""The completions with the highest and the lowest reward, read without the columns of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_cli.reporting.live.completions import best_and_worst
from grpo_cli.reporting.reporter import completion_row, write_parquet
from tests.conftest import make_group, make_rollout
from tests.episodes import make_episode
from tests.pictures import image_groups, write_groups
from tests.tables import table

NAN = float("nan")


@table(
    ("rewards", "expected"),
    [([0.5, 0.0, 1.0, NAN, 0.1], [2, 1]), ([1.0, 1.0], [0]), ([NAN, NAN], [0])],
)
def test_the_highest_and_the_lowest_reward(
    tmp_path: Path, rewards: list[float], expected: list[int]
) -> None:
    rollouts = [make_rollout(prompt="1+1=", text=f"{i}", reward=r) for i, r in enumerate(rewards)]
    group = make_group(0, rollouts)
    path = tmp_path / "a.parquet"
    write_parquet(path, [completion_row(3, group, i) for i in range(len(rewards))])
    found = best_and_worst(path)
    assert [sample.text for sample in found] == [str(i) for i in expected]
    assert found[0].prompt == "1+1="
    assert found[0].ids is None, "columns of tokens are read of episodes only"


def test_an_episode_has_its_turns(tmp_path: Path) -> None:
    episode = make_episode((0.5, None))
    write_parquet(tmp_path / "b.parquet", [completion_row(3, make_group(0, [episode]), 0)])
    (sample,) = best_and_worst(tmp_path / "b.parquet")
    assert sample.episode is not None
    assert sample.ids == episode.completion.ids
    turns = [turn for turn in sample.episode["turns"] if turn["by"] == "model"]
    assert turns[0]["reward"] == 0.5


def test_images_are_not_read(tmp_path: Path) -> None:
    write_groups(tmp_path / "a.parquet", image_groups())
    assert best_and_worst(tmp_path / "a.parquet")[0].images == ()


def test_what_is_no_file_of_completions(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"a\.parquet"):
        best_and_worst(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_text("no parquet", encoding="utf-8")
    with pytest.raises(ValueError, match="Parquet"):
        best_and_worst(tmp_path / "b.parquet")
