"""Completions are stored with the images of their prompts, and read again."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pyarrow.parquet
import pytest

from grpo_cli.data import conversations, images, stored_completions
from grpo_cli.data.rows import Rows
from grpo_cli.data.sample import Sample
from grpo_cli.data.stored_completions import check_readable, load, write_parquet
from grpo_cli.errors import UserError
from grpo_cli.evaluation import tables
from grpo_cli.evaluation.tasks import TaskResult
from grpo_cli.images import StoredImage
from grpo_cli.records import regrouped
from tests.conftest import make_group, make_rollout
from tests.pictures import PNG, image_groups, write_groups
from tests.test_images import encoded

BLOCK, TEXT = {"type": "image"}, {"type": "text", "text": "How red?"}


def test_datasets_shows_the_images_of_a_step(tmp_path: Path) -> None:
    write_groups(tmp_path / "step-1.parquet", image_groups())
    found = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "step-1.parquet"), split="train",
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    pictures = [row["images"] for row in found]
    assert [len(of_row) for of_row in pictures] == [1, 1, 0, 0, 1, 1]
    assert isinstance(pictures[0][0], PIL.Image.Image)
    assert [pictures[i][0].size for i in (0, 1, 4)] == [(30, 20), (30, 20), (6, 4)]
    assert found[5]["columns"] == '{"image": {"image": 0}, "answer": "1"}'
    assert "image of" not in "".join(found["columns"])


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    groups = image_groups()
    write_groups(tmp_path / "step-1.parquet", groups)
    read = load(tmp_path / "step-1.parquet", {}, "input")
    for sample, rollout in zip(read, [r for g in groups for r in g.rollouts], strict=True):
        written = Sample.of(rollout)
        assert sample.prompt == written.prompt
        assert sample.columns.keys() >= {"image", "answer"}
        assert "images" not in sample.columns
        assert [i.open().tobytes() for i in sample.images] == [
            i.open().tobytes() for i in written.images
        ]
        image = sample.columns["image"]
        assert image is None or image is sample.images[0]
    assert read[0].prompt == [{"role": "user", "content": [BLOCK, TEXT]}]


def test_an_evaluation_stores_them_too(tmp_path: Path) -> None:
    groups = image_groups()
    judged = [dataclasses.replace(r, reward_parts={"x": 1.0}) for g in groups for r in g.rollouts]
    task: Any = SimpleNamespace(name="mine", mode="cot", right="x")
    result = TaskResult(task, {}, regrouped(groups, judged))
    rows = [*tables.completion_rows([result])]
    write_parquet(tmp_path / "completions.parquet", rows)
    read = load(tmp_path / "completions.parquet", {}, "input")
    sizes = [[i.open().size for i in sample.images] for sample in read]
    assert sizes == [[(30, 20)]] * 2 + [[]] * 2 + [[(6, 4)]] * 2


def test_pictures_in_messages_are_read_again(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": [{"type": "image", "image": {"bytes": PNG}}, TEXT]}]
    row = {"messages": asked, "answer": "1"}
    rows = Rows("x.parquet", [*row], [row])
    messages = conversations.normalized(asked, "row 0", "messages")
    found = images.of_row(rows, 0, row, messages, 600)
    rollout = make_rollout(prompt=found.prompt, columns={**row, **found.columns}, text="1")
    shown = dataclasses.replace(rollout.prompt, images=found.images)
    rollout = dataclasses.replace(rollout, prompt=shown)
    write_groups(tmp_path / "a.parquet", [make_group(0, [rollout])])
    (sample,) = load(tmp_path / "a.parquet", {}, "input")
    (image,) = sample.images
    assert image.size == (30, 20)
    assert sample.columns["messages"][0]["content"] == [{**BLOCK, "image": image}, TEXT]


def test_an_image_that_fits_keeps_its_bytes_and_a_larger_one_is_stored_small() -> None:
    jpeg = encoded(PIL.Image.effect_noise((64, 64), 50), "JPEG")
    assert StoredImage(jpeg, "").encoded() == {"bytes": jpeg, "path": None}
    small = StoredImage(jpeg, "", max_pixels=64).encoded()["bytes"]
    assert len(small) < len(jpeg)
    resized = StoredImage(jpeg, "", max_pixels=64).open()
    assert StoredImage(small, "").open().tobytes() == resized.tobytes()


def test_a_path_is_stored_with_its_picture_and_a_file_that_is_gone_is_null(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(PNG)
    rows: list[dict[str, Any]] = [
        {"prompt": "?", "image": str(tmp_path / "red.png")},
        {"prompt": "?", "image": str(tmp_path / "gone.png")},
    ]
    write_groups(tmp_path / "a.parquet", image_groups(rows, 1, None))
    first, second = load(tmp_path / "a.parquet", {}, "input")
    assert first.images[0].encoded()["bytes"] == PNG
    with pytest.raises(UserError, match=r"a.parquet, row 1, column 'images': holds no images"):
        check_readable([first.columns, second.columns], "input")


def test_a_file_holds_an_image_once_for_all_completions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = [
        encoded(PIL.Image.fromarray(np.random.default_rng(n).integers(0, 256, (176, 176), "u1")))
        for n in range(12)
    ]
    rows = [{"prompt": "?", "image": {"bytes": one}} for one in noise]
    path = tmp_path / "a.parquet"
    write_groups(path, image_groups(rows, 60, None))
    total = sum(map(len, noise))
    assert total < path.stat().st_size < 1.2 * total
    monkeypatch.setattr(stored_completions, "ROW_GROUP_BYTES", 150 * len(noise[0]))
    write_groups(path, image_groups(rows, 60, None))
    assert pyarrow.parquet.ParquetFile(path).num_row_groups == 5
    stored = pyarrow.parquet.read_table(path)["images"].to_pylist()
    assert [cell[0]["bytes"] for cell in stored] == [one for one in noise for _ in range(60)]


def test_images_that_were_not_written_are_told(tmp_path: Path) -> None:
    write_groups(tmp_path / "a.parquet", image_groups(), images=False)
    read = load(tmp_path / "a.parquet", {}, "input")
    assert read[0].images == ()
    check_readable([s.columns for s in read[2:4]], "input")
    with pytest.raises(UserError, match=r"a\.parquet: holds no images, which the rewards read"):
        check_readable([s.columns for s in read], "input")


def test_a_users_own_file_has_images_in_columns_and_messages(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(PNG)
    rows: list[dict[str, Any]] = [
        {"completion": "4", "image": "red.png"},
        {"completion": "4", "prompt": "How red?", "image": "red.png"},
        {"completion": "4", "prompt": [{"role": "user", "content": "How red?"}],
         "image": "red.png"},
        {"completion": "4", "prompt": [{"role": "user", "content": [
            {"type": "image", "image": "red.png"}, TEXT]}]},
    ]  # fmt: skip
    for row in rows:
        (tmp_path / "own.jsonl").write_text(json.dumps(row) + "\n")
        (sample,) = load(tmp_path / "own.jsonl", {}, "input")
        (image,) = sample.images
        assert image.open().getpixel((0, 0)) == (255, 0, 0)
        if isinstance(row.get("prompt"), list):
            assert sample.prompt[0]["content"] == [BLOCK, TEXT]
        if "image" in row:
            assert sample.columns["image"] is image
