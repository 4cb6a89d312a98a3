"""Converts the positions of step rewards to tokens."""

from __future__ import annotations

import bisect
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grpo_cli.records import decoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_cli.records import Rollout


def check_steps(steps: Sequence[Any], size: int, unit: str) -> list[tuple[int, Any]]:
    """Checks the steps that a function returned for a completion.

    Args:
        size: length of the completion in `unit` (characters or tokens).

    Raises:
        ValueError: an entry is not a pair, or its position lies outside the completion.

    Returns:
        (position, value) of each step.
    """
    out = []
    for step in steps:
        pair = isinstance(step, (list, tuple)) and len(step) == 2
        position, value = step if pair else (-1, None)
        is_integer = isinstance(position, numbers.Integral) and not isinstance(position, bool)
        if not is_integer or not 0 <= position < size:
            raise ValueError(
                f"the step {step!r}: must be (position of its last of {size} {unit}, counted from "
                "0; value)"
            )
        out.append((int(position), value))
    return out


def by_tokens(
    rollout: Rollout, steps: Sequence[tuple[int, float]], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[int, float]]:
    """Returns steps with the tokens that end them, in place of their characters.

    The function that gave the steps also received the prefill. A step that ends with the text ends
    with the completion: eos is part of the last step.
    """
    ids, before, last = rollout.completion.ids, len(rollout.prompt.prefill), len(rollout.text) - 1
    found = []
    for character, value in steps:
        at = max(0, character - before)
        end = len(ids) - 1 if at == last else token_of_character(ids, at, tokenizer)
        found.append((end, value))
    return found


def token_of_character(
    ids: Sequence[int], position: int, tokenizer: PreTrainedTokenizerBase
) -> int:
    """Returns the index of the token that completes a character of the decoded completion."""
    return bisect.bisect_right(
        range(len(ids) - 1),
        position,
        # A character with missing bytes decodes to U+FFFD.
        key=lambda t: len(decoded(tokenizer, ids[: t + 1]).rstrip("\ufffd")),
    )
