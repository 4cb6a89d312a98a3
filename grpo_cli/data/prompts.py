"""Turns rows into prompts, and orders prompts reproducibly.

Nothing here imports torch or transformers: a mistake in the data is reported before they load.
"""

from __future__ import annotations

import dataclasses
import random
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from grpo_cli.data import conversations, images
from grpo_cli.data.control_tokens import MARK, ControlTokens, unmark
from grpo_cli.data.images import ImageRow
from grpo_cli.data.rows import DATASET, Rows, only_field, prompt_template
from grpo_cli.data.settings import Dataset
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.images import ImageError
from grpo_cli.images import require as require_pillow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_cli.models.vision import VisionProcessor
    from grpo_cli.records import Prompt

MOST_BROKEN = 1000  # consecutive prompts with unreadable images after which a run fails

OnBadImage = Callable[[str], None]
ToolsOf = Callable[[Mapping[str, Any]], conversations.Schemas]
Mark = Callable[[Any], Any]


def unchanged(value: Any) -> Any:
    """Returns the value unchanged."""
    return value


def make_prompts(
    rows: Rows,
    config: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    held_out: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    may_be_empty: bool = False,
    tools: ToolsOf | None = None,
    vision: VisionProcessor | None = None,
    on_bad_image: OnBadImage | None = None,
) -> tuple[list[Prompt], int]:
    """Returns the prompts of all rows and the number of rows dropped as too long.

    Args:
        template_kwargs: arguments of the chat template.
        held_out: the rows are for evaluation and none is dropped. Accuracy over only the short rows
            would not be the accuracy over the data.
        may_be_empty: whether all rows may be too long.
        tools: returns the JSON schemas of the tools that the model may call in a row; None: there
            are no tools.
        vision: the model's processor; None for a text-only model.
        on_bad_image: called for each row dropped because an image cannot be read; None: a bad image
            is an error.

    Raises:
        UserError: a row that gives no prompt, a chat data set with a tokenizer that has no
            template, or no row short enough.
    """
    every = encode(
        rows,
        lambda n, mark: prompt_text(rows.rows[n], config, rows.line(n), mark),
        tokenizer,
        config.chat is True,
        "dataset.chat",
        template_kwargs or {},
        tools,
        vision=vision,
        max_pixels=config.max_pixels,
        on_bad_image=on_bad_image,
    )
    if rows.rows and not every and not may_be_empty:
        raise UserError(f"{rows.source}: no row is left, since no row's images can be read.")
    if held_out:
        return every, 0
    most = config.max_prompt_tokens
    prompts = [p for p in every if len(p.ids) <= most]
    if not prompts and not may_be_empty:
        raise UserError(
            f"dataset.max_prompt_tokens = {most}: every prompt of {rows.source} is longer (the "
            f"shortest has {min(len(p.ids) for p in every)} tokens)."
        )
    return prompts, len(every) - len(prompts)


