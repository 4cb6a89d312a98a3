"""Pages through the completions of a step, from the highest reward or from the lowest.

Reads a file of completions with pyarrow only, and turns into a `Sample` the line that is shown.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from grpo_cli.data.stored_completions import IMAGES, Sample, sample_of
from grpo_cli.errors import UserError

Kind = Literal["good", "bad", "all"]
# Columns of tokens take most of a file; of an episode the numbers of tokens are shown.
TOKENS = ("prompt_ids", "sampling_logprobs", IMAGES)
TOKENS_OF_EPISODES = ("completion_ids", "token_advantages", "sampled")


class Pages:
    """The completions of one file."""

    def __init__(self, path: Path) -> None:
        """Reads the file.

        Raises:
            OSError, ValueError: it is gone, or no file of completions; pyarrow's errors are of
                these kinds.
        """
        import pyarrow.parquet

        self.path, self.stamp = path, stamp(path)
        with pyarrow.parquet.ParquetFile(path) as file:
            names = set(file.schema_arrow.names)
            if "completion" not in names:
                raise ValueError(f"{path}: has no column 'completion'")
            skipped = {*TOKENS, *(() if "turns" in names else TOKENS_OF_EPISODES)}
            self.table: Any = file.read(columns=sorted(names - skipped))
        rewards = self.table["reward"].to_pylist() if "reward" in names else [None] * len(self)
        self.rewards = [math.nan if reward is None else float(reward) for reward in rewards]
        self.orders: dict[str, list[int]] = {kind: self._order(kind) for kind in ("good", "bad")}
        self.orders["all"] = list(range(len(self)))

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def sample(self, number: int) -> Sample:
        """Returns the completion in a line of the file, counted from 0."""
        cells = self.table.slice(number, 1).to_pylist()[0]
        where = f"{self.path}, row {number}"
        try:
            return sample_of(cells, number, where)
        except UserError:  # a text that looks like a conversation and is none
            return sample_of({**cells, "prompt": f" {cells['prompt']}"}, number, where)

    def _order(self, kind: str) -> list[int]:
        """Returns lines above the mean reward from the highest on, or below from the lowest on.

        If all rewards are equal, both are all lines.
        """
        known = [i for i, reward in enumerate(self.rewards) if math.isfinite(reward)]
        if not known:
            return list(range(len(self)))
        low, high = min(self.rewards[i] for i in known), max(self.rewards[i] for i in known)
        mean = math.fsum(self.rewards[i] for i in known) / len(known)
        if low == high:
            return known
        if kind == "good":
            chosen = [i for i in known if self.rewards[i] > mean]
            return sorted(chosen, key=lambda i: -self.rewards[i])
        return sorted((i for i in known if self.rewards[i] < mean), key=self.rewards.__getitem__)


def stamp(path: Path) -> tuple[int, int, int]:
    """Returns what changes when a file is replaced.

    Raises:
        OSError: it is gone.
    """
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size
