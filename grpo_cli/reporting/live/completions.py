"""Reads the completions that a live view shows, with pyarrow only."""

from __future__ import annotations

import math
from pathlib import Path

from grpo_cli.data.stored_completions import IMAGES, Sample, sample_of

# Columns of tokens take most of a file; only episodes show a number of tokens.
TOKENS = ("prompt_ids", "sampling_logprobs", IMAGES)
TOKENS_OF_EPISODES = ("completion_ids", "token_advantages", "sampled")


def best_and_worst(path: Path) -> list[Sample]:
    """Returns the completions of a step with the highest and the lowest reward.

    Returns one completion if all rewards are equal, or if no completion has a reward.

    Raises:
        OSError, ValueError, UserError: the file is gone, or holds no completions; pyarrow's
            errors are of the first two types.
    """
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        names = set(file.schema_arrow.names)
        skipped = {*TOKENS, *(() if "turns" in names else TOKENS_OF_EPISODES)}
        table = file.read(columns=sorted(names - skipped))
    rewards = [-math.inf if r is None else r for r in table["reward"].to_pylist()]
    known = [i for i, reward in enumerate(rewards) if math.isfinite(reward)] or [0]
    best, worst = max(known, key=rewards.__getitem__), min(known, key=rewards.__getitem__)
    cells = {i: table.slice(i, 1).to_pylist()[0] for i in (best, worst)}
    return [sample_of(one, i, f"{path}, row {i}") for i, one in cells.items()]
