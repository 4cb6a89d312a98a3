"""Writes completions of a run to a file, and reads stored ones, for `grpo score` and `grpo show`.

A file has a column `completion` and the columns that rewards read. A run and `grpo eval` store the
data set's columns as JSON in a column `columns`, and the prompt's images in a column `images`. The
JSON refers to the first image as {"image": 0}, and to an image that the file does not store as
{"image": null}.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_cli.data import conversations
from grpo_cli.data import images as images_of_rows
from grpo_cli.data.files import find_files, load_files, undecoded
from grpo_cli.data.rows import Rows, rename_columns
from grpo_cli.data.sample import Sample, episode_of
from grpo_cli.errors import UserError, listed, nearest
from grpo_cli.files import replaced
from grpo_cli.images import ImageError, StoredImage
from grpo_cli.images import require as require_pillow

if TYPE_CHECKING:
    from grpo_cli.data.prompts import PromptStream
    from grpo_cli.distributed.workers import Workers
    from grpo_cli.records import Completion, Group, Prompt

IMAGES = "images"  # column with the prompt's images
ROW_GROUP_BYTES = 2**28  # bytes of images in memory while completions are written
WRITTEN = "completions.parquet"  # file in the folder of an evaluation


# Columns of a stored episode, and their keys in `episode_of`.
EPISODE_COLUMNS = {
    "messages": "messages",
    "turns": "turns",
    "stop_reason": "stop_reason",
    "env_rewards": "rewards",
    "env_metrics": "metrics",
}


def episode_cells(completion: Completion) -> dict[str, Any]:
    """Returns an episode's table cells: JSON texts, and the mask of sampled tokens."""
    episode, cells = episode_of(completion), dict[str, Any]()
    if completion.is_sampled is not None:
        cells["sampled"] = completion.is_sampled
    for column, name in EPISODE_COLUMNS.items() if episode is not None else ():
        value = episode[name]  # type: ignore[index]
        is_text = isinstance(value, str)
        cells[column] = value if is_text else json.dumps(value, ensure_ascii=False, default=str)
    if completion.env_error:
        cells["env_error"] = completion.env_error
    return cells


def find(path: Path, key: str) -> Path:
    """Finds the file of completions: `path` itself, or in a run, checkpoint or evaluation.

    Args:
        key: name of the path in error messages.

    Raises:
        UserError: the folder holds no file of completions.
    """
    if not path.is_dir():
        return path
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    stored = [
        path / WRITTEN,
        run / "eval" / path.name / WRITTEN,
        run / "completions" / f"{path.name}.parquet",
    ]
    if run == path:
        stored += [run / "completions" / f"step-{n}.parquet" for n in steps_stored(run)[::-1]]
    for file in stored:
        if file.is_file():
            return file
    raise UserError(
        f"{key} = {path}: holds no completions (completions/step-N.parquet of a run, "
        f"{WRITTEN} of an evaluation)."
    )


def steps_stored(run: Path) -> list[int]:
    """Returns the steps with stored completions of a run, in order."""
    names = (path.name for path in run.glob("completions/step-*.parquet"))
    return sorted(int(m[1]) for n in names if (m := re.fullmatch(r"step-(\d+)\.parquet", n)))


def load(path: Path, columns: Mapping[str, str], key: str) -> list[Sample]:
    """Loads the completions of a file, at least one, in line order.

    Args:
        path: .jsonl, .json, .csv or .parquet, perhaps .gz.
        columns: columns to rename, as new name: old name.
        key: name of the file in error messages.

    Raises:
        UserError: a missing file or column, a malformed line, a completion that is not text.
    """
    table = load_files(find_files(path, None, "", key), key, path)
    table = undecoded(rename_columns(table, columns, str(path), "columns"))
    if "completion" not in table.column_names:
        names = table.column_names
        how = f" Name it with columns.completion=NAME.{nearest('completion', names)}"
        how = "" if key == "RUN" else how  # grpo show renames no columns
        raise UserError(f"{key} = {path}: has no column 'completion'; it has {listed(names)}.{how}")
    rows = Rows(str(path), table.column_names, table)
    return [sample_of(line, n, f"{key} = {path}, row {n}", rows) for n, line in enumerate(table)]


