"""Files and hub data sets to rows, rows to prompts, prompts to an order that can be recomputed.

Nothing here imports torch or transformers: a mistake in the data is reported before they load.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import importlib.resources
import json
import logging
import os
import random
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_cli.config import Dataset
from grpo_cli.errors import UserError, listed, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_cli.rollouts import Prompt

# A file may begin with a byte order mark, as Excel and Windows write it, which is no part of it.
ENCODING = "utf-8-sig"
FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass(frozen=True)
class Rows:
    """The rows of one split, and where they are from (for messages)."""

    source: str
    columns: list[str]
    rows: Sequence[dict[str, Any]]


def load_rows(config: Dataset, split: str) -> Rows:
    """The rows of `dataset.train` or `dataset.eval`, checked against the templates.

    Args:
        split: "train" or "eval".

    Raises:
        UserError: a missing file, a malformed line, a missing column, no rows.
    """
    key = f"dataset.{split}"
    source = config.train if split == "train" else config.eval
    if source is None:
        raise UserError(f"{key}: no data; give a file or a hub name.")
    try:
        path = local_path(source)
    except ModuleNotFoundError as error:
        raise UserError(f"{key} = {source}: there is no such package ({error}).") from error
    if path:
        table = load_file(path, key)
    else:
        name = config.train_split if split == "train" else config.eval_split
        table = load_hub(source, config.subset, name, key)
    table = rename_columns(table, config.columns, source, "dataset.columns")
    limit = config.train_limit if split == "train" else config.eval_limit
    if limit is not None:
        table = table.select(range(min(limit, len(table))))
    if len(table) == 0:
        raise UserError(f"{key} = {source}: the data set is empty.")
    templates = {"dataset.prompt": config.prompt}
    if config.solution is not None and split == "train":
        templates["dataset.solution"] = config.solution
    check_templates(templates, table, source, key)
    return Rows(source, table.column_names, table)


def check_templates(templates: Mapping[str, str], table: Any, source: str, key: str) -> None:
    """Checks templates, given by their keys, against a table that is not empty.

    Args:
        key: what messages call the source by.

    Raises:
        UserError: what is no template, a column that is not there, or that is null in some row.
    """
    for template_key, template in templates.items():
        _check_template(template_key, template, table[0], source)
        for _, name, _, _ in string.Formatter().parse(template):
            if name in table.column_names and None in (cells := table[name][:]):
                raise UserError(
                    f"{key} = {source}, row {cells.index(None)}: the column {name!r}, which "
                    f"{template_key} names, is null."
                )


def rename_columns(table: Any, names: Mapping[str, str], source: str, key: str) -> Any:
    """A table with columns renamed, given as new name -> old name.

    Raises:
        UserError: a column that is not there, or that is to have two names.
    """
    for new, old in names.items():
        if old not in table.column_names:
            hint = nearest(old, table.column_names)
            raise UserError(
                f"{key}.{new} = {old!r}: {source} has no such column; "
                f"it has {listed(table.column_names)}.{hint}"
            )
    twice = [old for old in names.values() if [*names.values()].count(old) > 1]
    if twice:
        raise UserError(f"{key}: {twice[0]!r} cannot be renamed to two names.")
    # All at once, so that columns may change places.
    replaced = names.keys() - set(names.values())
    table = table.remove_columns([name for name in table.column_names if name in replaced])
    return table.rename_columns({old: new for new, old in names.items()})


def local_path(source: str) -> Path | None:
    """The file that `source` names, or None for a hub name. `pkg://a.b/c` is a package's file."""
    if source.startswith("pkg://"):
        package, _, name = source.removeprefix("pkg://").partition("/")
        return Path(str(importlib.resources.files(package).joinpath(name)))
    path = Path(os.path.expanduser(source))
    is_file = path.exists() or file_format(path) is not None or source.startswith((".", "/", "~"))
    return path if is_file else None


def is_local(source: str) -> bool:
    """Whether `source` names a file, of a package that may not be there too, and no hub name."""
    return source.startswith("pkg://") or local_path(source) is not None


def file_format(path: Path) -> str | None:
    """The `datasets` builder for a file name, or None if the name is of no known kind."""
    suffixes = [s for s in path.suffixes if s != ".gz"]
    return FORMATS.get(suffixes[-1].lower()) if suffixes else None


