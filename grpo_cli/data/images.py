"""Finds images in the columns and messages of rows, and inserts them into the prompts.

A row {"question": "How many?", "image": <picture>} becomes a prompt with the messages

    [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}]

and one stored image. Images stand in the column `image` (one) or `images` (a list), or in the
messages themselves, as {"type": "image", "image": <picture>}. A picture is a path, encoded bytes,
or {"bytes": ..., "path": ...}, which is how `datasets` stores its Image feature.
"""

from __future__ import annotations

import functools
import glob
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_cli.config.sources import file_format, local_path
from grpo_cli.data.conversations import IMAGE
from grpo_cli.data.rows import Rows
from grpo_cli.errors import UserError, listed
from grpo_cli.images import Cell, StoredImage

COLUMNS = ("images", "image")  # a row has one of them
PLACEHOLDER = {"type": "image"}


@dataclass(frozen=True)
class ImageRow:
    """A row's prompt with a placeholder for each image, and the images in order."""

    prompt: Any  # messages; perhaps a string, if the row has no images
    images: tuple[StoredImage, ...] = ()
    # The image columns, with stored images as values.
    columns: dict[str, Any] = field(default_factory=dict)


def column_of(row: Mapping[str, Any]) -> str | None:
    """Returns the name of a row's image column; None if it has none."""
    return next((name for name in COLUMNS if row.get(name) not in (None, [])), None)


def has_images(row: Mapping[str, Any], text: object) -> bool:
    """Returns whether a row has images, in a column or in its messages."""
    return column_of(row) is not None or _has_blocks(text)


def _has_blocks(text: object) -> bool:
    return isinstance(text, list) and any(isinstance(m["content"], list) for m in text)


def of_row(
    rows: Rows, number: int, row: Mapping[str, Any], text: Any, max_pixels: int | None
) -> ImageRow:
    """Returns a row's prompt with placeholders, and its images, if it has any.

    Placeholders without a picture take the column's images in order. They are blocks of type image,
    or <image> in the text of a user message. Without any, the images come before the text of the
    first user message.

    Args:
        number: index of the row in `rows`.
        text: the row's prompt, as a string or messages.
        max_pixels: larger images are resized to it; None: never.

    Raises:
        UserError: placeholders and images differ in number, or the prompt is not a chat.
    """
    if not has_images(row, text):
        return ImageRow(text)
    place = f"{rows.source}, row {rows.line(number)}"
    if not isinstance(text, list):
        raise UserError(
            f"{place}: has images, which stand in the messages of a chat; set dataset.chat=true."
        )
    own = of_columns(rows, number, row, max_pixels)
    name = next(iter(own), None)
    given: list[StoredImage] = [] if name is None else _listed(own[name])
    if given and not _has_blocks(text):
        text = [_with_blocks(message) for message in text]
    # A block that held a picture has its path in the row under "keys".
    unfilled = sum(b["type"] == "image" and "keys" not in b for m in text for b in _blocks(m))
    if not unfilled and given:
        n = next((i for i, m in enumerate(text) if m["role"] == "user"), 0)
        content = text[n]["content"]
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
        new = {**text[n], "content": [dict(PLACEHOLDER) for _ in given] + blocks}
        text = [*text[:n], new, *text[n + 1 :]]
    elif unfilled != len(given):
        column = f"in the column {name!r}" if name else "beside them"
        raise UserError(
            f"{place}: the messages have {unfilled} placeholders for images, and there are "
            f"{len(given)} images {column}; give one image for each placeholder."
        )
    left = iter(given)
    images: list[StoredImage] = []
    of_messages: dict[tuple[str | int, ...], StoredImage] = {}  # by key path in the row
    messages = []
    for message in text:
        blocks = []
        for block in _blocks(message):
            if block["type"] != "image":
                blocks.append(block)
                continue
            if "keys" in block:
                keys = block["keys"]
                of_messages[keys] = _stored(rows, number, keys, max_pixels)
                images.append(of_messages[keys])
            else:
                images.append(next(left))
            blocks.append(dict(PLACEHOLDER))
        messages.append({**message, "content": blocks} if blocks else message)
    for column in {str(keys[0]) for keys in of_messages}:
        own[column] = _with_stored(row[column], of_messages, (column,))
    return ImageRow(messages, tuple(images), own)


