"""`grpo score` of completions with images: rewards receive them; mistakes in one sentence."""

import json
from pathlib import Path

import pytest

from tests.conftest import Grpo
from tests.pictures import PNG, image_groups, write_groups
from tests.tables import table

REWARDS = """
def reds_of(i):
    return 0.0 if i is None else float(sum(n for n, c in i.getcolors(10000) if c == (255, 0, 0)))

def red_pixels(completions, image):
    return [reds_of(i) for i in image]
"""
RED_PIXELS = "+reward.red.function=reds:red_pixels"


@pytest.fixture(autouse=True)
def _reds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "reds.py").write_text(REWARDS)


@table("words", [[], ["reward.red.timeout=20"]])
def test_a_reward_counts_the_red_pixels_of_a_runs_completions(
    grpo: Grpo, words: list[str], tmp_path: Path
) -> None:
    write_groups(tmp_path / "run/completions/step-1.parquet", image_groups())
    code, out, err = grpo("score", RED_PIXELS, "input=run", *words)
    assert (code, err) == (0, ""), out
    lines = (tmp_path / "outputs/score/run-step-1.jsonl").read_text().splitlines()
    expected = [600.0, 600.0, 0.0, 0.0, 24.0, 24.0]
    assert [json.loads(line)["reward"] for line in lines] == expected


def test_a_users_own_file_with_paths(grpo: Grpo, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/red.png").write_bytes(PNG)
    row = {"completion": "4", "picture": "red.png"}
    (tmp_path / "data/own.jsonl").write_text(json.dumps(row) + "\n")
    words = ("score", RED_PIXELS, "input=data/own.jsonl", "columns.image=picture", "output=o.jsonl")
    assert grpo(*words)[0] == 0
    assert json.loads((tmp_path / "o.jsonl").read_text())["reward"] == 2400.0
    row["picture"] = "gone.png"
    (tmp_path / "data/own.jsonl").write_text(json.dumps(row) + "\n")
    code, _, err = grpo(*words)
    assert code == 2
    assert "input = data/own.jsonl, row 0, column 'image': the image cannot be read: " in err