def sample_of(line: dict[str, Any], number: int, where: str, rows: Rows | None = None) -> Sample:
    """Builds a sample from the cells of a line.

    Args:
        number: line number.
        where: location of the line for error messages.
        rows: the lines of the file, from which images are read; None: without images.

    Raises:
        UserError: a completion that is not text, or images that do not fit the prompt.
    """
    columns = line.get("columns")
    if isinstance(columns, str) and columns.startswith("{"):
        with contextlib.suppress(ValueError):
            columns = json.loads(columns)
    of_data = columns if isinstance(columns, dict) else {}  # {} for a user's own text
    prompt, prefill = _prompt({**line, **of_data}.get("prompt") or "", where)
    images: tuple[StoredImage, ...] = ()
    if rows is not None:
        prompt, images, of_images = _images(rows, number, line, prompt, of_data)
        of_data = {**of_data, **of_images}
    cells = {**{name: cell for name, cell in line.items() if name != "columns"}, **of_data}
    cells.pop("prompt", None)
    text = cells.pop("completion")
    if isinstance(text, list) and text and isinstance(text[-1], dict):  # messages of a chat
        text = text if text[-1].get("role") == "user" else text[-1].get("content")
    if not isinstance(text, str):
        raise UserError(f"{where}: the completion is {text!r}; it must be text.")
    ids = cells.pop("completion_ids", None)
    episode = _stored_episode(cells)
    failed = False
    if episode is not None and rows is not None:  # for scoring, not for `grpo watch`
        from grpo_cli.records import ENVIRONMENT_FAILED  # late: it imports torch

        failed = episode["stop_reason"] in ENVIRONMENT_FAILED
    return Sample(number, prompt, text, ids, cells, prefill, episode, failed, images)


def _images(
    rows: Rows, number: int, line: dict[str, Any], prompt: Any, of_data: Mapping[str, Any]
) -> tuple[Any, tuple[StoredImage, ...], dict[str, Any]]:
    """Returns (prompt with placeholders, its images in order, image columns).

    Args:
        line: the line's cells; the column written by `images_cell` is removed from it.
        of_data: columns of the data set, if the file stores them separately.

    Raises:
        UserError: placeholders and images of the prompt differ in number.
    """
    is_written = IMAGES in line and isinstance(line.get("columns"), str)
    names = of_data if is_written else images_of_rows.COLUMNS
    columns = images_of_rows.of_columns(rows, number, line, None)
    images = tuple(images_of_rows.in_columns(columns))
    if images:
        require_pillow()
    contents = [m["content"] for m in prompt] if isinstance(prompt, list) else []
    holds_pictures = any("keys" in b for c in contents if isinstance(c, list) for b in c)
    if contents and (images or holds_pictures):
        found = images_of_rows.of_row(rows, number, line, prompt, None)
        prompt, images, columns = found.prompt, found.images, found.columns
    if is_written:
        # A run stores image bytes; a path in the file could name any file of this machine.
        images = tuple(
            image if cell and cell.get("bytes") else StoredImage(None, image.place)
            for image, cell in zip(images, line[IMAGES], strict=True)
        )
        del line[IMAGES]
        columns = {}
    stored = {n: _unmarked(of_data[n], images, rows.source) for n in names if n in of_data}
    return prompt, images, {**columns, **stored}


def _unmarked(cell: Any, images: Sequence[StoredImage], source: str) -> Any:
    """Replaces {"image": 0} by stored images, also inside lists and dicts."""
    if isinstance(cell, dict) and cell.keys() == {"image"}:
        number = cell["image"]
        if number is None:
            return StoredImage(None, source)
        if isinstance(number, int):
            return images[number]
    if isinstance(cell, list):
        return [_unmarked(one, images, source) for one in cell]
    if isinstance(cell, dict):
        return {key: _unmarked(one, images, source) for key, one in cell.items()}
    return cell