def encode(
    rows: Rows,
    text_of: Callable[[int, Mark], Any],
    tokenizer: PreTrainedTokenizerBase,
    chat: bool,
    key: str,
    template_kwargs: Mapping[str, Any],
    tools: ToolsOf | None = None,
    *,
    vision: VisionProcessor | None = None,
    max_pixels: int | None = None,
    on_bad_image: OnBadImage | None = None,
) -> list[Prompt]:
    """Encodes rows as prompts: the one way from a row to token ids.

    Args:
        text_of: returns the text of the row with a number, a string or (with `chat`) a list of
            messages. It applies its second argument to the text that comes from the row.
        key: the key of `chat`, for error messages.
        tools, vision, on_bad_image: see `make_prompts`.
        template_kwargs: arguments of the chat template; a row's own arguments override them.
        max_pixels: larger images are resized to it; None: never.

    Raises:
        UserError: a chat with a tokenizer that has no template, an empty prompt, or an image that
            cannot be read.
    """
    from grpo_cli.records import Prompt

    # Control tokens that a row must not write; it may write placeholders of images.
    kept: set[str] = set()
    if vision is not None:
        names = map(str, tokenizer.convert_ids_to_tokens(vision.token_ids))
        kept = {*names, vision.placeholder, conversations.IMAGE}
    control = ControlTokens(tokenizer, kept)
    texts = [text_of(number, control.mark) for number in range(len(rows.rows))]
    found = images_of(rows, texts, max_pixels, reads_images=vision is not None)
    texts = written = [row.prompt for row in found]
    if chat:
        if not tokenizer.chat_template:
            raise UserError(
                f"{key} = true: the tokenizer has no chat template; set model.chat_template or "
                f"{key}=false."
            )

        def render(number: int, messages: conversations.Conversation) -> str:
            row = rows.rows[number]
            return conversations.render(
                tokenizer,
                messages if vision is None else vision.as_template_takes(messages),
                conversations.template_kwargs(template_kwargs, row, control.mark),
                f"{rows.source}, row {rows.line(number)}",
                tools(row) if tools else (),
            )

        texts = [control.unmark_for_template(t, partial(render, n)) for n, t in enumerate(texts)]
        written = [*map(render, range(len(texts)), texts)]
    # A chat template writes its own special tokens; the tokenizer adds them to a plain prompt.
    plain = [t for t, own in zip(written, found, strict=True) if not own.images and MARK not in t]
    encoded = iter(tokenizer(plain, add_special_tokens=not chat)["input_ids"] if plain else [])
    prompts = []
    for number, (row, text, own) in enumerate(zip(rows.rows, texts, found, strict=True)):
        place = f"{rows.source}, row {rows.line(number)}"
        if own.images:
            assert vision is not None
            try:
                ids = control.encode(vision.expanded(written[number], own.images))
            except ImageError as error:
                if on_bad_image is None:
                    raise UserError(f"{error} (dataset.bad_rows=drop drops the row).") from error
                on_bad_image(str(error))
                continue
            except ValueError as error:
                raise UserError(
                    f"{place}: the chat template does not print every image: {error}."
                ) from error
        elif MARK in written[number]:
            ids = control.encode(written[number], add_special_tokens=not chat)
        else:
            ids = list(next(encoded))
        if not ids:
            raise UserError(f"{place}: the prompt is empty.")
        if vision is not None and not own.images and not set(ids).isdisjoint(vision.token_ids):
            raise UserError(
                f"{place}: the prompt holds {vision.placeholder}, and the row has no image."
            )
        bare = unmark(text)
        prefill = conversations.prefill_of(bare) if chat else ""
        prompts.append(
            Prompt(
                row=rows.line(number),
                ids=ids,
                text=bare[:-1] if prefill else bare,
                columns=other_columns(row) | other_columns(own.columns),
                prefill=prefill,
                images=own.images,
                vision=vision if own.images else None,
                marked=None if bare == text else text,
            )
        )
    return prompts


def images_of(
    rows: Rows, texts: Sequence[Any], max_pixels: int | None, *, reads_images: bool
) -> list[ImageRow]:
    """Returns each row's prompt with its images; `texts` are the prompts as in the rows.

    Raises:
        UserError: rows with images and a text-only model; see also `images.of_row`.
    """
    found: list[ImageRow] = []
    for number, (row, text) in enumerate(zip(rows.rows, texts, strict=True)):
        if not reads_images and images.has_images(row, text):
            name = images.column_of(row)
            where = f"the column {name!r}" if name else "the messages"
            other = f", or rename the column (dataset.columns.unused={name})" if name else ""
            raise UserError(
                f"{rows.source}, row {rows.line(number)}: has images in {where}, and the model "
                f"reads text only; choose a vision-language model{other}."
            )
        found.append(images.of_row(rows, number, row, text, max_pixels))
    if any(row.images for row in found):
        require_pillow()
    return found


def other_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row's columns, without its prompt, for reward functions."""
    return {k: v for k, v in row.items() if k not in ("prompt", "completion")}


def fill(template: str, row: Mapping[str, Any], mark: Mark = unchanged) -> str:
    """Fills the fields of a template with a row's columns.

    Args:
        mark: applied to the text that comes from the row.

    Raises:
        ValueError: null, a list or an object, bytes that are not UTF-8, or what does not fit its
            format specifier.
    """
    text, of_row, formatter = "", "", string.Formatter()
    for literal, name, spec, conversion in formatter.parse(template):
        if literal:
            text, of_row = text + mark(of_row) + literal, ""
        if name is None:
            continue
        try:
            value, _ = formatter.get_field(name, (), row)
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"there is no {{{name}}}") from error
        if value is None:
            raise ValueError(f"the column {name!r} is null")
        if isinstance(value, list | dict) and conversion is None:
            raise ValueError(f"the column {name!r} holds {value!r:.80}, which is not text")
        if isinstance(value, bytes):
            try:
                value = value.decode()
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"the column {name!r} holds bytes that are not UTF-8 text ({value[:20]!r})"
                ) from error
        value = formatter.convert_field(value, conversion)  # type: ignore[arg-type]
        of_row += format(value, (spec or "").format_map(row))
    return str(text + mark(of_row))


