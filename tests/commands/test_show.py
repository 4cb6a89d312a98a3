"""`grpo show`: which completions are printed, and mistakes in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import PIL.Image
import pytest

from grpo_cli import cli
from grpo_cli.reporting.reporter import completion_row, write_parquet
from tests.conftest import make_group, make_rollout
from tests.episodes import make_episode
from tests.pictures import image_groups, write_groups
from tests.tables import table
from tests.test_images import RED, encoded

Grpo = Callable[..., tuple[int, str, str]]


@pytest.fixture
def grpo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Grpo:
    """Runs `grpo show ...` beside a run with completions of two steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for step in (1, 20):
        groups = []
        for row in (4, 7):
            rollouts = [make_episode((0.5, None)), make_rollout(text=f"plain {step}", row=row)]
            rollouts[0].prompt = rollouts[1].prompt
            groups.append(make_group(row, rollouts))
        rows = [completion_row(step, g, i) for g in groups for i in range(2)]
        write_parquet(Path("run/completions") / f"step-{step}.parquet", rows)
    Path("empty").mkdir()

    def run(*words: str) -> tuple[int, str, str]:
        code = cli.run_command(["show", *words])
        out, err = capfd.readouterr()
        return code, out, err

    return run


def test_the_newest_step(grpo: Grpo) -> None:
    code, out, err = grpo("run", "--number", "2")
    assert (code, err) == (0, "")
    assert out.count("· row 4 ·") == 2
    assert "reward of the turn: 0.5" in out
    assert "plain 20" in out
    assert out.endswith("2 of 4 completions in run/completions/step-20.parquet\n")


def test_a_step_a_row_and_a_file(grpo: Grpo) -> None:
    code, out, _ = grpo("run", "--step=1", "--row=7")
    assert code == 0
    assert "· row 7 ·" in out
    assert "· row 4 ·" not in out
    assert "plain 1\n" in out
    assert out.endswith("2 of 2 completions in run/completions/step-1.parquet\n")
    assert grpo("run/completions/step-1.parquet")[1].count("step 1 ·") == 3


@table(
    ("words", "said"),
    [
        (["run", "--step=3"], "--step = 3: run has no completions of this step; it has those of "
         "the steps 1, 20 (log.completions_every)."),
        (["run", "--row=5"], "--row = 5: run/completions/step-20.parquet holds no completions of "
         "this row."),
        (["run", "--number=0"], "--number = 0: must be >= 1."),
        (["run", "--step=x"], "--step = x: must be a whole number, >= 1."),
        (["run", "--nmber=1"], "there is no such option"),
        (["empty"], "RUN = empty: holds no completions"),
        (["empty", "--step=1"], "--step = 1: empty is no run with stored completions."),
        (["nowhere"], "RUN = nowhere: there is no such folder or file."),
        (["--step=1"], "grpo show: give one run, such as outputs/NAME; got nothing."),
        (["run", "other"], "got run other."),
    ],
)  # fmt: skip
def test_mistakes(grpo: Grpo, words: list[str], said: str) -> None:
    code, out, err = grpo(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_the_images_of_a_prompt(grpo: Grpo) -> None:
    write_groups(Path("run/completions/step-30.parquet"), image_groups())
    code, out, err = grpo("run", "--number=6", "--images=pictures/here")
    assert (code, err) == (0, "")
    assert out.count("<image>") == 4
    assert out.count("1 image: 30 x 20") == 2
    assert out.count("1 image: 6 x 4") == 2
    assert out.endswith("2 images written to pictures/here\n")
    assert PIL.Image.open("pictures/here/row-0-image-0.png").size == (30, 20)
    assert sorted(p.name for p in Path("pictures/here").iterdir()) == [
        "row-0-image-0.png", "row-2-image-0.png",
    ]  # fmt: skip
    Path("file").touch()
    code, _, err = grpo("run", "--images=file")
    assert (code, err) == (2, "grpo: --images = file: cannot be written: File exists.\n")


def test_benchmarks_with_rows_of_the_same_numbers_have_pictures_of_their_own(grpo: Grpo) -> None:
    pictures = [{"image": {"bytes": encoded(RED.resize((n, 2))), "path": None}} for n in (4, 5)]
    rows = [
        {"benchmark": name, "row": 0, "prompt": "?", "completion": "", **cell}
        for name, cell in zip(("one", "two"), pictures, strict=True)
    ]
    write_parquet(Path("both.parquet"), rows)
    code, out, err = grpo("both.parquet", "--images=pictures")
    assert (code, err) == (0, "")
    assert out.endswith("2 images written to pictures\n")
    sizes = {p.name: PIL.Image.open(p).size for p in Path("pictures").iterdir()}
    assert sizes == {"one-row-0-image-0.png": (4, 2), "two-row-0-image-0.png": (5, 2)}


def test_images_stay_in_the_folder(grpo: Grpo) -> None:
    """A file of completions may hold any text as the name of a benchmark or the number of a row."""
    cells = {"row": "/0", "prompt": "?", "completion": "!", "image": encoded(RED)}
    rows = [{"benchmark": name, **cells} for name in ("../../out-", "b")]
    write_parquet(Path("theirs.parquet"), rows)
    code, _, err = grpo("theirs.parquet", "--images=a/pictures")
    assert (code, err) == (0, "")
    assert sorted(p.name for p in Path("a/pictures").iterdir()) == [
        "__.._out--row-_0-image-0.png",
        "b-row-_0-image-0.png",
    ]


def test_no_image_is_read_from_a_path_that_a_run_would_not_store(grpo: Grpo) -> None:
    RED.save("private.png")
    cell = {"bytes": None, "path": str(Path("private.png").resolve())}
    row = {"prompt": "?", "completion": "!", "columns": '{"image": {"image": 0}}'}
    Path("theirs.jsonl").write_text(json.dumps({**row, "images": [cell]}))
    code, _, err = grpo("theirs.jsonl", "--images=pictures")
    assert code == 2
    assert "--images: theirs.jsonl, row 0, column 'images': the image cannot be read: it is" in err


def test_an_image_that_is_cut_off(grpo: Grpo) -> None:
    noisy = encoded(PIL.Image.effect_noise((200, 200), 50))
    rows = [{"prompt": "?", "image": {"bytes": noisy[:-900]}}]
    write_groups(Path("a.parquet"), image_groups(rows, 1, None))
    code, out, _ = grpo("a.parquet")
    assert code == 0
    assert "1 image: 200 x 200" in out
    code, _, err = grpo("a.parquet", "--images=pictures")
    assert code == 2
    assert "--images: a.parquet, row 0, column 'images': the image cannot be read: " in err
    assert err.count("\n") == 1


def test_help(grpo: Grpo) -> None:
    assert "--row" in grpo("--help")[1]
    assert grpo()[0] == 0
