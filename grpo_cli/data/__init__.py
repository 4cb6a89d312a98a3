"""Datasets: their rows, the prompts made from them, and the order in which prompts are taken.

Start with `rows.load_rows` (from local data, read by `files`, or from the hub), then
`prompts.make_prompts` and `prompts.PromptStream`. `streaming` reads rows while a run trains, and
`stored_completions` reads files of completions. Imports only the configuration and the records.
"""

from grpo_cli.data.prompts import (
    MixtureStream,
    OnBadImage,
    PromptStream,
    images_of,
    make_prompts,
    mixed,
    other_columns,
    prompt_text,
    prompt_texts,
    solution_pairs,
)
from grpo_cli.data.rows import DATASET, Rows, hold_out, load_named, load_rows, select_rows
from grpo_cli.data.streaming import RowStream, StreamedPrompts, open_stream

__all__ = [
    "DATASET",
    "MixtureStream",
    "OnBadImage",
    "PromptStream",
    "RowStream",
    "Rows",
    "StreamedPrompts",
    "hold_out",
    "images_of",
    "load_named",
    "load_rows",
    "make_prompts",
    "mixed",
    "open_stream",
    "other_columns",
    "prompt_text",
    "prompt_texts",
    "select_rows",
    "solution_pairs",
]