def prompt_text(row: dict[str, Any], config: Dataset, number: int, mark: Mark = unchanged) -> Any:
    """Returns the prompt as a string, or as messages for a chat data set.

    Args:
        number: row number for error messages.
        mark: applied to the text that comes from the row, not to the recipe's.

    Raises:
        UserError: a row that gives no prompt.
    """
    template = prompt_template(config, row)
    name, is_chat = only_field(template), config.chat is True  # "auto" is resolved by now
    if name is not None and isinstance(row[name], list):
        if not is_chat:
            raise UserError(
                f"dataset.chat = false: row {number} holds a list of messages; set "
                "dataset.chat=true, with a model that has a chat template."
            )
        messages = mark(_conversation(row[name], config, number, name))
    elif is_chat and name is not None and (in_text := conversations.parsed(row[name])):
        messages = mark(_conversation(in_text, config, number, None))
    else:
        try:
            text = fill(template, row, mark)
        except (ValueError, TypeError, LookupError) as error:
            raise UserError(f"dataset.prompt: row {number}: {error}.") from error
        if not is_chat:
            if not text:
                raise UserError(f"dataset.prompt: the prompt of row {number} is empty.")
            return text
        messages = [{"role": "user", "content": text}]
    if config.system is not None:
        if messages[0]["role"] == "system":
            raise UserError(
                f"dataset.system: row {number} has a system message already; set "
                "dataset.system=null, or remove it from the data."
            )
        messages.insert(0, {"role": "system", "content": config.system})
    return messages


def prompt_texts(rows: Rows, config: Dataset) -> list[Any]:
    """Returns the `prompt_text` of each row.

    Raises:
        UserError: the mistakes of the first three wrong rows, and the number of all.
    """
    texts, wrong = [], []
    for number, row in enumerate(rows.rows):
        try:
            texts.append(prompt_text(row, config, rows.line(number)))
        except UserError as error:
            wrong.append(str(error))
    if len(wrong) > 1:
        wrong[3:] = [f"{len(wrong):,} of {len(rows.rows):,} rows of {rows.source} are not prompts."]
    if wrong:
        raise UserError("\n".join(wrong))
    return texts


def _conversation(
    cell: Any, config: Dataset, number: int, column: str | None
) -> conversations.Conversation:
    messages = conversations.normalized(cell, f"row {number}", column)
    if messages[-1]["role"] != "assistant" or config.final_assistant == "continue":
        return messages
    if config.final_assistant == "refuse":
        raise UserError(
            f"row {number} ends with a message of the assistant: set dataset.final_assistant=drop "
            "if it is the answer, or =continue if the model is to continue it."
        )
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise UserError(f"row {number} has messages of the assistant only.")
    return messages


