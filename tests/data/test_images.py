"""Images of rows: columns, messages, placeholders."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest

from grpo_cli.data import images
from grpo_cli.data.prompts import MixtureStream, images_of, prompt_text
from grpo_cli.data.rows import Rows, load_rows
from grpo_cli.data.settings import Dataset
from grpo_cli.errors import UserError
from grpo_cli.images import ImageError, StoredImage
from grpo_cli.records import Group, Prompt, rollout_stats
from grpo_cli.scoring.guards import opened
from tests.conftest import make_rollout
from tests.test_images import RED, encoded

CHAT = Dataset(chat=True, prompt="{prompt}")
PNG = encoded(RED)
ASKED = [{"role": "user", "content": "How many?"}]
IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "How many?"}


def of(row: dict[str, Any]) -> images.ImageRow:
    rows = Rows("x.parquet", list(row), [row])
    return images.of_row(rows, 0, row, prompt_text(row, CHAT, 0), None)


@pytest.mark.parametrize(
    ("row", "count"),
    [({"image": PNG}, 1), ({"images": [PNG, PNG]}, 2), ({"images": [], "image": PNG}, 1)],
)
def test_images_of_a_column_stand_before_the_users_text(row: dict[str, Any], count: int) -> None:
    system = {"role": "system", "content": "Look."}
    found = of({**row, "prompt": [system, *ASKED]})
    assert found.prompt == [system, {"role": "user", "content": [IMAGE] * count + [TEXT]}]
    assert [i.size for i in found.images] == [(60, 40)] * count
    (column,) = found.columns
    assert isinstance(found.columns[column], list) == (column == "images")


def test_a_path_in_a_folder_of_folders_begins_at_a_files_folder(tmp_path: Path) -> None:
    """The outer folder goes first; what lies in several inner ones is not guessed."""
    for name, width in {".": 3, "a": 4, "b": 5}.items():
        (tmp_path / name).mkdir(exist_ok=True)
        RED.resize((width, 2)).save(tmp_path / name / f"{width}.png")
        RED.resize((width, 2)).save(tmp_path / name / "each.png")
        if name != ".":
            RED.resize((width, 2)).save(tmp_path / name / "both.png")
            (tmp_path / name / "rows.jsonl").write_text("{}")

    def of_path(path: str, source: str) -> StoredImage:
        row = {"image": path, "prompt": ASKED}
        rows = Rows(source, list(row), [row])
        (image,) = images.of_row(rows, 0, row, ASKED, None).images
        return image

    for source in (str(tmp_path), str(tmp_path / "*" / "rows.jsonl")):
        sizes = [of_path(f, source).size for f in ("3.png", "4.png", "5.png", "each.png")]
        assert sizes == [(3, 2), (4, 2), (5, 2), (3, 2)]
        with pytest.raises(ImageError, match=r"both.png may be any of .*/a/both.png, .*/b/"):
            _ = of_path("both.png", source).size
        with pytest.raises(ImageError, match="No such file"):
            _ = of_path("c.png", source).size
    one = str(tmp_path / "a" / "rows.jsonl")
    assert of_path("both.png", one).size == (4, 2)


def test_placeholders_are_filled_in_their_order() -> None:
    prompt = [
        {"role": "user", "content": [TEXT, IMAGE, TEXT, {"type": "image", "image": None}]},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": [IMAGE, TEXT]},
    ]
    small = encoded(RED.resize((3, 2)))
    found = of({"prompt": prompt, "images": [PNG, small, PNG]})
    assert [i.size for i in found.images] == [(60, 40), (3, 2), (60, 40)]
    assert found.prompt[0]["content"] == [TEXT, IMAGE, TEXT, IMAGE]
    assert found.prompt[1] == prompt[1]


def test_image_in_a_text_is_a_placeholder() -> None:
    asked = [{"role": "user", "content": "<image>Left of<image>?"}]
    found = of({"prompt": asked, "images": [PNG, PNG]})
    texts = [{"type": "text", "text": text} for text in ("Left of", "?")]
    assert found.prompt[0]["content"] == [IMAGE, texts[0], IMAGE, texts[1]]


BY_URL = {"type": "image_url", "image_url": {"url": "https://x/y.png"}}


@pytest.mark.parametrize(
    ("content", "columns", "words"),
    [
        ("How many?", {"images": [PNG], "image": PNG}, "columns image, images; keep one"),
        ("<image>Left of<image>?", {"images": [PNG]}, "2 placeholders for images, and there are 1"),
        ([IMAGE, TEXT], {"images": [PNG] * 2}, "1 placeholders for images, and there are 2 images"),
        ([IMAGE, TEXT], {"images": []}, "1 placeholders for images, and there are 0 images"),
        ([BY_URL], {}, "message 0: names an image by a URL"),
        ([5, IMAGE], {}, "message 0: has the block 5; a content is a text, or a list of blocks"),
        ([{"type": "video"}, IMAGE], {}, "message 0: has the block {'type': 'video'}; a content"),
        ([{"type": "text"}, IMAGE], {}, "message 0: has the block {'type': 'text'}; a content"),
    ],
)
def test_what_cannot_be_filled_is_refused(
    content: Any, columns: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as error:
        of({"prompt": [{"role": "user", "content": content}], **columns})
    assert str(error.value).startswith(("row 0", "x.parquet, row 0"))
    assert words in str(error.value)


def test_images_need_a_chat() -> None:
    rows = Rows("x.parquet", ["image"], [{"image": PNG}])
    with pytest.raises(UserError, match=r"x.parquet, row 0: .* set dataset.chat=true"):
        images.of_row(rows, 0, rows.rows[0], "How many?", None)


@pytest.mark.parametrize(
    ("row", "where"), [({"image": PNG}, "the column 'image'"), ({}, "the messages")]
)
def test_a_model_of_text_refuses_images(row: dict[str, Any], where: str) -> None:
    content: Any = "Hi" if row else [IMAGE, TEXT]
    texts = [ASKED, [{"role": "user", "content": content}]]
    rows = Rows("x.parquet", ["image"], [{"image": None}, row])
    with pytest.raises(UserError, match=f"row 1: has images in {where}, and the model reads text"):
        images_of(rows, texts, None, reads_images=False)


def test_rows_without_images_are_text() -> None:
    rows = Rows("x.parquet", ["image"], [{"image": None}, {"images": []}])
    found = images_of(rows, [ASKED, ASKED], None, reads_images=False)
    assert [(row.prompt, row.images) for row in found] == [(ASKED, ())] * 2


def test_images_of_a_file_stay_encoded_until_they_are_read(tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict(
        {
            "prompt": [ASKED] * 2,
            "image": [{"bytes": PNG, "path": None}, {"bytes": b"?", "path": ""}],
        },
        features=datasets.Features(
            {
                "prompt": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
                "image": datasets.Image(),
            }
        ),
    )
    table.to_parquet(tmp_path / "x.parquet")
    config = Dataset(train=str(tmp_path / "x.parquet"), chat=True)
    rows = load_rows(config, "train")
    assert rows.rows[1]["image"]["bytes"] == b"?"  # which no decoder has seen
    found = images.of_row(rows, 0, rows.rows[0], prompt_text(rows.rows[0], config, 0), 600)
    assert found.images[0].open().size == (30, 20)


def test_a_column_of_messages_keeps_no_picture() -> None:
    block = {"type": "image", "image": {"bytes": PNG, "path": None}, "text": None}
    asked = [{"role": "user", "content": [block, {**TEXT, "image": None}]}]
    row = {"messages": asked, "answer": "1"}
    rows = Rows("x.parquet", list(row), [row])
    config = Dataset(chat=True, prompt="{messages}")
    found = images.of_row(rows, 0, row, prompt_text(row, config, 0), None)
    (image,) = found.images
    stored = found.columns["messages"][0]["content"]
    assert stored[0] == {**block, "image": image}
    assert stored[1] == asked[0]["content"][1]
    given = opened(found.columns)
    assert given["messages"][0]["content"][0]["image"].size == (60, 40)
    assert opened({"a": [1, {"b": "c"}]}) == {"a": [1, {"b": "c"}]}


def test_the_next_prompt_takes_the_place_of_a_broken_one() -> None:
    """Its row is what the outcomes of every process name, and its data set what metrics name."""

    def is_sound(prompt: Prompt) -> bool:
        read.append(prompt.row)
        return prompt.row != 0

    read: list[int] = []
    prompts = [Prompt(n, [5], "", {}, images=(StoredImage(b"", ""),)) for n in range(2)]
    stream = MixtureStream(
        {"a": prompts[:1], "b": prompts[1:]}, {"a": 1, "b": 1}, 1, False, is_sound
    )
    listed = [prompt.row for _, prompt in stream.take(0, 2)]
    assert listed == [0, 1]
    assert read == []  # other processes list prompts without reading their images
    sampled = stream.prompt_at(0)
    assert (sampled.row, read) == (1, [0, 1])
    rollout = replace(make_rollout(), prompt=sampled)
    ((_, (outcome,)),) = rollout_stats([Group(0, sampled, [rollout])])
    assert (outcome.row, stream.name_of[outcome.row]) == (1, "b")
