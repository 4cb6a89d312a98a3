"""`grpo score` of completions with images: rewards receive them; mistakes in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import PIL.Image
import pytest

from grpo_cli import cli
from tests.pictures import PNG, image_groups, write_groups
from tests.tables import table
from tests.test_images import encoded

Grpo = Callable[..., tuple[int, str, str]]
REWARDS = """
def reds_of(i):
    return 0.0 if i is None else float(sum(n for n, c in i.getcolors(10000) if c == (255, 0, 0)))

def red_pixels(completions, image):
    return [reds_of(i) for i in image]

def length(completions):
    return [float(len(c[-1]["content"])) for c in completions]
"""
RED_PIXELS = "+reward.red.function=reds:red_pixels"
LENGTH = "+reward.length.function=reds:length"


@pytest.fixture
def grpo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Grpo:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "reds.py").write_text(REWARDS)

    def run(*words: str) -> tuple[int, str, str]:
        code = cli.run_command(["score", *words])
        out, err = capfd.readouterr()
        return code, out, err

    return run


@table(
    ("words", "expected"),
    [
        ([], [600.0, 600.0, 0.0, 0.0, 24.0, 24.0]),
        (["reward.red.timeout=20"], [600.0, 600.0, 0.0, 0.0, 24.0, 24.0]),
    ],
)
def test_a_reward_counts_the_red_pixels_of_a_runs_completions(
    grpo: Grpo, words: list[str], expected: list[float], tmp_path: Path
) -> None:
    write_groups(tmp_path / "run/completions/step-1.parquet", image_groups())
    code, out, err = grpo(RED_PIXELS, "input=run", *words)
    assert (code, err) == (0, ""), out
    lines = (tmp_path / "outputs/score/run-step-1.jsonl").read_text().splitlines()
    assert [json.loads(line)["reward"] for line in lines] == expected


def test_a_truncated_picture_is_named_with_row_and_column(grpo: Grpo, tmp_path: Path) -> None:
    noisy = encoded(PIL.Image.effect_noise((200, 200), 50))
    rows = [
        {"prompt": "?", "image": {"bytes": PNG}},
        {"prompt": "?", "image": {"bytes": noisy[: len(noisy) // 2]}},
    ]
    write_groups(tmp_path / "cut.parquet", image_groups(rows, 2, None))
    code, out, err = grpo(RED_PIXELS, "input=cut.parquet")
    assert (code, out) == (2, "")
    assert "input = cut.parquet, row 2, column 'images': the image cannot be read: " in err
    assert err.count("\n") == 1
    assert grpo(LENGTH, "input=cut.parquet")[0] == 0


def test_images_that_the_run_has_not_written(grpo: Grpo, tmp_path: Path) -> None:
    write_groups(tmp_path / "a.parquet", image_groups(), images=False)
    code, _, err = grpo(RED_PIXELS, "input=a.parquet")
    assert code == 2
    assert "a.parquet: holds no images, which the rewards read" in err
    assert grpo(LENGTH, "input=a.parquet")[0] == 0


def test_a_users_own_file_with_paths(grpo: Grpo, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/red.png").write_bytes(PNG)
    row = {"completion": "4", "picture": "red.png"}
    (tmp_path / "data/own.jsonl").write_text(json.dumps(row) + "\n")
    words = (RED_PIXELS, "input=data/own.jsonl", "columns.image=picture", "output=o.jsonl")
    assert grpo(*words)[0] == 0
    assert json.loads((tmp_path / "o.jsonl").read_text())["reward"] == 2400.0
    row["picture"] = "gone.png"
    (tmp_path / "data/own.jsonl").write_text(json.dumps(row) + "\n")
    code, _, err = grpo(*words)
    assert code == 2
    assert "input = data/own.jsonl, row 0, column 'image': the image cannot be read: " in err


def test_one_row_of_a_recipe_with_its_image(grpo: Grpo) -> None:
    words = ("recipe=shapes_tiny", "row=3", "completion=2", RED_PIXELS)
    code, out, err = grpo(*words)
    assert (code, err) == (0, ""), out
    assert "shapes_train.parquet, row 3, column 'image'" in " ".join(out.split())