def load_file(path: Path, key: str) -> Any:
    """A file of rows as a `datasets.Dataset`.

    Args:
        key: what messages call the file by.

    Raises:
        UserError: a missing file, a malformed line, no rows.
    """
    if not path.exists():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"{key} = {path}: there is no such file.{nearest(path.name, beside)}")
    kind = file_format(path)
    if kind is None or path.is_dir():
        raise UserError(f"{key} = {path}: must be a {', '.join(FORMATS)} file (or .gz of one).")
    if kind == "json":
        _check_json(path, key)
    import datasets

    datasets.disable_progress_bars()
    if kind == "csv":
        return datasets.Dataset.from_list(_read_csv(path, key))
    # Only where there is a mark to skip: another encoding than utf-8 takes half as long again.
    options = {"encoding": ENCODING} if kind == "json" and _begins_with_a_mark(path) else {}
    try:
        with _loaders_silent():
            return datasets.load_dataset(kind, data_files=str(path), split="train", **options)
    except Exception as error:  # pyarrow's and datasets' errors have no common base
        cause = str(error.__cause__ or error).split("\n")[0]
        if "corresponds to no data" in cause:
            raise UserError(f"{key} = {path}: the data set is empty.") from error
        raise UserError(f"{key} = {path}: cannot be read: {cause}") from error


def _begins_with_a_mark(path: Path) -> bool:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        return bool(file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8)


