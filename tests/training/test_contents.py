"""A resumed run compares the contents of what it reads with those of its checkpoint."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_cli import data
from grpo_cli.checkpoints.checkpointer import CONTENTS
from grpo_cli.config.schema import Benchmark, Dataset, HeldOut, MixturePart, Model, Recipe
from grpo_cli.data import Rows
from grpo_cli.errors import UserError
from grpo_cli.training import contents
from grpo_cli.training.contents import Contents
from grpo_cli.training.prepare import Prepared, TrainRows


def write_rows(path: Path, *answers: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": f"row {i}", "answer": a}) for i, a in enumerate(answers)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def found(recipe: Recipe, **parts: Any) -> Contents:
    """The contents of a run; its rows need not be loaded, except for those from the hub."""
    rows = Rows("", [], [])
    if not parts and not recipe.dataset.mixture:
        parts = {"train": {"": TrainRows(rows, recipe.dataset)}}
    scorer: Any = None
    return contents.of_run(Prepared(recipe, Path(), **{"train": {}, **parts}, scorer=scorer))


def differences(change: Callable[[], object], recipe: Recipe, **more: Any) -> dict[str, list[str]]:
    """What a change of the files alters."""
    before = found(recipe, **more)
    change()
    return contents.differences(json.loads(contents.as_json(before)), found(recipe, **more))


def test_an_answer_that_was_changed(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "train.jsonl", "1", "2")
    recipe = Recipe(dataset=Dataset(train=str(file)))
    assert differences(lambda: write_rows(file, "1", "3"), recipe) == {
        "dataset.train": ["train.jsonl"]
    }
    assert differences(lambda: write_rows(file, "1", "3"), recipe) == {}


def test_a_file_of_the_same_contents_may_lie_elsewhere(tmp_path: Path) -> None:
    here, there = write_rows(tmp_path / "a.jsonl", "1"), write_rows(tmp_path / "x/b.jsonl", "1")
    both = [found(Recipe(dataset=Dataset(train=str(file)))) for file in (here, there)]
    assert contents.differences(*both) == {}


def test_shards_whose_order_has_changed_are_other_rows(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_rows(tmp_path / f"{name}.jsonl", name)
    recipe = Recipe(dataset=Dataset(train=str(tmp_path / "*.jsonl")))

    def swap() -> None:
        write_rows(tmp_path / "a.jsonl", "b")
        write_rows(tmp_path / "b.jsonl", "a")

    assert differences(swap, recipe) == {"dataset.train": ["a.jsonl", "b.jsonl"]}
    assert differences(lambda: (tmp_path / "b.jsonl").unlink(), recipe) == {
        "dataset.train": ["b.jsonl"]
    }


def test_every_data_set_is_compared(tmp_path: Path) -> None:
    files = {name: write_rows(tmp_path / f"{name}.jsonl", name) for name in "mhb"}
    recipe = Recipe(
        dataset=Dataset(
            mixture={"m": MixturePart(data=str(files["m"]))},
            held_out={"h": HeldOut(data=str(files["h"]))},
        ),
        benchmark={"b": Benchmark(data=str(files["b"]))},
    )
    rows: Any = SimpleNamespace(rows=Rows("", [], []), stream=None)
    parts = {"train": {"m": rows}, "held_out": {"h": rows}, "benchmarks": {"b": rows}}
    keys = {"m": "dataset.mixture.m", "h": "dataset.held_out.h", "b": "benchmark.b"}
    for name, key in keys.items():
        changed = differences(partial(write_rows, files[name], "other"), recipe, **parts)
        assert changed == {f"{key}.data": [f"{name}.jsonl"]}


def test_held_out_rows_of_the_same_file_are_not_hashed_twice(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "t.jsonl", "1", "2")
    recipe = Recipe(dataset=Dataset(train=str(file), test_split_size=1))
    rows: Any = SimpleNamespace(rows=Rows("", [], []), stream=None)
    assert [*found(recipe, train={"": rows}, held_out={"": rows})] == ["dataset.train"]


def test_hub_data_by_its_commit() -> None:
    def of(commit: str) -> Contents:
        file = f"/cache/datasets/me___x/default/0.0.0/{commit}/x-train.arrow"
        rows = Rows("me/x", [], SimpleNamespace(cache_files=[{"filename": file}] * 2))  # type: ignore[arg-type]
        recipe = Recipe(dataset=Dataset(train="me/x"))
        return found(recipe, train={"": TrainRows(rows, recipe.dataset)})

    assert of("a1b2") == {"dataset.train": {"me/x": "a1b2"}}
    assert contents.differences(of("a1b2"), of("a1b3")) == {"dataset.train": ["me/x"]}


def stream(file: Path, **settings: Any) -> Contents:
    dataset = Dataset(train=str(file), streaming=True, **settings)
    opened = data.open_stream(dataset)
    part = TrainRows(opened.first, dataset, stream=opened)
    return found(Recipe(dataset=dataset), train={"": part})


def test_a_stream_by_sizes(tmp_path: Path) -> None:
    answers = [str(n % 10) for n in range(1200)]
    file = write_rows(tmp_path / "s.jsonl", *answers)
    before = stream(file, shuffle_buffer=50)
    assert [*before["dataset.train"]] == ["s.jsonl"]
    assert before == stream(file, shuffle_buffer=70, train_limit=80)
    write_rows(file, *answers, "1")
    assert contents.differences(before, stream(file)) == {"dataset.train": ["s.jsonl"]}


def model_folder(folder: Path) -> Model:
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text("{}", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(bytes(3 * 2**20))
    return Model(path=str(folder), build=None)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt"]
)
def test_a_file_of_the_tokenizer(tmp_path: Path, name: str) -> None:
    recipe = Recipe(model=model_folder(tmp_path / "m"))
    changed = differences(lambda: (tmp_path / "m" / name).write_text("{ }"), recipe, train={})
    assert changed == {"tokenizer": [name]}


@pytest.mark.parametrize("name", ["tokenizer.json.bak", "vocab.json~", "vocab_old.json"])
def test_a_file_that_no_tokenizer_reads(tmp_path: Path, name: str) -> None:
    recipe = Recipe(model=model_folder(tmp_path / "m"))
    assert differences(lambda: (tmp_path / "m" / name).write_text("{}"), recipe, train={}) == {}


def test_a_tokenizer_of_the_hub_by_its_commit(tmp_path: Path) -> None:
    folder = tmp_path / "models--me--x" / "snapshots"
    recipe = Recipe(model=model_folder(folder / "a1b2"))
    added = folder / "a1b2" / "vocab.json"
    assert differences(lambda: added.write_text("{}"), recipe, train={}) == {}
    other = found(Recipe(model=model_folder(folder / "a1b3")), train={})
    changed = contents.differences(found(recipe, train={}), other)
    assert changed == {"tokenizer": ["commit"]}


def test_a_chat_template_of_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("a")
    model = model_folder(tmp_path / "m")
    recipe = Recipe(model=dataclasses.replace(model, chat_template=str(tmp_path / "t.jinja")))
    changed = differences(lambda: (tmp_path / "t.jinja").write_text("b"), recipe, train={})
    assert changed == {"tokenizer": ["model.chat_template"]}


BEFORE = {
    "dataset.train": {"t.jsonl": "1"},
    "tokenizer": {"tokenizer.json": "1"},
}


def checked(tmp_path: Path, now: Contents, *, resume_changed: bool = False) -> list[str]:
    (tmp_path / CONTENTS).parent.mkdir(exist_ok=True)
    (tmp_path / CONTENTS).write_bytes(contents.as_json(BEFORE))
    said: list[str] = []
    recipe = Recipe(resume="auto", resume_changed=resume_changed)
    contents.check(recipe, tmp_path, now, said.append)
    return [
        line.removeprefix(f"note: since {tmp_path} the contents have changed of ") for line in said
    ]


def test_other_data_or_another_tokenizer_is_refused(tmp_path: Path) -> None:
    assert checked(tmp_path, BEFORE) == []
    for key, name in (("dataset.train", "t.jsonl"), ("tokenizer", "tokenizer.json")):
        now = BEFORE | {key: {name: "2"}}
        message = re.escape(f"was trained with other contents of {key} ({name}). Restore them, or")
        with pytest.raises(UserError, match=f"{message} set resume_changed=true"):
            checked(tmp_path, now)
        assert checked(tmp_path, now, resume_changed=True) == [f"{key} ({name})"]


def test_a_data_set_that_only_one_recipe_has_is_not_compared(tmp_path: Path) -> None:
    now = {key: value for key, value in BEFORE.items() if key != "tokenizer"}
    assert checked(tmp_path, now | {"dataset.eval": {"e.jsonl": "1"}}) == []
