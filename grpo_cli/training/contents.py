"""Hashes of the files that a run reads: a checkpoint stores them, and a resumed run compares them.

    training/contents.json   {"dataset.train": {"train.jsonl": "9f86d0..."},
                              "tokenizer": {"tokenizer.json": "60303a..."}, ...}

The recipe names files, and a file of the same name may have other contents when a run is resumed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from transformers.utils import cached_file

from grpo_cli.checkpoints import paths, provenance
from grpo_cli.checkpoints.checkpointer import CONTENTS
from grpo_cli.checkpoints.lookup import file_hash
from grpo_cli.config import sources
from grpo_cli.config.recipe import Recipe
from grpo_cli.config.sources import local_path
from grpo_cli.data import files
from grpo_cli.data.rows import Rows
from grpo_cli.data.settings import NamedRows
from grpo_cli.data.streaming import RowStream
from grpo_cli.errors import UserError
from grpo_cli.evaluation.settings import Benchmark
from grpo_cli.files import read_json
from grpo_cli.models import loading
from grpo_cli.models.settings import Model
from grpo_cli.scoring.registry import RewardFunction
from grpo_cli.training.prepare import Prepared

Contents = dict[str, dict[str, str]]  # key of the recipe -> file name -> hash

TOKENIZER = (  # exact names: a copy such as tokenizer.json.bak is not read
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model", "tiktoken.model", "tekken.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
WEIGHTS = ("*.safetensors", "*.bin")
FIRST_ROWS = 1000  # rows of a stream that are hashed
SAMPLE_BLOCKS, BLOCK_BYTES = 16, 2**16  # hashed blocks of a weights file, evenly spread


def of_run(prepared: Prepared) -> Contents:
    """Returns the hashes of data, tokenizer, base model and rewards of a run."""
    recipe = prepared.recipe
    found = dict(_of_data(prepared))
    if recipe.model.path is not None and recipe.model.build is None:
        folder = _folder(recipe.model, recipe.model.path, "config.json")
        words = folder
        if recipe.model.tokenizer is not None:
            words = _folder(recipe.model, recipe.model.tokenizer, "tokenizer_config.json")
        if provenance.is_cached(words):  # where any tool may add files of the same commit
            found["tokenizer"] = {"commit": words.name}
        else:
            files = _matching(words, TOKENIZER)
            found["tokenizer"] = {file.name: file_hash(file) for file in files}
        template = recipe.model.chat_template
        if template and (file := sources.template_file(template)) is not None:
            found["tokenizer"]["model.chat_template"] = file_hash(file)
        found["model.path"] = {p.name: sample_hash(p) for p in _matching(folder, WEIGHTS)}
    for name, reward in prepared.scorer.rewards.items():
        if (file := _file_of(reward.function)) is not None:
            found[f"reward.{name}"] = {file.name: file_hash(file)}
    return found


def check(recipe: Recipe, checkpoint: Path, now: Contents, say: Callable[[str], None]) -> None:
    """Compares the contents that a run reads with those that its checkpoint was trained on.

    Args:
        now: the contents as the run finds them.
        say: prints the changes that do not prevent a resume.

    Raises:
        UserError: data or the tokenizer has changed, and `resume_changed` is not set.
    """
    before: Contents = read_json(checkpoint / CONTENTS)
    changed = differences(before, now)
    refused, shown = [], paths.shown(checkpoint)
    for key, names in changed.items():
        what = f"{key} ({', '.join(names)})"
        if recipe.resume_changed or key.startswith(("reward.", "model.")):
            say(f"note: since {shown} the contents have changed of {what}")
        else:
            refused.append(what)
    if refused:
        raise UserError(
            f"resume: {shown} was trained with other contents of {'; '.join(refused)}. "
            "Restore them, or set resume_changed=true to continue with what is there now."
        )


def differences(before: Contents, now: Contents) -> dict[str, list[str]]:
    """Returns the names of the files whose contents differ, by key.

    Keys on one side only are changes of the recipe, and are skipped. Files that are only renamed or
    moved have the same contents.
    """
    out = {}
    for key in (key for key in before if key in now):
        old, new = before[key], now[key]
        if [*old.values()] != [*new.values()]:
            names = dict.fromkeys([*old, *new])
            # The same files in another order give the rows in another order.
            out[key] = [n for n in names if old.get(n) != new.get(n)] or [*names]
    return out


def _of_data(prepared: Prepared) -> Iterator[tuple[str, dict[str, str]]]:
    dataset = prepared.recipe.dataset
    for name, part in prepared.train.items():
        if part.stream is not None:
            yield "dataset.train", _of_stream(part.stream)
        elif name:
            yield _of_named(f"dataset.mixture.{name}.data", dataset.mixture[name], part.rows)
        else:
            own = NamedRows(dataset.train or "", dataset.subset, dataset.train_split)
            yield _of_named("dataset.train", own, part.rows)
    for name, held in prepared.held_out.items():
        if name:
            yield _of_named(f"dataset.held_out.{name}.data", dataset.held_out[name], held.rows)
        elif dataset.eval is not None:  # otherwise they are rows of dataset.train
            own = NamedRows(dataset.eval, dataset.subset, dataset.eval_split)
            yield _of_named("dataset.eval", own, held.rows)
    for name, bench in prepared.benchmarks.items():
        yield _of_named(f"benchmark.{name}.data", prepared.recipe.benchmark[name], bench.rows)


def _of_named(key: str, config: NamedRows | Benchmark, rows: Rows) -> tuple[str, dict[str, str]]:
    path = local_path(config.data)
    if path is None:
        return key, {config.data: revision(rows)}
    found = _named(_data_files(path, config.subset, config.split, key))
    return key, {name: file_hash(file) for name, file in found.items()}


def _data_files(path: Path, subset: str | None, split: str, key: str) -> list[Path]:
    if files.is_saved_to_disk(path):
        return sorted(file for file in path.rglob("*") if file.is_file())
    return files.find_files(path, subset, split, key)


def _named(found: list[Path]) -> dict[str, Path]:
    """Returns files by their paths relative to their common folder."""
    folder = os.path.commonpath([file.parent for file in found])
    return {os.path.relpath(file, folder): file for file in found}


def revision(rows: Rows) -> str:
    """Returns the commit of a hub data set, after which `datasets` names its cache folder."""
    cached = getattr(rows.rows, "cache_files", ())
    return " ".join(sorted({Path(file["filename"]).parent.name for file in cached}))


def _of_stream(stream: RowStream) -> dict[str, str]:
    """Returns names and sizes of a stream's files, and the hash of its first rows."""
    config = stream.config
    found = {}
    path = local_path(str(config.train))
    if path is not None:
        own = _data_files(path, config.subset, config.train_split, "dataset.train")
        found = {name: f"{file.stat().st_size} bytes" for name, file in _named(own).items()}
    every = dataclasses.replace(stream, config=dataclasses.replace(config, train_limit=None))
    digest = hashlib.sha256()
    for row in itertools.islice(every.read(0), FIRST_ROWS):
        # The columns come from the first block of the stream, whose size may change.
        values = {name: value for name, value in row.items() if value is not None}
        digest.update(json.dumps(values, sort_keys=True, default=_text).encode())
    return {**found, f"first {FIRST_ROWS:,} rows": digest.hexdigest()}