@contextlib.contextmanager
def _loaders_silent() -> Iterator[None]:
    """Keeps the loaders of `datasets` from logging an error that they then raise as well."""
    logger = logging.getLogger("datasets.packaged_modules")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def _check_json(path: Path, key: str) -> None:
    """Finds what `datasets` reports without a place: the first malformed line of a JSON file."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding=ENCODING) as file:
        start = ""
        try:
            start = file.read(1)
            file.seek(0)
            if not start:
                raise UserError(f"{key} = {path}: the data set is empty.")
            if start == "[":  # one JSON array
                json.load(file)
                return
            for number, line in enumerate(file, start=1):
                if line.strip() and not isinstance(json.loads(line), dict):
                    raise UserError(f"{key} = {path}, line {number}: must be a JSON object.")
        except json.JSONDecodeError as error:
            at = number if start != "[" else error.lineno
            raise UserError(f"{key} = {path}, line {at}: malformed JSON ({error.msg}).") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{key} = {path}: is not UTF-8 text ({error.reason}).") from error
        except (OSError, EOFError) as error:  # no gzip, or a part of one
            raise UserError(f"{key} = {path}: cannot be read: {error}") from error


def _read_csv(path: Path, key: str) -> list[dict[str, str]]:
    """Rows as text: what looks like a number or a missing value may be an answer, 007 or NA."""
    csv.field_size_limit(2**31 - 1)
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding=ENCODING, newline="") as file:
            reader = csv.DictReader(file, strict=True)
            rows = list(reader)
    except UnicodeDecodeError as error:
        raise UserError(f"{key} = {path}: is not UTF-8 text ({error.reason}).") from error
    except (OSError, EOFError, csv.Error) as error:
        raise UserError(f"{key} = {path}: cannot be read: {error}") from error
    names = reader.fieldnames or []
    if not rows:
        raise UserError(f"{key} = {path}: the data set is empty.")
    for number, row in enumerate(rows):
        if None in row or None in row.values():
            got = len(names) + len(row.get(None, ())) - [*row.values()].count(None)  # type: ignore[call-overload]
            raise UserError(
                f"{key} = {path}, row {number}: has {got} fields; the header has {len(names)}."
            )
    return rows


def load_hub(source: str, subset: str | None, split: str, key: str) -> Any:
    """One split of a hub data set as a `datasets.Dataset`.

    Args:
        key: what messages call the data set by.

    Raises:
        UserError: it cannot be had, whatever the cause.
    """
    import datasets

    try:
        return datasets.load_dataset(source, subset, split=split)
    except Exception as error:  # hub, network and builder errors have no common base
        raise UserError(
            f"{key} = {source}: no such file here, and as a hub data set (split {split}) it cannot "
            f"be loaded: {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error


def _check_template(key: str, template: str, row: dict[str, Any], source: str) -> None:
    try:
        template.format_map(row)
    except KeyError as error:
        name = str(error.args[0])
        raise UserError(
            f"{key}: the template names a column {name!r} that {source} lacks; "
            f"it has {listed(row)}.{nearest(name, row)}"
        ) from error
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise UserError(
            f"{key} = {template!r}: is not a template ({error}); "
            "write a literal brace twice, as in \\boxed{{}}."
        ) from error


def make_prompts(
    rows: Rows, config: Dataset, tokenizer: PreTrainedTokenizerBase, *, held_out: bool = False
) -> tuple[list[Prompt], int]:
    """Prompts of all rows, and how many rows were dropped or cut for being over-long.

    Args:
        held_out: rows to evaluate on. None of them is dropped or cut: an accuracy over the rows
            that happen to be short would not be one over the data.

    Raises:
        UserError: a row whose `prompt` is a list of messages without dataset.chat, a chat data set
            with a tokenizer that has no template, or no row short enough.
    """
    from grpo_cli.rollouts import Prompt

    if config.chat and not tokenizer.chat_template:
        raise UserError(
            "dataset.chat = true: the tokenizer has no chat template; "
            "set model.chat_template or dataset.chat=false."
        )
    prompts, overlong = [], 0
    texts = [prompt_text(row, config, number) for number, row in enumerate(rows.rows)]
    if config.chat:
        rendered = [
            tokenizer.apply_chat_template(text, add_generation_prompt=True, tokenize=False)
            for text in texts
        ]
    else:
        rendered = texts
    # A chat template writes its own special tokens; a plain prompt gets the tokenizer's.
    encoded = tokenizer(rendered, add_special_tokens=not config.chat)["input_ids"]
    for number, (row, text, ids) in enumerate(zip(rows.rows, texts, encoded, strict=True)):
        if len(ids) > config.max_prompt_tokens and not held_out:
            overlong += 1
            if config.overlong_prompts == "drop":
                continue
            ids = ids[-config.max_prompt_tokens :]
        if not ids:
            raise UserError(f"{rows.source}, row {number}: the prompt is empty.")
        columns = other_columns(row)
        prompts.append(Prompt(row=number, ids=list(ids), text=text, columns=columns))
    if not prompts:
        raise UserError(
            f"dataset.max_prompt_tokens = {config.max_prompt_tokens}: every prompt of "
            f"{rows.source} is longer (the shortest has {min(map(len, encoded))} tokens)."
        )
    return prompts, overlong


def other_columns(row: dict[str, Any]) -> dict[str, Any]:
    """What reward functions get of a row, besides its prompt."""
    return {k: v for k, v in row.items() if k not in ("prompt", "completion")}


def prompt_text(row: dict[str, Any], config: Dataset, number: int) -> Any:
    """The prompt as a string, or as messages for a chat data set."""
    if config.prompt == "{prompt}" and isinstance(row["prompt"], list):
        if not config.chat:
            raise UserError(
                f"dataset.chat = false: row {number} holds a list of messages; "
                "set dataset.chat=true."
            )
        messages = list(row["prompt"])
    else:
        text = config.prompt.format_map(row)
        if not config.chat:
            return text
        messages = [{"role": "user", "content": text}]
    if config.system is not None:
        messages.insert(0, {"role": "system", "content": config.system})
    return messages


class PromptStream:
    """The endless sequence of prompts of a run, epoch after epoch.

    Which prompt stands at a position is a pure function of (seed, position), so that resuming needs
    no state, and so that any number of processes shares one order.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool) -> None:
        self.prompts = prompts
        self.seed = seed
        self.shuffle = shuffle
        self._order: tuple[int, list[int]] = (-1, [])  # the epoch last asked for, and its order

    def take(self, start: int, count: int) -> Iterator[tuple[int, Prompt]]:
        """(position, prompt) for `count` positions from `start` on."""
        for position in range(start, start + count):
            epoch, offset = divmod(position, len(self.prompts))
            if self._order[0] != epoch:
                self._order = (
                    epoch,
                    epoch_order(self.seed, epoch, len(self.prompts), self.shuffle),
                )
            yield position, self.prompts[self._order[1][offset]]

    def prompt_at(self, position: int) -> Prompt:
        """The prompt that stands there."""
        ((_, prompt),) = self.take(position, 1)
        return prompt


def epoch_order(seed: int, epoch: int, size: int, shuffle: bool) -> list[int]:
    """The order of `size` prompts in one epoch."""
    order = list(range(size))
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def solution_pairs(rows: Rows, config: Dataset) -> Iterator[tuple[Any, str]]:
    """(prompt text, worked solution) of each row, for the warm-up of a built model."""
    assert config.solution is not None, "checked when the recipe was parsed"
    for number, row in enumerate(rows.rows):
        yield prompt_text(row, config, number), config.solution.format_map(row)