def read_texts(file: Any) -> Any:
    """Returns the table of an open Parquet file without images, which may be large."""
    return file.read(columns=[name for name in file.schema_arrow.names if name != IMAGES])


def check_readable(columns: Iterable[Mapping[str, Any]], key: str = "") -> None:
    """Checks that all images in columns can be read, before rewards need them.

    Args:
        key: name of the file in error messages; "" for none.

    Raises:
        UserError: an image cannot be read or is not stored.
    """
    said = f"{key} = " if key else ""
    sound: set[bytes] = set()  # completions of a prompt have the same images
    for image in (i for one in columns for i in images_of_rows.in_columns(one)):
        if image.source is None:
            raise UserError(f"{said}{image.place}: holds no images, which the rewards read.")
        try:
            stored = image.encoded()["bytes"]
            if (digest := hashlib.blake2b(stored, digest_size=16).digest()) not in sound:
                image.open()
                sound.add(digest)
        except ImageError as error:
            raise UserError(f"{said}{error}.") from error


def _stored_episode(cells: dict[str, Any]) -> dict[str, Any] | None:
    """Decodes the episode that `episode_cells` wrote; None for other completions."""
    written = [column for column in EPISODE_COLUMNS if cells.get(column) is not None]
    if len(written) < len(EPISODE_COLUMNS):  # for example, a user's own column of messages
        return None
    try:
        values = {
            name: json.loads(cells[column]) if isinstance(cells[column], str) else cells[column]
            for column, name in EPISODE_COLUMNS.items()
            if column != "stop_reason"
        }
    except ValueError:
        return None
    values["stop_reason"] = cells["stop_reason"]
    for column in EPISODE_COLUMNS:
        del cells[column]
    return values


def prompt_cell(prompt: Prompt) -> str:
    """Returns a prompt as stored: its text, or JSON of a chat's messages with the prefill."""
    conversation = prompt.conversation
    if isinstance(conversation, str):
        return conversation
    return json.dumps(conversation, ensure_ascii=False)


def images_cell(prompt: Prompt) -> list[dict[str, Any] | None]:
    """Returns a prompt's images as a cell of `IMAGES`; None for an unreadable image."""
    cells: list[dict[str, Any] | None] = []
    for image in prompt.images:
        try:
            cells.append(image.encoded())
        except ImageError:  # a deleted file must not end the run
            cells.append(None)
    return cells


def columns_cell(prompt: Prompt, holds_images: bool) -> str:
    """Returns a prompt's data set columns as JSON.

    Args:
        holds_images: whether the row also stores the images, by `images_cell`.
    """
    numbers = {id(image): number for number, image in enumerate(prompt.images)}

    def other(value: Any) -> Any:
        if isinstance(value, StoredImage):
            return {"image": numbers.get(id(value)) if holds_images else None}
        if isinstance(value, bytes) and prompt.images:
            return f"{len(value):,} bytes"
        return str(value)

    return json.dumps(prompt.columns, ensure_ascii=False, default=other)


def _prompt(cell: Any, where: str) -> tuple[Any, str]:
    """Returns (prompt, prefill) of a cell: text, messages, or the result of `prompt_cell`."""
    messages = cell
    if isinstance(cell, str) and cell.startswith('[{"role": '):
        try:
            messages = json.loads(cell)
        except ValueError:
            return cell, ""
    if not conversations.is_conversation(messages):
        return cell, ""
    messages = conversations.normalized(messages, where, "prompt")
    prefill = conversations.prefill_of(messages)
    return messages[:-1] if prefill else messages, prefill


def rows_of_all(
    workers: Workers, step: int, groups: Sequence[Group], stream: PromptStream
) -> list[dict[str, Any]]:
    """Gathers all processes' completions as rows on the main process, in the order of prompts."""
    of_groups = zip(groups, rows_by_group(groups, step, images=stream.has_images), strict=True)
    parts = workers.gather_on_main([(g.prompt_index, row) for g, rows in of_groups for row in rows])
    return [row for _, row in sorted(chain.from_iterable(parts), key=itemgetter(0))]


