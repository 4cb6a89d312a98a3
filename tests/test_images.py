"""Stored images: what is read, when, and the sentence for what cannot be."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from grpo_cli.images import Cell, ImageError, StoredImage


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


RED = Image.new("RGB", (60, 40), "red")


@pytest.mark.parametrize("form", ["path", "bytes", "dict", "dict of a path", "pil"])
def test_every_form_of_a_picture_is_read(form: str, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(encoded(RED))
    source: Any = {
        "path": "red.png",
        "bytes": encoded(RED),
        "dict": {"bytes": encoded(RED), "path": None},
        "dict of a path": {"bytes": None, "path": "red.png"},
        "pil": RED,
    }[form]
    image = StoredImage(source, "row 0", folder=str(tmp_path))
    assert image.size == (60, 40)
    assert image.open().getpixel((5, 5)) == (255, 0, 0)


def test_grey_of_16_bits_is_scaled() -> None:
    values = np.array([[0, 256, 32768, 65535]], np.uint16)
    image = StoredImage(encoded(Image.fromarray(values)), "here").open()
    assert [image.getpixel((x, 0)) for x in range(4)] == [(v, v, v) for v in (0, 1, 128, 255)]


def test_transparent_parts_are_white_and_grey_is_rgb() -> None:
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    assert StoredImage(encoded(clear), "").open().getpixel((0, 0)) == (255, 255, 255)
    assert StoredImage(encoded(Image.new("L", (4, 4), 7)), "").open().getpixel((0, 0)) == (7, 7, 7)


def test_a_cell_is_read_when_its_image_is() -> None:
    table: list[dict[str, Any]] = [{"images": [encoded(RED)]}]
    image = StoredImage(Cell(table, 0, ("images", 0)), "row 0")
    table[0]["images"] = [encoded(Image.new("RGB", (8, 8)))]
    assert image.size == (8, 8)
    del table[0]
    with pytest.raises(IndexError):
        image.open()


def test_pickled_it_holds_its_bytes() -> None:
    image = StoredImage(Cell([{"image": encoded(RED)}], 0, ("image",)), "row 0", 600)
    again = pickle.loads(pickle.dumps(image))
    assert (again.size, again.place) == ((30, 20), "row 0")
    assert again.source == encoded(RED)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (encoded(RED)[:60], "truncated"),
        (b"nothing", "cannot identify image file"),
        (b"", "it is empty"),
        (None, "it is empty"),
        ("missing.png", "No such file"),
        (5, "it is of the type int; an image is a path"),
        ([[0, 1]], "it is of the type list; an image is a path"),
        ("https://a.b/c.png", r"it is a URL \(https://a.b/c.png\); store the image"),
        ("/9j/4AAQ" * 2000, r"it is no path \(.{40}\); store the image"),
        ({"url": "x"}, "it has the keys url; an image is a path"),
        ({"bytes": None, "path": None}, "it is empty"),
        ("/dev/zero", "/dev/zero is not a file"),
        (".", "is not a file"),
    ],
)
def test_a_broken_picture_ends_in_a_sentence(source: Any, reason: str) -> None:
    with pytest.raises(ImageError, match=rf"row 3, column 'image': the image cannot.*{reason}"):
        StoredImage(source, "x.parquet, row 3, column 'image'").open()


def test_a_pipe_is_no_picture(tmp_path: Path) -> None:
    """Opening it would wait for someone to write."""
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(ImageError, match=r"row 3: the image cannot be read: .*pipe.png is not a"):
        _ = StoredImage("pipe.png", "row 3", folder=str(tmp_path)).size


def test_a_picture_of_nine_hundred_million_pixels_is_refused() -> None:
    small = encoded(Image.new("1", (16, 16)))
    header = b"IHDR" + struct.pack(">II", 30_000, 30_000) + small[24:29]
    huge = small[:12] + header + struct.pack(">I", zlib.crc32(header)) + small[33:]
    with pytest.raises(ImageError, match="row 3: the image has more than 178,956,970 pixels"):
        _ = StoredImage(huge, "row 3", max_pixels=100).size


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_is_turned_as_its_camera_was_held(orientation: int) -> None:
    image = Image.new("RGB", (60, 40))
    image.paste("red", (0, 0, 30, 20))
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    image.save(file, "PNG", exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(file.getvalue())))
    stored = StoredImage(file.getvalue(), "")
    assert stored.size == stored.open().size == upright.size
    assert stored.open().tobytes() == upright.tobytes()
    assert ImageOps.exif_transpose(stored.open()).tobytes() == upright.tobytes()
    small = StoredImage(file.getvalue(), "", max_pixels=600)
    again = StoredImage(small.encoded()["bytes"], "")
    assert again.size == small.size == small.open().size
    assert again.open().tobytes() == small.open().tobytes()
