"""Draws the pictures of recipe=shapes_tiny: python scripts/draw_shapes.py

Each shows 1 to 5 squares of the colour that is asked for among 0 to 3 others, on a grid of 4 x 4
places: 32 x 32 pixels, some 150 bytes.
"""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import datasets
from PIL import Image, ImageDraw

SAMPLES = Path(__file__).parent.parent / "grpo_cli" / "samples"
COLOURS = {"red": "#e02020", "green": "#20b020", "blue": "#2040e0", "black": "#101010"}
PLACES = [(x, y) for x in range(4) for y in range(4)]
CELL = 8  # pixels


def draw(chooser: random.Random) -> dict[str, Any]:
    """Returns a row: a picture, a question and its answer."""
    asked = chooser.choice([*COLOURS])
    count = chooser.randint(1, 5)
    others = [c for c in COLOURS if c != asked]
    colours = [asked] * count + chooser.choices(others, k=chooser.randint(0, 3))
    image = Image.new("RGB", (4 * CELL, 4 * CELL), "white")
    pen = ImageDraw.Draw(image)
    for (x, y), colour in zip(chooser.sample(PLACES, len(colours)), colours, strict=True):
        corner = x * CELL + 1, y * CELL + 1
        pen.rectangle((*corner, corner[0] + CELL - 3, corner[1] + CELL - 3), fill=COLOURS[colour])
    file = io.BytesIO()
    image.quantize(8).save(file, "PNG", optimize=True)
    return {
        "image": {"bytes": file.getvalue(), "path": None},
        "question": f"How many {asked} squares?",
        "answer": str(count),
    }


def main() -> None:
    """Writes the rows to train on and those held out, which are others."""
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "question": datasets.Value("string"),
            "answer": datasets.Value("string"),
        }
    )
    chooser = random.Random(0)
    seen: set[bytes] = set()
    for name, count in (("shapes_train", 2400), ("shapes_test", 200)):
        rows: list[dict[str, Any]] = []
        while len(rows) < count:
            row = draw(chooser)
            if row["image"]["bytes"] not in seen:
                seen.add(row["image"]["bytes"])
                rows.append(row)
        columns = {key: [row[key] for row in rows] for key in rows[0]}
        table = datasets.Dataset.from_dict(columns, features=features)
        table.to_parquet(SAMPLES / f"{name}.parquet")


if __name__ == "__main__":
    main()
