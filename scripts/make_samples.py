"""Makes the data under grpo_cli/samples: from published data sets, by arithmetic, and drawn.

    python scripts/make_samples.py --data ../shared/data

The same input gives the same bytes. What the files are, and whose: grpo_cli/samples/README.md.
"""

import argparse
import gzip
import io
import json
import random
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import datasets
from PIL import Image, ImageDraw

SAMPLES = Path(__file__).resolve().parent.parent / "grpo_cli" / "samples"
MATH_FIELDS = "id question answer solution subject level"
BENCHMARKS = {  # file, number of rows, fields
    "gsm8k": ("gsm8k/test.jsonl", 20, "id question answer solution"),
    "math": ("math/test_without_heldout.jsonl.gz", 20, MATH_FIELDS),
    "math500": ("math500/math500_shared_half.jsonl", 20, MATH_FIELDS),
    "mgsm_zh": ("mgsm_zh/test.jsonl", 20, "id question answer"),
    "cmath": ("cmath/test.jsonl", 20, "id question answer grade"),
    "svamp": ("svamp/svamp.jsonl", 20, "id question answer type"),
    "humaneval": ("humaneval/test.jsonl", 8, "id prompt entry_point solution test"),
    "mbpp": ("mbpp/mbpp.jsonl", 12, "id question solution tests test_setup_code"),
}
SEED, FIGURES_SEED = 0, 1
CALLED = 0.3  # share of the calculator's episodes that call the tool
COLOURS = {"red": "#e02020", "green": "#20b020", "blue": "#2040e0", "black": "#101010"}
PLACES = [(x, y) for x in range(4) for y in range(4)]
CELL = 8  # pixels
NAMES = (
    "Anna", "Ben", "Carla", "David", "Elif", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kofi",
    "Lena", "Mei", "Noah", "Olga", "Priya",
)  # fmt: skip
CITIES = (
    "Oslo", "Lima", "Cairo", "Delhi", "Paris", "Quito", "Rome", "Seoul", "Tokyo", "Accra", "Lagos",
    "Berlin",
)  # fmt: skip
SENTENCES = (
    "{name} is {age} years old and lives in {city}.",
    "{name}, who lives in {city}, is {age}.",
    "In {city} lives {name}, aged {age}.",
    "At {age}, {name} moved to {city}.",
)

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the data under grpo_cli/samples.")
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k/, math/, ...")
    data: Path = parser.parse_args().data

    fields, sums, calculations = "id question answer solution", additions(40), products()
    (SAMPLES / "benchmarks").mkdir(parents=True, exist_ok=True)
    write("gsm8k_train.jsonl.gz", keep(read(data / "gsm8k" / "train.jsonl.gz")[:1000], fields))
    write("gsm8k_test.jsonl", keep(spread(read(data / "gsm8k" / "test.jsonl"), 200), fields))
    write("arithmetic_train.jsonl", sums[:1400])
    write("arithmetic_test.jsonl", sums[1400:])
    write("calculator_train.jsonl.gz", calculations[:2000])
    write("calculator_test.jsonl", keep(calculations[2000:2200], "question answer"))
    write("guess_train.jsonl.gz", games(4000))
    write("guess_test.jsonl", [{"id": 4000 + n, "prompt": "guess"} for n in range(256)])
    for name, rows in (("chat_sums", chat_sums(640)), ("chat_json", chat_json(640))):
        write(f"{name}_train.jsonl", rows[:512])
        write(f"{name}_test.jsonl", rows[512:])
    write_pictures()
    for name, (file, count, fields) in BENCHMARKS.items():
        rows = read(data / file)
        if name == "mbpp":  # the split that papers report
            rows = [row for row in rows if row["split"] == "test"]
        write(f"benchmarks/{name}.jsonl", keep(spread(rows, count), fields))
    shutil.copytree(data / "LICENSES", SAMPLES / "LICENSES", dirs_exist_ok=True)


def chat_sums(count: int) -> list[Row]:
    """Questions for the sum of two numbers from 10 to 54, no two of them alike."""
    numbers = range(10, 55)
    pairs = random.Random(SEED).sample([(a, b) for a in numbers for b in numbers], count)
    return [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs]


def chat_json(count: int) -> list[Row]:
    """Sentences about people, each with a schema that only the JSON of its facts fits."""
    draws, rows = random.Random(SEED), []
    people = draws.sample([(n, a, c) for n in NAMES for a in range(18, 80) for c in CITIES], count)
    for name, age, city in people:
        text = draws.choice(SENTENCES).format(name=name, age=age, city=city)
        facts = {"name": name, "age": age, "city": city}
        schema = {
            "type": "object", "properties": {key: {"const": v} for key, v in facts.items()},
            "required": list(facts), "additionalProperties": False,
        }  # fmt: skip
        rows.append({"question": text, "answer": json.dumps(facts), "schema": json.dumps(schema)})
    return rows


def additions(below: int) -> list[Row]:
    """Every ordered pair of numbers below `below`, shuffled; all have two digits, to be alike."""
    pairs = [(a, b) for a in range(below) for b in range(below)]
    random.Random(SEED).shuffle(pairs)
    return [{"question": f"{a:02}+{b:02}=", "answer": f"{a + b:02}"} for a, b in pairs]


def products() -> list[Row]:
    """Every product of two-digit numbers, shuffled, with an episode each.

    Three episodes in ten call the tool `multiply` and repeat its result; the others answer at once,
    which a small model cannot learn to do right.
    """
    rng, rows = random.Random(SEED), []
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(pairs)
    for a, b in pairs:
        episode: list[Row] = [{"role": "assistant", "content": str(a * b)}]
        if rng.random() < CALLED:
            function = {"name": "multiply", "arguments": {"a": a, "b": b}}
            call = {"type": "function", "function": function}
            asked = {"role": "assistant", "content": "", "tool_calls": [call]}
            episode = [asked, {"role": "tool", "name": "multiply", "content": str(a * b)}, *episode]
        rows.append({"question": f"{a}*{b}=", "answer": str(a * b), "episode": episode})
    return rows


