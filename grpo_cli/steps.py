"""The rewards of a completion's steps: from positions as a function gives them to tokens."""

from __future__ import annotations

import bisect
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_steps(steps: Sequence[Any], size: int, unit: str) -> list[tuple[int, Any]]:
    """(position, value) of what a function that rewards steps has returned, positions checked.

    Args:
        size: characters or tokens of the completion, as `unit` says.

    Raises:
        ValueError: an entry that is no such pair, or whose position lies outside the completion.
    """
    out = []
    for step in steps:
        pair = isinstance(step, (list, tuple)) and len(step) == 2
        position, value = step if pair else (-1, None)
        whole = isinstance(position, numbers.Integral) and not isinstance(position, bool)
        if not whole or not 0 <= position < size:
            raise ValueError(
                f"the step {step!r}: must be (position of its last of {size} {unit}, counted from "
                "0; value)"
            )
        out.append((int(position), value))
    return out


def ending_token(
    position: int, size: int, unit: str, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> int:
    """The token at which a step ends whose position was counted in `unit`."""
    if unit == "tokens":
        return position
    # What ends with the text ends with the completion: its eos is a part of the last step.
    return len(ids) - 1 if position == size - 1 else token_of_character(ids, position, tokenizer)


def token_of_character(
    ids: Sequence[int], position: int, tokenizer: PreTrainedTokenizerBase
) -> int:
    """The token that writes the character at `position` of the decoded completion."""
    return bisect.bisect_right(
        range(len(ids) - 1),
        position,
        # A character of which some bytes are still to come decodes to a mark of its own.
        key=lambda t: len(
            tokenizer.decode(ids[: t + 1], skip_special_tokens=True).rstrip("\ufffd")
        ),
    )
