"""Draws the pictures of the samples: python scripts/draw_shapes.py

Those of recipe=shapes_tiny show 1 to 5 squares of the colour that is asked for among 0 to 3 others,
on a grid of 4 x 4 places: 32 x 32 pixels, some 150 bytes. Those of benchmark=geometry3k, in the
columns of that data set, show a figure with some lengths or angles, of which one is asked for.
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


def figure(number: int, chooser: random.Random) -> dict[str, Any]:
    """Returns a row with a right triangle, the angles of a triangle, a rectangle or a circle."""
    image = Image.new("RGB", (160, 120), "white")
    pen = ImageDraw.Draw(image)

    def labels(**places: tuple[int, int]) -> None:
        for text, place in places.items():
            pen.text(place, text.strip("_"), fill="black")

    kind = ("legs", "angles", "rectangle", "circle")[number % 4]
    if kind == "legs":
        times = chooser.randint(1, 5)
        a, b, c = (times * n for n in chooser.choice([(3, 4, 5), (5, 12, 13)]))
        pen.polygon([(30, 20), (30, 95), (135, 95)], outline="black")
        labels(**{f"{a}": (10, 52), f"{b}_": (75, 98), "x": (88, 45)})
        question, answer = "Find x.", str(c)
    elif kind == "angles":
        a, b = chooser.randint(40, 70), chooser.randint(40, 70)
        pen.polygon([(20, 95), (140, 95), (70, 15)], outline="black")
        labels(**{f"{a}°": (36, 80), f"{b}°_": (102, 80), "x°": (66, 32)})
        question, answer = "Find x.", str(180 - a - b)
    elif kind == "rectangle":
        a, b = chooser.randint(3, 12), chooser.randint(3, 12)
        pen.rectangle((30, 25, 130, 90), outline="black")
        labels(**{f"{a}": (76, 94), f"{b}_": (12, 52)})
        question, answer = "Find the area of the rectangle.", str(a * b)
    else:
        r = chooser.randint(2, 20)
        pen.ellipse((40, 15, 130, 105), outline="black")
        pen.line((85, 60, 130, 60), fill="black")
        labels(**{f"{r}": (102, 46)})
        question, answer = "Find the diameter of the circle.", str(2 * r)
    file = io.BytesIO()
    image.quantize(8).save(file, "PNG", optimize=True)
    picture = {"bytes": file.getvalue(), "path": None}
    return {"images": [picture], "problem": f"<image>{question}", "answer": answer}


def main() -> None:
    """Writes the rows to train on, those held out, which are others, and the benchmark's."""
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
    text = datasets.Value("string")
    features = datasets.Features(
        {"images": datasets.List(datasets.Image()), "problem": text, "answer": text}
    )
    chooser = random.Random(1)
    figures = [figure(number, chooser) for number in range(12)]
    table = datasets.Dataset.from_list(figures, features=features)
    table.to_parquet(SAMPLES / "benchmarks" / "geometry3k.parquet")


if __name__ == "__main__":
    main()
