"""Declares the knobs of data sets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from grpo_cli.config.knob import above_0, at_least_1, knob, text
from grpo_cli.errors import listed

NOT_STREAMED = "needs all rows at the start; set dataset.streaming=false."
PROMPT_COLUMNS = ("prompt", "messages", "question", "problem")  # of prompts, in this order


@dataclass
class NamedRows:
    """One of several data sets; what it does not set is as in `dataset`."""

    data: str = knob("", "Rows: a hub name, or local data as for dataset.train.", trusted="data")
    subset: str | None = text(None, "Configuration of the hub data set or the folder.")
    split: str = text("train", "Split of a hub data set or a folder.")
    columns: dict[str, str] | None = text(
        None,
        "Columns to rename before they are used, as new_name: old_name; null: dataset.columns.",
    )
    prompt: str | None = text(
        None, "Column or template of the prompt; null: as dataset.prompt says."
    )
    system: str | None = text(None, "System prompt, for chats; null: dataset.system.")
    limit: int | None = at_least_1(None, "Use only the first N rows.")

    def problems(self, key: str) -> Iterator[str]:
        """Yields a message if the rows are missing.

        Args:
            key: the full key of this entry.
        """
        if not self.data:
            yield f"{key}.data: is missing; give a hub name or a file."


@dataclass
class MixturePart(NamedRows):
    """One of the data sets that a run trains on together."""

    weight: float = above_0(1.0, "Probability of the data set at each prompt, relative.")
    solution: str | None = text(
        None, "Template of a worked solution, for the warm-up; null: dataset.solution."
    )


@dataclass
class HeldOut(NamedRows):
    """One of several sets of held-out rows."""

    split: str = text("test", "Split of a hub data set or a folder.")
    rewards: list[str] = text(
        [],
        "Names of the recipe's rewards that judge the completions; empty: the rewards of the data "
        "set with the same name in dataset.mixture, or else all rewards.",
    )
    accuracy: str | None = text(
        None,
        "Reward whose value 1 counts as correct; null: eval.accuracy if it judges them, else the "
        "first.",
    )


@dataclass
class Dataset:
    """Rows, and how a row becomes a prompt."""

    train: str | None = knob(
        None,
        "Training rows: a hub name, a .json/.jsonl/.jsonl.gz/.csv/.parquet file, a pattern such as "
        "data/*.parquet, a folder of such files or of save_to_disk, or pkg://package/file.",
        trusted="data",
    )
    eval: str | None = knob(
        None,
        "Held-out rows: a hub name, or local data as for dataset.train; null: no evaluation on "
        "rows.",
        of_train=True,
        trusted="data",
    )
    subset: str | None = text(
        None, "Configuration of the hub data set (GSM8K has `main`).", of_train=True
    )
    train_split: str = text(
        "train", "Split of a hub data set or a folder to train on.", of_train=True
    )
    eval_split: str = text(
        "test", "Split of a hub data set or a folder to evaluate on.", of_train=True
    )
    columns: dict[str, str] = text(
        {}, "Columns to rename before they are used, as new_name: old_name.", of_train=True
    )
    prompt: str | None = text(
        None,
        "Column of the prompt, or a template over the row's columns such as '{question} Answer "
        "briefly.', in which a literal brace is written twice; null: the first of the columns "
        "prompt, messages, question and problem.",
        of_train=True,
    )
    system: str | None = text(
        None,
        "System prompt, for prompts that are chats.",
        read_if=("dataset.chat", "auto", True),
        of_train=True,
    )
    chat: Any = knob(
        "auto",
        "Wrap the prompt in the tokenizer's chat template; completions become messages. auto: if "
        "the model is loaded and its tokenizer has a template, or if there are tools.",
        choices=("auto", True, False),
    )
    final_assistant: str = knob(
        "refuse",
        "Treatment of a conversation that ends with a message of the assistant: refuse the row, "
        "drop the message (the answer in supervised data), or continue it as a prefill.",
        choices=("refuse", "drop", "continue"),
        read_if=("dataset.chat", "auto", True),
    )
    solution: str | None = text(
        None,
        "Template of a worked solution, used only for the warm-up of a built model. If it names a "
        "column that holds messages, they are an episode whose assistant's turns are trained.",
        training=True,
    )
    max_prompt_tokens: int = at_least_1(
        512, "Length limit of a training prompt, in tokens; longer ones are dropped.", training=True
    )
    max_pixels: int | None = at_least_1(
        1_048_576,
        "Pixels of an image at most; a larger image is resized, its sides in the same ratio. null: "
        "no image is resized. The tokens of an image grow with its pixels in most models.",
        rows="any",
    )
    bad_rows: str = knob(
        "stop",
        "Treatment of a row with an image that cannot be read, or that a reward refuses, such as "
        "tests of `code` that test nothing: stop with an error, or drop the row.",
        choices=("stop", "drop"),
        rows="any",
    )
    shuffle: bool = knob(
        True, "Shuffle the rows in each epoch, as a function of (seed, epoch) only.", training=True
    )
    streaming: bool = knob(
        False,
        "Read the training rows while training, instead of all at the start; for data that does "
        "not fit into memory.",
        training=True,
    )
    train_limit: int | None = at_least_1(None, "Use only the first N training rows.")
    eval_limit: int | None = at_least_1(None, "Use only the first N held-out rows.")
    mixture: dict[str, Any] = knob(
        {},
        "Several data sets to train on together, by name, in place of dataset.train; each has "
        "data, weight, split, prompt and so on.",
    )
    held_out: dict[str, Any] = knob(
        {},
        "Several sets of held-out rows by name, in place of dataset.eval; each has data, split, "
        "prompt, rewards and so on.",
    )
    test_split_size: float | None = above_0(
        None,
        "Rows taken off the training rows and held out for evaluation, for data without held-out "
        "rows: a fraction below 1 or a number of rows; null: none.",
    )

    def problems(self) -> Iterator[str]:
        """Yields messages about values that contradict one another."""
        size, sets = self.test_split_size, self.held_out
        for key in ("train", "train_limit", "test_split_size") if self.mixture else ():
            if getattr(self, key) is not None:
                yield (
                    f"dataset.{key}: is not read with dataset.mixture, whose data sets have their "
                    f"own; set dataset.{key}=null."
                )
        if sets and (self.eval is not None or size is not None):
            other = "dataset.eval" if self.eval is not None else "dataset.test_split_size"
            yield (
                f"dataset.held_out = {listed(sets)}: the recipe has held-out rows already; set "
                f"{other}=null."
            )
        if size is not None and size > 1 and size % 1:
            yield (
                f"dataset.test_split_size = {size:g}: must be a fraction below 1 or a whole number "
                "of rows."
            )
        if size is not None and self.eval is not None:
            yield (
                f"dataset.test_split_size = {size:g}: the recipe has held-out rows already; set "
                "dataset.eval=null, or dataset.test_split_size=null."
            )
        if self.streaming and self.mixture:
            yield f"dataset.mixture: {NOT_STREAMED}"
        if self.streaming and size is not None:
            yield f"dataset.test_split_size: {NOT_STREAMED}"