def _text(value: object) -> str:
    """Returns a value that JSON lacks as a string, without memory addresses, which vary."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _folder(model: Model, path: str, name: str) -> Path:
    """Returns the folder of a model or a tokenizer, for an adapter that of its base model.

    A hub name's is in the cache; the model's config and tokenizer are loaded first for that.

    Args:
        name: a file of the folder.
    """
    model, path = loading.base_of(model, path)
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    loading.load_config(model, str(model.path))
    with loading.explained(path):
        file = cached_file(path, name, revision=model.revision)
    assert file is not None, "loaded before"
    return Path(file).parent


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def sample_hash(file: Path) -> str:
    """Returns the size of a file and the hash of blocks spread evenly over it."""
    size = file.stat().st_size
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        for i in range(SAMPLE_BLOCKS):
            opened.seek(max(0, size - BLOCK_BYTES) * i // (SAMPLE_BLOCKS - 1))
            digest.update(opened.read(BLOCK_BYTES))
    return f"{size} bytes, {digest.hexdigest()}"


def _file_of(function: RewardFunction) -> Path | None:
    """Returns the file of the module that defines a reward function, or the class of an object."""
    module = sys.modules.get(inspect.unwrap(function).__module__)
    file = getattr(module, "__file__", None)
    return None if file is None else Path(file)


def as_json(contents: Mapping[str, Mapping[str, str]]) -> bytes:
    """Returns the bytes of a checkpoint's training/contents.json."""
    return (json.dumps(contents, indent=1) + "\n").encode()