def games(count: int) -> list[Row]:
    """Games of guessing a number from 0 to 31 in five turns.

    Every guess is drawn from the numbers that the replies have left.
    """
    rng, rows = random.Random(SEED), []
    for n in range(count):
        number, low, high = rng.randrange(32), 0, 31
        episode: list[Row] = []
        for _ in range(5):
            guess = rng.randint(low, high)
            episode.append({"role": "assistant", "content": f"{guess:02}"})
            if guess == number:
                break
            episode.append({"role": "user", "content": "higher" if guess < number else "lower"})
            low, high = (guess + 1, high) if guess < number else (low, guess - 1)
        if episode[-1]["role"] == "user":
            episode.pop()
        rows.append({"id": n, "prompt": "guess", "episode": episode})
    return rows


def shapes(chooser: random.Random) -> Row:
    """Returns a row: a picture with 1 to 5 squares of a colour and 0 to 3 others, and how many."""
    asked = chooser.choice([*COLOURS])
    count = chooser.randint(1, 5)
    others = [c for c in COLOURS if c != asked]
    colours = [asked] * count + chooser.choices(others, k=chooser.randint(0, 3))
    image = Image.new("RGB", (4 * CELL, 4 * CELL), "white")
    pen = ImageDraw.Draw(image)
    for (x, y), colour in zip(chooser.sample(PLACES, len(colours)), colours, strict=True):
        corner = x * CELL + 1, y * CELL + 1
        pen.rectangle((*corner, corner[0] + CELL - 3, corner[1] + CELL - 3), fill=COLOURS[colour])
    return {"image": png(image), "question": f"How many {asked} squares?", "answer": str(count)}


def png(image: Image.Image) -> Row:
    file = io.BytesIO()
    image.quantize(8).save(file, "PNG", optimize=True)
    return {"bytes": file.getvalue(), "path": None}


def figure(number: int, chooser: random.Random) -> Row:
    """Returns a row with a right triangle, the angles of a triangle, a rectangle or a circle."""
    image = Image.new("RGB", (160, 120), "white")
    pen = ImageDraw.Draw(image)
    question = "Find x."
    if number % 4 == 0:
        times = chooser.randint(1, 5)
        a, b, c = (times * n for n in chooser.choice([(3, 4, 5), (5, 12, 13)]))
        pen.polygon([(30, 20), (30, 95), (135, 95)], outline="black")
        labels, answer = {(10, 52): f"{a}", (75, 98): f"{b}", (88, 45): "x"}, c
    elif number % 4 == 1:
        a, b = chooser.randint(40, 70), chooser.randint(40, 70)
        pen.polygon([(20, 95), (140, 95), (70, 15)], outline="black")
        labels, answer = {(36, 80): f"{a}°", (102, 80): f"{b}°", (66, 32): "x°"}, 180 - a - b
    elif number % 4 == 2:
        a, b = chooser.randint(3, 12), chooser.randint(3, 12)
        pen.rectangle((30, 25, 130, 90), outline="black")
        labels, answer = {(76, 94): f"{a}", (12, 52): f"{b}"}, a * b
        question = "Find the area of the rectangle."
    else:
        r = chooser.randint(2, 20)
        pen.ellipse((40, 15, 130, 105), outline="black")
        pen.line((85, 60, 130, 60), fill="black")
        labels, answer, question = {(102, 46): f"{r}"}, 2 * r, "Find the diameter of the circle."
    for place, text in labels.items():
        pen.text(place, text, fill="black")
    return {"images": [png(image)], "problem": f"<image>{question}", "answer": str(answer)}


def write_pictures() -> None:
    """Writes the pictures to train on, those held out, which are others, and the benchmark's."""
    text, chooser, seen = datasets.Value("string"), random.Random(SEED), set[bytes]()
    columns = {"image": datasets.Image(), "question": text, "answer": text}
    for name, count in (("shapes_train", 2400), ("shapes_test", 200)):
        rows: list[Row] = []
        while len(rows) < count:
            row = shapes(chooser)
            if row["image"]["bytes"] not in seen:
                seen.add(row["image"]["bytes"])
                rows.append(row)
        write_table(name, rows, columns)
    chooser = random.Random(FIGURES_SEED)
    columns = {"images": datasets.List(datasets.Image()), "problem": text, "answer": text}
    write_table("benchmarks/geometry3k", [figure(n, chooser) for n in range(12)], columns)


def write_table(name: str, rows: list[Row], columns: Row) -> None:
    table = datasets.Dataset.from_list(rows, features=datasets.Features(columns))
    table.to_parquet(SAMPLES / f"{name}.parquet")


def spread(rows: Sequence[Row], count: int) -> list[Row]:
    """`count` of the rows, at even distances, as the sources are sorted by subject."""
    return [rows[i * len(rows) // count] for i in range(count)]


def keep(rows: Iterable[Row], fields: str) -> list[Row]:
    return [{field: row[field] for field in fields.split()} for row in rows]


def read(path: Path) -> list[Row]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in text.splitlines()]


def write(name: str, rows: Iterable[Row]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path = SAMPLES / name  # with mtime=0 an archive does not hold the time of writing
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    print(f"{path.relative_to(SAMPLES.parent.parent)}: {len(path.read_bytes()):,} bytes")


if __name__ == "__main__":
    main()
