"""Streams rows while a run trains on them, for data that does not fit into memory.

Rows are read in blocks of `BLOCK_ROWS`, and each block is shuffled by (seed, epoch, its
first row). The list of blocks and their first rows allows exact resuming.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_cli.config.sources import local_path
from grpo_cli.data import files
from grpo_cli.data.prompts import PromptStream
from grpo_cli.data.rows import Rows, check_templates, load_hub, prompt_template, rename_columns
from grpo_cli.data.settings import Dataset
from grpo_cli.distributed import heartbeat
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.files import reason

if TYPE_CHECKING:
    from grpo_cli.records import Prompt

BLOCK_ROWS = 1000  # read and shuffled together, as by shuffle() of `datasets`
KEPT = 4  # blocks in memory: a step may need prompts of the previous block


@dataclass(frozen=True)
class RowStream:
    """The rows of `dataset.train` in order, readable from any row."""

    source: str
    columns: list[str]  # renamed columns, read from the first block
    first: Rows  # the first block, for checks
    config: Dataset

    def read(self, start: int) -> Iterator[dict[str, Any]]:
        """Yields the rows starting at `start`, all with the same columns."""
        names = self.config.columns
        limit = self.config.train_limit
        left = None if limit is None else max(limit - start, 0)
        for row in itertools.islice(_rows(self.config, start), left):
            yield {name: row.get(names.get(name, name)) for name in self.columns}


def open_stream(config: Dataset, needed: Mapping[str, str] | None = None) -> RowStream:
    """Opens `dataset.train` as a stream and checks its first rows against the templates.

    Raises:
        UserError: the data is missing, or its first rows do not fit the templates.
    """
    source = config.train
    if source is None:
        raise UserError("dataset.train: no data; give a file or a hub name.")
    size = min(BLOCK_ROWS, config.train_limit or BLOCK_ROWS)
    rows = list(itertools.islice(_rows(config, 0), size))
    if not rows:
        raise UserError(f"dataset.train = {source}: the data set is empty.")
    table = files.Table(rows, list(dict.fromkeys(name for row in rows for name in row)))
    table = rename_columns(table, config.columns, source, "dataset.columns")
    templates = {"dataset.prompt": prompt_template(config, table.column_names)}
    check_templates(templates, table, f"dataset.train = {source}", needed=needed)
    first = Rows(source, table.column_names, list(table))
    return RowStream(source, table.column_names, first, config)


def _rows(config: Dataset, start: int) -> Iterator[dict[str, Any]]:
    source, split, key = config.train, config.train_split, "dataset.train"
    assert source is not None, "checked when the stream was opened"
    try:
        path = local_path(source)
    except ModuleNotFoundError as error:
        raise UserError(f"{key} = {source}: there is no such package ({error}).") from error
    if path is None:
        row = start
        try:
            table = load_hub(source, config.subset, split, key, streaming=True)
            for values in files.undecoded(table).skip(start):
                yield values
                row += 1
        except UserError:
            raise
        except Exception as error:  # hub, network and format errors have no common base
            raise UserError(
                f"{key} = {source}: row {row} cannot be read from the hub: "
                f"{type(error).__name__}: {reason(error)}"
            ) from error
    elif files.is_saved_to_disk(path):
        table = files.undecoded(files.load_local(path, config.subset, split, key))
        yield from table.select(range(start, len(table)))
    else:
        found = files.find_files(path, config.subset, split, key)
        yield from files.stream_files(found, key, path, start)


class Block(NamedTuple):
    """A part of a stream that is shuffled on its own."""

    position: int  # position of its first prompt
    epoch: int
    row: int  # index of its first row
    rows: int


class StreamedPrompts(PromptStream):
    """The endless sequence of prompts of a stream, epoch after epoch."""

    def __init__(
        self,
        rows: RowStream,
        make_prompts: Callable[[Rows, bool], list[Prompt]],
        seed: int,
        shuffle: bool,
    ) -> None:
        """Reads the first block.

        Args:
            make_prompts: returns the prompts of rows without dropped ones; its second argument
                allows an empty result.

        Raises:
            UserError: no row of the first block is short enough.
        """
        super().__init__([], seed, shuffle)
        self.rows, self.make_prompts = rows, make_prompts
        self.blocks: list[Block] = []  # all blocks so far
        self._prompts: OrderedDict[int, list[Prompt]] = OrderedDict()  # by block number
        self._next = (0, 0)  # epoch and row of the next block
        self._open: tuple[tuple[int, int], Iterator[dict[str, Any]]] | None = None
        self._end = 0  # position after the last block
        self._append()
        self.prompts = list(self._prompts[0])  # only the first block

    def take(self, start: int, count: int) -> Iterator[tuple[int, Prompt]]:
        """Yields (position, prompt) for `count` positions, starting at `start`."""
        for position in range(start, start + count):
            while position >= self._end:
                self._append()
            number = bisect.bisect_right(self.blocks, position, key=lambda b: b.position) - 1
            yield position, self._block(number)[position - self.blocks[number].position]

    def epoch_at(self, position: int) -> float:
        """Returns the number of complete passes; the length of a pass is unknown."""
        number = bisect.bisect_right(self.blocks, position, key=lambda b: b.position) - 1
        return float(self.blocks[number].epoch)

    def state(self) -> list[list[int]]:
        """Returns the blocks so far."""
        return [list(block) for block in self.blocks]

    def restore(self, state: Any) -> None:
        """Continues after the blocks of a saved `state`."""
        if not state:
            return
        self.blocks = [Block(*values) for values in state]
        self._prompts.clear()
        last = self.blocks[-1]
        self._next = (last.epoch, last.row + last.rows)
        self._end = last.position + len(self._block(len(self.blocks) - 1))

    def _append(self) -> None:
        """Appends the next block with a prompt; starts a new epoch after the last row."""
        began_again = False
        while True:
            epoch, row = self._next
            rows = self._read(epoch, row, BLOCK_ROWS)
            if not rows:
                if began_again:
                    raise TrainingError(
                        f"dataset.train = {self.rows.source}: no row of it can be trained on any "
                        "more."
                    )
                self._next, began_again = (epoch + 1, 0), True
                continue
            block = Block(self._end, epoch, row, len(rows))
            prompts = self._made(block, rows)
            self._next = (epoch, row + len(rows))
            if prompts:
                break
        self.blocks.append(block)
        self._end += len(prompts)
        self._keep(len(self.blocks) - 1, prompts)

    def _block(self, number: int) -> list[Prompt]:
        """Returns the prompts of a block; reads it again if it is no longer in memory."""
        if number not in self._prompts:
            block = self.blocks[number]
            prompts = self._made(block, self._read(block.epoch, block.row, block.rows))
            self._keep(number, prompts)
        return self._prompts[number]

    def _keep(self, number: int, prompts: list[Prompt]) -> None:
        self._prompts[number] = prompts
        while len(self._prompts) > KEPT:
            self._prompts.popitem(last=False)

    def _read(self, epoch: int, row: int, count: int) -> list[dict[str, Any]]:
        """Reads rows of an epoch, continuing the open iterator if it is at that row."""
        opened, self._open = self._open, None  # an iterator that raised has no further rows
        if opened is not None and opened[0] == (epoch, row):
            left = opened[1]
        else:
            left = self.rows.read(row)
        try:
            with heartbeat.calling():  # retries against the hub may take minutes
                rows = list(itertools.islice(left, count))
        except UserError as error:  # a malformed later line, or a lost network
            if local_path(self.rows.source) is not None:
                raise TrainingError(str(error)) from error
            reason = str(error).rstrip(".")
            raise TrainingError(
                f"{reason}. Once the hub can be reached, resume=auto continues from the last "
                "checkpoint.",
                alone=True,
            ) from error
        self._open = ((epoch, row + len(rows)), left)
        return rows

    def _made(self, block: Block, rows: Sequence[dict[str, Any]]) -> list[Prompt]:
        lines = range(block.row, block.row + len(rows))
        found = Rows(self.rows.source, self.rows.columns, rows, lines)
        try:
            prompts = self.make_prompts(found, bool(self.blocks))
        except UserError as error:
            if not self.blocks:
                raise
            raise TrainingError(str(error)) from error  # raised during training
        if self.shuffle:
            random.Random(f"{self.seed}/{block.epoch}/{block.row}").shuffle(prompts)
        return prompts