def rows_by_group(
    groups: Sequence[Group], step: int = 0, *, images: bool | None = None
) -> Iterator[list[dict[str, Any]]]:
    """Yields the completions of each group as rows of a table.

    Args:
        images: whether the rows hold the images of their prompts; None: if any prompt has some.
    """
    images = any(g.prompt.images for g in groups) if images is None else images
    for g in groups:
        cell = images_cell(g.prompt) if images else None  # one object, so that it is sent once
        yield [completion_row(step, g, i, cell) for i in range(len(g.rollouts))]


def completion_row(
    step: int, group: Group, sample: int, images: list[dict[str, Any] | None] | None = None
) -> dict[str, Any]:
    """Returns a rollout as a row of a table; values of tokens are arrays, for fast gathering.

    Args:
        images: `images_cell` of the prompt; None: the row has no such column.
    """
    from grpo_cli.records import TrainingSample  # late: it imports torch

    r = group.rollouts[sample]
    own: dict[str, Any] = {}
    if isinstance(r, TrainingSample):  # not of an evaluation
        own = {"advantage": r.advantage, "token_advantages": None}
        if r.token_advantages is not None:
            own["token_advantages"] = r.token_advantages.tolist()
    return {
        "step": step,
        "row": group.prompt.row,
        "sample": sample,
        "prompt": prompt_cell(group.prompt),
        "completion": r.text,
        "reward": r.reward if math.isfinite(r.reward) else None,
        **{f"rewards/{name}": value for name, value in r.reward_parts.items()},
        **{f"extras/{name}": value for name, value in r.extras.items()},
        "columns": columns_cell(group.prompt, images is not None),
        **own,
        "finish_reason": r.completion.finish_reason,
        "prompt_ids": np.array(group.prompt.ids, dtype=np.int64),
        "completion_ids": np.array(r.completion.ids, dtype=np.int64),
        "sampling_logprobs": np.array(r.completion.sampling_logprobs, dtype=np.float64),
        **episode_cells(r.completion),
        **({} if images is None else {IMAGES: images}),
    }


def write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows as a Parquet file, atomically: a push reads it while the run writes."""
    import pyarrow
    import pyarrow.parquet

    names = list(dict.fromkeys(name for row in rows for name in row))
    columns: dict[str, Any] = {}
    for name in names:
        if name == IMAGES:
            continue
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pyarrow.array(values)
        except (pyarrow.ArrowException, TypeError, OverflowError):  # no common type
            texts = [json.dumps(v, ensure_ascii=False, default=str) for v in values]
            columns[name] = pyarrow.array(texts)
    with replaced(path) as partial:
        table = pyarrow.table(columns)
        if IMAGES in names:
            _write_with_images(partial, table, [row[IMAGES] for row in rows])
        else:
            pyarrow.parquet.write_table(table, partial)


def _write_with_images(path: Path, table: Any, images: Sequence[list[Any]]) -> None:
    """Writes a table with a column of images, which `datasets` and the hub show as images.

    Completions of a prompt share their images. The file holds each image once per row group, in a
    dictionary with room for all of them.
    """
    import datasets
    import pyarrow.parquet

    schema = datasets.Features({IMAGES: datasets.List(datasets.Image())}).arrow_schema
    field = schema.field(IMAGES)
    whole = table.schema.append(field).with_metadata(schema.metadata)
    sizes = [sum(len(image["bytes"]) for image in cell if image) for cell in images]
    with pyarrow.parquet.ParquetWriter(path, whole, dictionary_pagesize_limit=2**30) as writer:
        start = held = 0
        for end, size in enumerate([*sizes[1:], None], start=1):
            held += sizes[end - 1]
            if size is None or held + size > ROW_GROUP_BYTES:
                part = pyarrow.array(images[start:end], field.type)
                writer.write_table(table.slice(start, end - start).append_column(field, part))
                start, held = end, 0
