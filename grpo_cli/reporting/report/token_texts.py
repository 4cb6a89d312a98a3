"""Reads the texts of single tokens with a run's tokenizer. Torch is not loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_cli.checkpoints import paths
from grpo_cli.reporting.run_folder import RunFolder

FILE = "tokenizer.json"


def texts_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Returns the text of each token.

    A token that holds a part of a character is shown as the replacement character.
    """
    # A tokenizer may drop the space before the first token only: the second token of a pair has its
    # full text.
    known = [i for i in ids if i >= 0]
    once = tokenizer.decode_batch([[i] for i in known], skip_special_tokens=False)
    twice = tokenizer.decode_batch([[i, i] for i in known], skip_special_tokens=False)
    pairs = zip(known, once, twice, strict=True)
    texts = {i: b[len(a) :] if b.startswith(a) else a for i, a, b in pairs}
    return [texts.get(i, "\N{REPLACEMENT CHARACTER}") for i in ids]


def load(run: RunFolder) -> Any:
    """Returns the tokenizer of the newest checkpoint, else of the model; None if there is none."""
    from tokenizers import Tokenizer

    for path in candidates(run):
        if path.is_file():
            try:
                return Tokenizer.from_file(str(path))
            except Exception:  # the Rust library has no error type of its own
                continue
    return None


def candidates(run: RunFolder) -> list[Path]:
    """Returns the paths where the tokenizer may be, the newest first."""
    folders = [
        folder
        for step in reversed(paths.steps_saved(run.path))
        for checkpoint in [paths.checkpoint_path(run.path, step)]
        for folder in (checkpoint, checkpoint / paths.TRAINING / "model")
    ]
    model = (run.recipe.get("model") or {}).get("path")
    found = [folder / FILE for folder in folders]
    if not model:
        return found
    if paths.looks_local(str(model)):
        return [*found, Path(str(model)).expanduser() / FILE]
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(str(model), FILE)
    except ValueError:  # no name of a repository
        cached = None
    return [*found, Path(cached)] if isinstance(cached, str) else found
