"""A resumed run compares the contents of what it reads with those of its checkpoint."""

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import datasets
import pytest
from datasets import Image as Picture
from datasets import List, Value
from PIL import Image

from grpo_cli.checkpoints.checkpointer import CONTENTS
from grpo_cli.config.recipe import Recipe
from grpo_cli.data.rows import Rows
from grpo_cli.data.settings import Dataset, HeldOut, MixturePart
from grpo_cli.data.streaming import open_stream
from grpo_cli.errors import UserError
from grpo_cli.evaluation.settings import Benchmark
from grpo_cli.models.settings import Model
from grpo_cli.training import contents
from grpo_cli.training.contents import Contents
from grpo_cli.training.prepare import Prepared
from grpo_cli.training.scorers import TrainRows
from tests.data.test_files import write


def write_rows(path: Path, *answers: str) -> Path:
    return write(path, *({"prompt": f"row {i}", "answer": a} for i, a in enumerate(answers)))


def found(recipe: Recipe, rewards: dict[str, Any] | None = None, **parts: Any) -> Contents:
    """The contents of a run; its rows need not be loaded, except for those from the hub."""
    rows = Rows("", [], [])
    if not parts and not recipe.dataset.mixture:
        parts = {"train": {"": TrainRows(rows, recipe.dataset)}}
    scorer: Any = SimpleNamespace(
        rewards={name: SimpleNamespace(function=f) for name, f in (rewards or {}).items()}
    )
    return contents.of_run(Prepared(recipe, Path(), **{"train": {}, **parts}, scorer=scorer))


def differences(change: Callable[[], object], recipe: Recipe, **more: Any) -> dict[str, list[str]]:
    """What a change of the files alters."""
    before = found(recipe, **more)
    change()
    return contents.differences(json.loads(contents.as_json(before)), found(recipe, **more))


def test_moved_file(tmp_path: Path) -> None:
    here, there = write_rows(tmp_path / "a.jsonl", "1"), write_rows(tmp_path / "x/b.jsonl", "1")
    both = [found(Recipe(dataset=Dataset(train=str(file)))) for file in (here, there)]
    assert contents.differences(*both) == {}


def test_reordered_shards(tmp_path: Path) -> None:
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
    opened = open_stream(dataset)
    part = TrainRows(opened.first, dataset, stream=opened)
    return found(Recipe(dataset=dataset), train={"": part})


def test_a_stream_by_sizes_and_first_rows(tmp_path: Path) -> None:
    answers = [str(n % 10) for n in range(1200)]
    file = write_rows(tmp_path / "s.jsonl", *answers)
    before = stream(file)
    assert [*before["dataset.train"]] == ["s.jsonl", "first 1,000 rows"]
    assert before == stream(file, train_limit=80)
    write_rows(file, *answers, "1")
    assert contents.differences(before, stream(file)) == {"dataset.train": ["s.jsonl"]}
    write_rows(file, *answers[:999], "x", *answers[1000:])
    assert contents.differences(before, stream(file)) == {"dataset.train": ["first 1,000 rows"]}


def test_a_stream_with_images_by_their_bytes(tmp_path: Path) -> None:
    def save(name: str, color: str) -> Path:
        image, path = Image.new("RGB", (2, 2), color), tmp_path / name
        rows = {"prompt": ["a"], "image": [image], "images": [[image]]}
        features = {"prompt": Value("string"), "image": Picture(), "images": List(Picture())}
        datasets.Dataset.from_dict(rows, datasets.Features(features)).save_to_disk(path)
        return path

    red, blue = save("red", "red"), save("blue", "blue")
    first = "first 1,000 rows"
    assert stream(red) == stream(red)
    assert stream(red)["dataset.train"][first] != stream(blue)["dataset.train"][first]
    assert contents._text(object()) == contents._text(object())


def model_folder(folder: Path) -> Model:
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text("{}", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(bytes(3 * 2**20))
    return Model(path=str(folder), build=None)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("tokenizer.json", {"tokenizer": ["tokenizer.json"]}),
        ("chat_template.jinja", {"tokenizer": ["chat_template.jinja"]}),
        ("merges.txt", {"tokenizer": ["merges.txt"]}),
        ("tokenizer.json.bak", {}),  # which nobody reads
    ],
)
def test_a_file_of_the_model(tmp_path: Path, name: str, changed: dict[str, list[str]]) -> None:
    recipe = Recipe(model=model_folder(tmp_path / "m"))
    change = partial((tmp_path / "m" / name).write_text, "{ }")
    assert differences(change, recipe, train={}) == changed
    words = model_folder(tmp_path / "words").path
    recipe = Recipe(model=dataclasses.replace(recipe.model, tokenizer=words))
    change = partial((tmp_path / "words" / name).write_text, "{ }")
    assert differences(change, recipe, train={}) == changed


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


@pytest.mark.parametrize("at", [0, 3 * 2**20 - 1])
def test_weights_by_a_sample(tmp_path: Path, at: int) -> None:
    recipe = Recipe(model=model_folder(tmp_path / "m"))

    def change() -> None:
        with (tmp_path / "m" / "model.safetensors").open("r+b") as file:
            file.seek(at - at % 2**16)
            file.write(b"\1" * 2**17)  # more than is read at a time

    assert differences(change, recipe, train={}) == {"model.path": ["model.safetensors"]}


def test_the_file_of_a_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("own_rewards")
    module.__file__ = str(tmp_path / "own_rewards.py")
    (tmp_path / "own_rewards.py").write_text("a = 1")
    exec("def f(): pass\nclass C:\n  def __call__(self): pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "own_rewards", module)
    changed = differences(
        lambda: (tmp_path / "own_rewards.py").write_text("a = 2"),
        Recipe(),
        rewards={"f": module.f, "c": module.C()},
        train={},
    )
    assert changed == {"reward.f": ["own_rewards.py"], "reward.c": ["own_rewards.py"]}


BEFORE = {
    "dataset.train": {"t.jsonl": "1"},
    "tokenizer": {"tokenizer.json": "1"},
    "model.path": {"model.safetensors": "1"},
    "reward.r": {"r.py": "1"},
}


def checked(tmp_path: Path, now: Contents, *, resume_changed: bool = False) -> list[str]:
    (tmp_path / CONTENTS).parent.mkdir(exist_ok=True)
    (tmp_path / CONTENTS).write_bytes(contents.as_json(BEFORE))
    said: list[str] = []
    recipe = Recipe(resume="auto", resume_changed=resume_changed)
    contents.check(recipe, tmp_path, now, said.append)
    return [line.removeprefix(f"note: since {tmp_path} the contents have changed of ")
            for line in said]  # fmt: skip


def test_other_data_or_another_tokenizer_is_refused(tmp_path: Path) -> None:
    assert checked(tmp_path, BEFORE) == []
    for key, name in (("dataset.train", "t.jsonl"), ("tokenizer", "tokenizer.json")):
        now = BEFORE | {key: {name: "2"}}
        message = re.escape(f"was trained with other contents of {key} ({name}). Restore them, or")
        with pytest.raises(UserError, match=f"{message} set resume_changed=true"):
            checked(tmp_path, now)
        assert checked(tmp_path, now, resume_changed=True) == [f"{key} ({name})"]


def test_another_reward_and_other_weights_are_named(tmp_path: Path) -> None:
    now = BEFORE | {"reward.r": {"r.py": "2"}, "model.path": {"model.safetensors": "2"}}
    assert checked(tmp_path, now) == ["model.path (model.safetensors)", "reward.r (r.py)"]