class PromptStream:
    """The endless sequence of prompts of a run, epoch after epoch.

    The prompt at a position is a pure function of (seed, position). Resuming therefore needs no
    state, and any number of processes shares one order.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seed: int | str,
        shuffle: bool,
        is_sound: Callable[[Prompt], bool] | None = None,
    ) -> None:
        """Orders prompts.

        Args:
            is_sound: checks whether a prompt's images can be read; None: no check.
        """
        self.prompts = prompts
        self.has_images = any(prompt.images for prompt in prompts)
        self.is_sound = is_sound
        self.seed = seed
        self.shuffle = shuffle
        self._order: tuple[int, list[int]] = (-1, [])  # last requested epoch, its order

    def take(self, start: int, count: int) -> Iterator[tuple[int, Prompt]]:
        """Yields (position, prompt) for `count` positions, starting at `start`."""
        for position in range(start, start + count):
            epoch, offset = divmod(position, len(self.prompts))
            if self._order[0] != epoch:
                order = epoch_order(self.seed, epoch, len(self.prompts), self.shuffle)
                self._order = (epoch, order)
            yield position, self.prompts[self._order[1][offset]]

    def prompt_at(self, position: int) -> Prompt:
        """Returns the prompt at a position, or the next one whose images can be read.

        Raises:
            TrainingError: none of the next `MOST_BROKEN` prompts can be read.
        """
        for _, prompt in self.take(position, MOST_BROKEN):
            if self.is_sound is None or not prompt.images or self.is_sound(prompt):
                return prompt
        raise TrainingError(f"dataset.train: the images of {MOST_BROKEN} prompts cannot be read.")

    def epoch_at(self, position: int) -> float:
        """Returns the number of passes over the prompts before a position."""
        return position / len(self.prompts)

    def state(self) -> Any:
        """Returns the state that resuming needs in addition to the position."""
        return None

    def restore(self, state: Any) -> None:
        """Restores the result of `state`."""


class MixtureStream(PromptStream):
    """The endless sequence of prompts of several data sets, interleaved by their weights.

    The data set at a position is drawn in proportion to its weight. Each data set has its own
    epochs. Both are functions of (seed, position).

    Attributes:
        name_of: the name of the data set that a row belongs to.
    """

    def __init__(
        self,
        parts: Mapping[str, Sequence[Prompt]],
        weights: Mapping[str, float],
        seed: int,
        shuffle: bool,
        is_sound: Callable[[Prompt], bool] | None = None,
    ) -> None:
        prompts = [p for of_part in parts.values() for p in of_part]
        super().__init__(prompts, seed, shuffle, is_sound)
        self.parts = {
            name: PromptStream(prompts, f"{seed}/{name}", shuffle)
            for name, prompts in parts.items()
        }
        self.name_of = {p.row: name for name, of_part in parts.items() for p in of_part}
        self._weights = [weights[name] for name in parts]
        self._random = random.Random(f"mixture/{seed}")
        self._drawn: list[tuple[str, int]] = []  # (data set, index within it) of each position
        self._taken = dict.fromkeys(parts, 0)  # number of positions drawn from each data set

    def take(self, start: int, count: int) -> Iterator[tuple[int, Prompt]]:
        """Yields (position, prompt) for `count` positions, starting at `start`."""
        names = list(self.parts)
        while len(self._drawn) < start + count:
            (name,) = self._random.choices(names, self._weights)
            self._drawn.append((name, self._taken[name]))
            self._taken[name] += 1
        for position in range(start, start + count):
            name, place = self._drawn[position]
            yield position, self.parts[name].prompt_at(place)


def mixed(parts: Mapping[str, tuple[Rows, Sequence[Prompt]]]) -> dict[str, list[Prompt]]:
    """Returns the prompts of several data sets, all with the same columns.

    A column that a data set lacks is None in its rows. The column `dataset` holds the data set's
    name. Rows are numbered consecutively over all data sets.
    """
    every = other_columns(
        dict.fromkeys(name for rows, _ in parts.values() for name in rows.columns)
    )
    out: dict[str, list[Prompt]] = {}
    before = 0  # number of rows in the preceding data sets
    for name, (rows, prompts) in parts.items():
        out[name] = [
            dataclasses.replace(
                p, row=p.row + before, columns={**every, **p.columns, DATASET: name}
            )
            for p in prompts
        ]
        before += len(rows.rows)
    return out


def epoch_order(seed: int | str, epoch: int, size: int, shuffle: bool) -> list[int]:
    """Returns the order of `size` prompts in one epoch."""
    order = list(range(size))
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def solution_pairs(rows: Rows, config: Dataset) -> Iterator[tuple[Any, Any]]:
    """Yields (prompt text, worked solution) of each row, for the warm-up of a built model.

    A solution is a string, or an episode's messages if dataset.solution names such a column.

    Raises:
        UserError: messages that are not a conversation of a chat data set, or do not end with the
            assistant.
    """
    assert config.solution is not None, "checked when the recipe was parsed"
    column = only_field(config.solution)
    for number, row in enumerate(rows.rows):
        line = rows.line(number)
        if column is None or not isinstance(row.get(column), list):
            try:
                solution: Any = fill(config.solution, row)
            except (ValueError, TypeError, LookupError) as error:
                raise UserError(f"dataset.solution: row {line}: {error}.") from error
        else:
            where = f"{rows.source}, row {line}, {column}"
            solution = conversations.normalized(row[column], where)
            if config.chat is not True or solution[-1]["role"] != "assistant":
                raise UserError(
                    f"dataset.solution: {where}: messages are the rest of a conversation: they "
                    "need dataset.chat=true and must end with the assistant's."
                )
        yield prompt_text(row, config, line), solution
