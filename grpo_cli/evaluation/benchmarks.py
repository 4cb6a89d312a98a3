"""Loads and checks the rows of benchmarks, and makes prompts from them.

Columns have the same names in every benchmark: `question` and `answer`, or other columns that its
prompts and its reward read (`tests`, `entry_point` and `test_setup_code` where programs are
tested). `benchmark.NAME.columns` renames those of the source.

Nothing here imports torch or transformers: a mistake in the data is reported before they load.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from grpo_cli.data import images
from grpo_cli.data import rows as tables
from grpo_cli.data.prompts import Mark, encode, fill, unchanged
from grpo_cli.data.rows import Rows
from grpo_cli.errors import UserError, listed
from grpo_cli.evaluation.settings import Benchmark
from grpo_cli.files import read_yaml
from grpo_cli.scoring import registry
from grpo_cli.scoring.bound_reward import Signature
from grpo_cli.scoring.settings import Reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_cli.models.vision import VisionProcessor
    from grpo_cli.records import Prompt
    from grpo_cli.scoring.scorer import Scorer


@dataclass(frozen=True)
class LoadedBenchmark:
    """A benchmark's rows and the scorer that judges their completions."""

    rows: Rows
    scorer: Scorer


def load(name: str, config: Benchmark, limit: int | None = None) -> Rows:
    """Returns the rows of a benchmark, checked against its prompts and its reward.

    Args:
        name: the benchmark's name, as in recipes and messages.
        limit: largest number of rows.

    Raises:
        UserError: data that cannot be loaded, a prompt or a reward that needs a missing column, a
            prompt that names no column, a row without a gold answer.
    """
    key, source = f"benchmark.{name}", config.data
    table = tables.load_table(source, config.subset, config.split, f"{key}.data")
    table = rename_columns(table, name, config, source)
    table = tables.first_rows(table, limit, source, f"{key}.data")
    templates = {f"{key}.modes.{mode}.prompt": t for mode, t in config.prompts.items()}
    needed = breakdown_columns(name, config)
    needed |= dict.fromkeys(needed_columns(name, config), f"{key}.reward")
    source_key = f"{key}.data = {source}"
    tables.check_templates(templates, table, source_key, f"{key}.columns", needed)
    for template_key, template in templates.items():
        if not tables.columns_named(template):
            raise UserError(
                f"{template_key} = {template!r}: names no column of the data; write one in braces, "
                f"as {{question}}; {source} has {listed(table.column_names)}."
            )
    gold = gold_columns(name, config)
    named = [column for text in templates.values() for column in tables.columns_named(text)]
    for column in dict.fromkeys([*gold, *named]):
        for number, cell in enumerate(table[column][:]):
            if cell is None or (column in gold and is_missing(cell)):
                empty = "null" if cell is None else "empty"
                raise UserError(f"{source_key}, row {number}: the column {column!r} is {empty}.")
    return Rows(source, table.column_names, table)


def rename_columns(table: Any, name: str, config: Benchmark, source: str) -> Any:
    """Returns a table with its columns renamed by `benchmark.NAME.columns`.

    A shipped benchmark renames the hub's columns. A file that replaces the hub data may use the new
    names already. Then an old name may be missing, and a column with the new name stays. A column
    that the user renames replaces it.

    Raises:
        UserError: a column would get two names.
    """
    there, shipped = table.column_names, shipped_entry(name).get("columns", {})
    names = {
        new: old
        for new, old in config.columns.items()
        if old in there and (new not in there or shipped.get(new) != old)
    }
    return tables.rename_columns(table, names, source, f"benchmark.{name}.columns")


def breakdown_columns(name: str, config: Benchmark) -> dict[str, str]:
    """Returns the columns by which the user breaks the accuracy down, each with its key.

    A file that replaces a shipped benchmark's data may lack the columns of the shipped breakdown.
    """
    shipped = shipped_entry(name).get("breakdown", ())
    own = [column for column in config.breakdown if column not in shipped]
    return dict.fromkeys(own, f"benchmark.{name}.breakdown")


def shipped_entry(name: str) -> dict[str, Any]:
    """Returns a shipped benchmark's YAML entry; {} if no shipped benchmark has that name."""
    file = resources.files("grpo_cli.recipes").joinpath("benchmark", f"{name}.yaml")
    if not file.is_file():
        return {}
    return dict(read_yaml(str(file))[name])


def gold_columns(name: str, config: Benchmark) -> list[str]:
    """Returns the columns with gold answers: those that the reward requires, except images.

    Raises:
        UserError: an unknown reward.
    """
    return [column for column in needed_columns(name, config) if column not in images.COLUMNS]


