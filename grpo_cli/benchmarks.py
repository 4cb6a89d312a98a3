"""Benchmarks: their rows, checked, and the prompts made of them.

A benchmark's rows have columns of one name each, whatever the source calls them: `question` and
`answer`, or what else its templates and its reward read (`tests`, `entry_point` and
`test_setup_code`, where programs are tested). `benchmark.NAME.columns` renames the source's.

Nothing here imports torch or transformers: a mistake in the data is reported before they load.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import string
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

import yaml

from grpo_cli import data, registry
from grpo_cli.config import Benchmark, Reward
from grpo_cli.errors import UserError, listed, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_cli.rollouts import Prompt

MODES = ("cot", "tir")
EVERY = "all"  # as subset: every configuration of the hub data set, one after the other
# Rewards that hold one final answer against another, so that completions can vote for theirs.
WITH_AN_ANSWER = ("math", "exact_match", "choice")
INEXACT = 2.0**53  # from here on, whole numbers that differ may be one float


def load(name: str, config: Benchmark, limit: int | None = None) -> data.Rows:
    """The rows of a benchmark, checked against its templates and its reward.

    Args:
        name: of the benchmark, in messages and as a recipe. limit: use only so many, besides
            `benchmark.NAME.limit`.

    Raises:
        UserError: data that cannot be had, a template or a reward that needs a column that is not
            there, a template that names none, a row without a gold answer, or with one that is a
            number too large to be exact.
    """
    key, source = f"benchmark.{name}", config.data
    try:
        path = data.local_path(source)
    except ModuleNotFoundError as error:
        raise UserError(f"{key}.data = {source}: there is no such package ({error}).") from error
    if path:
        table = data.load_file(path, f"{key}.data")
    else:
        table = _load_hub(source, config, f"{key}.data")
    table = rename_columns(table, name, config, source)
    check_breakdown(name, config, table.column_names, source)
    limits = [n for n in (config.limit, limit) if n is not None]
    if limits:
        table = table.select(range(min(*limits, len(table))))
    if len(table) == 0:
        raise UserError(f"{key}.data = {source}: the data set is empty.")
    prompts = {f"{key}.cot": config.cot, f"{key}.tir": config.tir}
    templates = {k: template for k, template in prompts.items() if template is not None}
    for column in named_by(templates.values()):
        _check_column(column, table.column_names, name, source, f"{key}: a template")
    data.check_templates(templates, table, source, f"{key}.data")
    for template_key, template in templates.items():
        if not named_by([template]):
            raise UserError(
                f"{template_key} = {template!r}: names no column of the data; write one in braces, "
                f"as {{question}}; {source} has {listed(table.column_names)}."
            )
        for _, field, _, _ in string.Formatter().parse(template):
            if isinstance(table[0].get(field), (list, dict)):
                raise UserError(
                    f"{template_key}: the column {field!r} of {source} is no text; name an item "
                    f"of it, as in {{{field}[0]}}."
                )
    for column in gold_columns(name, config):
        who = f"{key}.reward: {config.reward}"
        _check_column(column, table.column_names, name, source, who)
        for number, cell in enumerate(table[column][:]):
            if is_missing(cell):
                raise UserError(
                    f"{key}.data = {source}, row {number}: the column {column!r}, which the reward "
                    f"{config.reward} needs, is {'null' if cell is None else 'empty'}."
                )
        cells = answers_as_text(config, column, table[column][:], f"{key}.data = {source}")
        if cells is not None:
            names = table.column_names
            table = table.remove_columns(column).add_column(column, cells).select_columns(names)
    return data.Rows(source, table.column_names, table)


def _load_hub(source: str, config: Benchmark, key: str) -> Any:
    if config.subset != EVERY:
        return data.load_hub(source, config.subset, config.split, key)
    import datasets

    try:
        subsets = datasets.get_dataset_config_names(source)
    except Exception as error:  # hub and network errors have no common base
        raise UserError(
            f"{key} = {source}: no such file here, and as a hub data set its configurations "
            f"cannot be had: {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error
    tables = [data.load_hub(source, subset, config.split, key) for subset in subsets]
    return datasets.concatenate_datasets(tables)


def rename_columns(table: Any, name: str, config: Benchmark, source: str) -> Any:
    """A table with the columns renamed that have the names of `benchmark.NAME.columns`.

    What a shipped benchmark renames are the hub's names. A file in its place may have other names
    already, so that an old name may be missing, and a column that has the new name stays. What the
    user renames replaces such a column.

    Raises:
        UserError: a column that is to have two names.
    """
    there, shipped = table.column_names, shipped_entry(name).get("columns", {})
    names = {
        new: old
        for new, old in config.columns.items()
        if old in there and (new not in there or shipped.get(new) != old)
    }
    return data.rename_columns(table, names, source, f"benchmark.{name}.columns")


def check_breakdown(
    name: str, config: Benchmark, there: Sequence[str], source: str, renaming: str = ""
) -> None:
    """Checks that the columns are there by which the user wants the accuracy told.

    What a shipped benchmark tells it by, a file in the place of its data may lack.

    Args:
        there: the data's columns. renaming: the key that renames them, if not the benchmark's.

    Raises:
        UserError: one is not.
    """
    shipped = shipped_entry(name).get("breakdown", ())
    for column in config.breakdown:
        if column not in shipped:
            who = f"benchmark.{name}.breakdown"
            _check_column(column, there, name, source, who, renaming)


def shipped_entry(name: str) -> dict[str, Any]:
    """The shipped benchmark of that name, as its file has it; {} if there is none."""
    file = resources.files("grpo_cli.recipes").joinpath("benchmark", f"{name}.yaml")
    if not file.is_file():
        return {}
    return dict(yaml.safe_load(file.read_text(encoding="utf-8"))[name])


def gold_columns(name: str, config: Benchmark) -> list[str]:
    """The columns that the benchmark's reward cannot do without.

    Raises:
        UserError: there is no such reward.
    """
    function = registry.resolve(config.reward, f"benchmark.{name}.reward")
    required = registry.Signature.of(function).required
    return [column for column in required if column not in config.args]


def is_missing(cell: Any) -> bool:
    """Whether a gold answer is none: null, blank, or no test at all."""
    return cell is None or (isinstance(cell, (str, list)) and not len(cell)) or str(cell).isspace()


def answers_as_text(
    config: Benchmark,
    column: str,
    cells: Sequence[Any],
    source: str,
    rows: Sequence[int] | None = None,
) -> list[str | None] | None:
    """A column of gold answers as text, where they are numbers that were read as floats.

    A column of numbers has one type: 3 beside 2.5 is read as 3.0, which is not the text "3". Whole
    values become the text of the whole number, others their shortest text.

    Args:
        source: what messages begin with. rows: number of each cell's row, if not 0, 1, 2, ...

    Returns:
        None where the column is to stay as it is: it has no floats, or not only numbers, or the
        reward does not hold final answers against it and may compute with them.

    Raises:
        UserError: a number so large that the file may say another, or one that is none (NaN).
    """
    there = [type(cell) for cell in cells if cell is not None]
    if not has_votes(config.reward) or float not in there or not {int, float}.issuperset(there):
        return None
    texts: list[str | None] = []
    for number, cell in zip(rows or range(len(cells)), cells, strict=True):
        if isinstance(cell, float) and not abs(cell) < INEXACT:  # NaN is not less
            raise UserError(
                f"{source}, row {number}: the column {column!r} is read as {cell!r}, which may not "
                "be what the file says; write the answer as text, in quotes."
            )
        whole = isinstance(cell, float) and cell.is_integer()
        texts.append(None if cell is None else str(int(cell)) if whole else repr(cell))
    return texts


def named_by(templates: Iterable[str]) -> list[str]:
    """The columns that templates name; what is no template names none."""
    names: list[str] = []
    for template in templates:
        try:
            fields = [field for _, field, _, _ in string.Formatter().parse(template) if field]
        except ValueError:
            continue
        names += [field.partition("[")[0].partition(".")[0] for field in fields]
    return list(dict.fromkeys(names))


def _check_column(
    column: str,
    there: Sequence[str],
    name: str,
    source: str,
    who_needs_it: str,
    renaming: str = "",
) -> None:
    if column not in there:
        raise UserError(
            f"{who_needs_it} needs the column {column!r}, which {source} lacks; it has "
            f"{listed(there)}. Rename one with "
            f"{renaming or f'benchmark.{name}.columns'}.{column}=NAME."
            f"{nearest(column, there)}"
        )


def fingerprint(rows: data.Rows) -> str:
    """16 hexadecimal digits that stand for the rows' content, in order; not for their source."""
    digest = hashlib.sha256()
    for row in rows.rows:
        line = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)
        digest.update(line.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()[:16]


def problem_text(
    config: Benchmark, mode: str, row: Mapping[str, Any]
) -> str | list[dict[str, str]]:
    """The prompt of a row: worked examples, if any, and then its problem.

    Where `config.chat` is true these are messages, each example a turn; else a text, in which blank
    lines divide the examples.
    """
    template = getattr(config, mode)
    shown = examples_of(config, mode)
    if not config.chat:
        texts = [f"{template.format_map(one)}\n{one[mode]}" for one in shown]
        return "\n\n".join([*texts, template.format_map(row)])
    messages = [] if config.system is None else [{"role": "system", "content": config.system}]
    for one in shown:
        messages.append({"role": "user", "content": template.format_map(one)})
        messages.append({"role": "assistant", "content": one[mode]})
    return [*messages, {"role": "user", "content": template.format_map(row)}]


def asking(config: Benchmark) -> tuple[str, ...]:
    """Those of the stop texts that a template has behind its problem.

    A base model that comes to one has just put a problem of its own.
    """
    templates = [t.replace("{{", "{").replace("}}", "}") for t in (config.cot, config.tir) if t]
    return tuple(s for s in config.stop if any(s in t[t.find("}") :] for t in templates))


def examples_of(config: Benchmark, mode: str) -> list[dict[str, Any]]:
    """The worked examples that a prompt of this mode begins with."""
    return [one for one in config.examples if one.get(mode) is not None][: config.shots]


def check_examples(name: str, config: Benchmark, mode: str) -> None:
    """Checks that there are as many examples of a mode as are to be shown, and what they hold.

    Raises:
        UserError: there are fewer, or one lacks a column that the template names.
    """
    shown = examples_of(config, mode)
    if len(shown) < config.shots:
        raise UserError(
            f"benchmark.{name}.shots = {config.shots}: {len(shown)} of benchmark.{name}.examples "
            f"have {mode}, their solution in that mode."
        )
    for number, one in enumerate(shown):
        for column in named_by([getattr(config, mode)]):
            if column not in one:
                raise UserError(
                    f"benchmark.{name}.examples: number {number}, counted from 0, lacks "
                    f"{column!r}, which benchmark.{name}.{mode} names; it has {listed(one)}."
                )


def make_prompts(
    name: str,
    config: Benchmark,
    mode: str,
    rows: data.Rows,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Prompt]:
    """The prompts of all rows in a mode; none is dropped or cut, however long.

    Raises:
        UserError: no prompt for the mode, a row that does not fit it, too few examples, a chat with
            a tokenizer that has no template, a system prompt without a chat.
    """
    from grpo_cli.rollouts import Prompt

    if getattr(config, mode) is None:
        there = [m for m in MODES if getattr(config, m) is not None]
        raise UserError(
            f"eval.mode = {mode}: benchmark.{name} has no prompt for it; it has {listed(there)}. "
            f"Set benchmark.{name}.{mode}."
        )
    check_examples(name, config, mode)
    chat = bool(tokenizer.chat_template) if config.chat is None else config.chat
    if chat and not tokenizer.chat_template:
        raise UserError(
            f"benchmark.{name}.chat = true: the tokenizer has no chat template; set "
            f"model.chat_template or benchmark.{name}.chat=false."
        )
    if config.system is not None and not chat:
        why = "the tokenizer has no chat template" if config.chat is None else "chat is false"
        raise UserError(
            f"benchmark.{name}.system: is only read where the prompt is a chat, and {why}."
        )
    config = dataclasses.replace(config, chat=chat)
    texts = []
    for number, row in enumerate(rows.rows):
        try:
            texts.append(problem_text(config, mode, row))
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            raise UserError(
                f"benchmark.{name}.{mode}: row {number} of {rows.source} does not fit the "
                f"template: {type(error).__name__}: {error}"
            ) from error
    rendered: list[Any] = texts
    if chat:
        rendered = [
            tokenizer.apply_chat_template(text, add_generation_prompt=True, tokenize=False)
            for text in texts
        ]
    # A chat template writes its own special tokens; a plain prompt gets the tokenizer's.
    encoded = tokenizer(rendered, add_special_tokens=not chat)["input_ids"]
    prompts = []
    for number, (row, text, ids) in enumerate(zip(rows.rows, texts, encoded, strict=True)):
        if not ids:
            raise UserError(f"benchmark.{name}.{mode}: the prompt of row {number} is empty.")
        columns = data.other_columns(row)
        prompts.append(Prompt(row=number, ids=list(ids), text=text, columns=columns))
    return prompts


def rewards(config: Benchmark) -> dict[str, Reward]:
    """The one reward of a benchmark, under its function's short name."""
    return {short_name(config): Reward(function=config.reward, args=dict(config.args))}


def short_name(config: Benchmark) -> str:
    """What the benchmark's reward is called: `math` too where it is given as my_package.my:math."""
    return config.reward.rpartition(":")[2]


def has_votes(reward: str) -> bool:
    """Whether completions that this reward judges have final answers that can be voted on."""
    return registry.full_name(reward) in map(registry.full_name, WITH_AN_ANSWER)