def _with_stored(
    value: Any, images: Mapping[tuple[str | int, ...], StoredImage], place: tuple[str | int, ...]
) -> Any:
    """Replaces the pictures in a value by stored images."""
    if place in images:
        return images[place]
    if isinstance(value, dict):
        return {key: _with_stored(v, images, (*place, key)) for key, v in value.items()}
    if isinstance(value, list):
        return [_with_stored(v, images, (*place, n)) for n, v in enumerate(value)]
    return value


def of_columns(
    rows: Rows, number: int, row: Mapping[str, Any], max_pixels: int | None
) -> dict[str, Any]:
    """Returns a row's image column with stored images as values; {} without images.

    Args:
        number: index of the row in `rows`.
        max_pixels: larger images are resized to it; None: never.

    Raises:
        UserError: both columns hold images.
    """
    name = column_of(row)
    if name is None:
        return {}
    if len(both := [column for column in COLUMNS if row.get(column) not in (None, [])]) > 1:
        raise UserError(
            f"{rows.source}, row {rows.line(number)}: has images in the columns {listed(both)}; "
            "keep one of them, and rename the other (dataset.columns.unused=NAME)."
        )
    if not isinstance(row[name], list):
        return {name: _stored(rows, number, (name,), max_pixels)}
    return {name: [_stored(rows, number, (name, i), max_pixels) for i in range(len(row[name]))]}


def in_columns(columns: Mapping[str, Any]) -> list[StoredImage]:
    """Returns the stored images of the image columns, in order."""
    found = [image for name in COLUMNS for image in _listed(columns.get(name))]
    return [image for image in found if isinstance(image, StoredImage)]


def _listed(cell: Any) -> list[Any]:
    return cell if isinstance(cell, list) else [cell]


def _stored(
    rows: Rows, number: int, keys: tuple[str | int, ...], max_pixels: int | None
) -> StoredImage:
    where = f"{rows.source}, row {rows.line(number)}, column {keys[0]!r}"
    return StoredImage(Cell(rows.rows, number, keys), where, max_pixels, _folders_of(rows.source))


def _with_blocks(message: dict[str, Any]) -> dict[str, Any]:
    """Replaces each <image> in the text of a user message by a block."""
    parts = message["content"].split(IMAGE)
    if message["role"] != "user" or len(parts) == 1:
        return message
    blocks: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        blocks += [{"type": "text", "text": part}] if part else []
        blocks += [dict(PLACEHOLDER)] if number < len(parts) - 1 else []
    return {**message, "content": blocks}


def _blocks(message: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    return message["content"] if isinstance(message["content"], list) else ()


@functools.cache
def _folders_of(source: str) -> str | tuple[str, ...]:
    """Returns the base folder of relative image paths, or several, the outermost first.

    Paths in a file are relative to the file's folder. A folder or a pattern may match files in
    several folders.
    """
    path = local_path(source)
    if path is None:
        return ""
    path = path.absolute()  # user functions may change the working folder
    if path.is_file():
        return str(path.parent)
    parts = [*itertools.takewhile(lambda part: not set(part) & {*"*?["}, path.parts)]
    outer = path if path.is_dir() else Path(*parts)
    files = path.rglob("*") if path.is_dir() else map(Path, glob.glob(str(path), recursive=True))
    inner = {str(file.parent) for file in files if file_format(file) is not None}
    found = (str(outer), *sorted(inner - {str(outer)}))
    return found if len(found) > 1 else str(outer)