def needed_columns(name: str, config: Benchmark) -> list[str]:
    """Returns the columns that the benchmark's reward requires.

    Raises:
        UserError: an unknown reward.
    """
    function = registry.resolve(config.reward, f"benchmark.{name}.reward")
    required = Signature.of(function).required
    return [column for column in required if column not in config.args]


def is_missing(cell: Any) -> bool:
    """Returns whether a gold answer is missing: null, blank, or an empty list of tests."""
    return cell is None or (isinstance(cell, (str, list)) and not len(cell)) or str(cell).isspace()


def problem_text(
    config: Benchmark, mode: str, row: Mapping[str, Any], mark: Mark = unchanged
) -> str | list[dict[str, str]]:
    """Returns the prompt of a row: worked examples, if any, and then its problem.

    With `config.chat` it is a list of messages in which each example is a turn. Otherwise it is a
    string in which blank lines separate the examples.

    Args:
        mark: applied to the values that come from the row.
    """
    template = config.prompts[mode]
    shown = examples_of(config, mode)
    if not config.chat:
        texts = [f"{template.format_map(one)}\n{one[mode]}" for one in shown]
        return "\n\n".join([*texts, fill(template, row, mark)])
    messages = [] if config.system is None else [{"role": "system", "content": config.system}]
    for one in shown:
        messages.append({"role": "user", "content": template.format_map(one)})
        messages.append({"role": "assistant", "content": one[mode]})
    return [*messages, {"role": "user", "content": fill(template, row, mark)}]


def asking(config: Benchmark) -> tuple[str, ...]:
    """Returns the stop strings that also follow the problem in a prompt template.

    A base model that writes one has just made up another problem.
    """
    templates = [t.replace("{{", "{").replace("}}", "}") for t in config.prompts.values()]
    return tuple(s for s in config.stop if any(s in t[t.find("}") :] for t in templates))


def examples_of(config: Benchmark, mode: str) -> list[dict[str, Any]]:
    """Returns the worked examples at the beginning of a prompt of this mode."""
    return [one for one in config.examples if one.get(mode) is not None][: config.shots]


def check_examples(name: str, config: Benchmark, mode: str) -> None:
    """Raises a UserError if fewer than `shots` examples have a solution in a mode."""
    shown = examples_of(config, mode)
    if len(shown) < config.shots:
        raise UserError(
            f"benchmark.{name}.shots = {config.shots}: {len(shown)} of benchmark.{name}.examples "
            f"have {mode}, their solution in that mode."
        )


def make_prompts(
    name: str,
    config: Benchmark,
    mode: str,
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any] | None = None,
    vision: VisionProcessor | None = None,
    max_pixels: int | None = None,
) -> list[Prompt]:
    """Returns the prompts of all rows in a mode; long prompts are not dropped.

    Args:
        template_kwargs: arguments of the chat template.
        vision: the model's processor; None for a text-only model.
        max_pixels: largest number of pixels of an image; larger images are resized.

    Raises:
        UserError: a row that does not fit the prompt, too few examples, a chat whose tokenizer has
            no template, a system prompt without a chat.
    """
    check_examples(name, config, mode)
    chat = bool(tokenizer.chat_template) if config.chat is None else config.chat
    if config.system is not None and not chat:
        why = "the tokenizer has no chat template" if config.chat is None else "chat is false"
        raise UserError(
            f"benchmark.{name}.system: is only read where the prompt is a chat, and {why}."
        )
    config = dataclasses.replace(config, chat=chat)

    def text_of(number: int, mark: Mark) -> Any:
        try:
            return problem_text(config, mode, rows.rows[number], mark)
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            raise UserError(
                f"benchmark.{name}.modes.{mode}.prompt: row {number} of {rows.source} does not fit "
                f"the template: {type(error).__name__}: {error}"
            ) from error

    return encode(
        rows,
        text_of,
        tokenizer,
        chat,
        f"benchmark.{name}.chat",
        template_kwargs or {},
        vision=vision,
        max_pixels=max_pixels,
        on_bad_image=refuse_bad_image,
    )


def refuse_bad_image(message: str) -> None:
    """Raises a UserError for a row whose image cannot be read; benchmarks never drop a row."""
    raise UserError(f"{message}. A benchmark is evaluated on all its rows; repair the image.")


def rewards(config: Benchmark) -> dict[str, Reward]:
    """Returns the benchmark's only reward, under its name: `math` also for my_package.my:math."""
    name = config.reward.rpartition(":")[2]
    return {name: Reward(function=config.reward, args=dict(config.args))}
