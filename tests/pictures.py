"""Groups whose prompts have images, as a run stores them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_cli.data import images
from grpo_cli.data.prompts import other_columns
from grpo_cli.data.rows import Rows
from grpo_cli.data.stored_completions import completion_row, images_cell, write_parquet
from grpo_cli.records import Group
from tests.conftest import make_group, make_rollout
from tests.test_images import RED, encoded

PNG, SMALL = encoded(RED), encoded(RED.resize((6, 4)))
ROWS = (
    {"prompt": "How red?", "image": {"bytes": PNG, "path": None}, "answer": "1"},
    {"prompt": "No picture?", "image": None, "answer": "0"},
    {"prompt": "And <image>?", "image": {"bytes": SMALL, "path": None}, "answer": "1"},
)


def image_groups(
    rows: Sequence[dict[str, Any]] = ROWS, samples: int = 2, max_pixels: int | None = 600
) -> list[Group]:
    found = []
    table = Rows("rows.parquet", [*rows[0]], list(rows))
    for number, row in enumerate(rows):
        prompt: Any = row["prompt"]
        if not isinstance(prompt, list):
            prompt = [{"role": "user", "content": prompt}]
        own = images.of_row(table, number, row, prompt, max_pixels)
        columns = other_columns(row) | own.columns
        made = make_rollout(prompt=own.prompt, columns=columns, row=number)
        shared = dataclasses.replace(made.prompt, images=own.images)
        texts = [f"{number}.{i}" for i in range(samples)]
        rollouts = [dataclasses.replace(made, prompt=shared, text=text) for text in texts]
        found.append(make_group(number, rollouts))
    return found


def write_groups(path: Path, groups: Sequence[Group], *, images: bool = True) -> None:
    """Writes the completions of a step as a run with images does, or without them."""
    rows = []
    for group in groups:
        cell = images_cell(group.prompt) if images else None
        rows += [completion_row(1, group, i, cell) for i in range(len(group.rollouts))]
    write_parquet(path, rows)
