"""Reward: a penalty for repetition."""

from collections.abc import Hashable, Sequence
from typing import Any

from grpo_cli.rewards import reward
from grpo_cli.rewards._arguments import number, one_of, whole
from grpo_cli.rewards._text import Completions, completion_texts

UNITS = ("words", "characters", "tokens")


@reward
def repetition(
    completions: Completions,
    completion_ids: list[list[int]] | None = None,
    *,
    ngram: int = 3,
    max_penalty: float = -1.0,
    unit: str = "words",
    **_: Any,
) -> list[float | None]:
    """Returns `max_penalty` times the share of repeated n-grams in the completion: 0.0 is best.

    With N n-grams in the completion, U of them different, the value is max_penalty * (1 - U / N),
    as in "Demystifying Long Chain-of-Thought Reasoning" (arXiv 2502.03373) and open-r1. A
    completion of fewer than `ngram` units has none, and gives 0.0.

    Recipe args:
        ngram: units in a row that make one n-gram. In units of characters or tokens 3 finds what
            every text repeats; 20 is nearer to a sentence said twice.
        max_penalty: the value of nothing but repetition, in the limit: a number, 0 or less.
        unit: "words" are separated by white space, and upper and lower case are equal in them;
            "characters", likewise equal and white space aside, suit languages that write no spaces;
            "tokens" are the token ids as sampled.
    """
    one_of("repetition: unit", unit, UNITS)
    whole("repetition: ngram", ngram)
    if number("repetition: max_penalty", max_penalty) > 0:
        raise ValueError(
            f"repetition: max_penalty is {max_penalty!r}; it must be a number, 0 or less."
        )
    if unit == "tokens" and completion_ids is None:
        raise ValueError('repetition: unit "tokens" needs completion_ids, and none were passed.')
    rows: Any = completion_ids if unit == "tokens" else completion_texts(completions, "<think>")
    # 0.0 + x turns a negative zero into a plain one.
    return [0.0 + max_penalty * _repeated_share(_units(row, unit), ngram) for row in rows]


def _units(row: Any, unit: str) -> Sequence[Hashable]:
    if unit == "tokens":
        return list(row)
    words = row.lower().split()
    return words if unit == "words" else "".join(words)


def _repeated_share(units: Sequence[Hashable], ngram: int) -> float:
    if len(units) < ngram:
        return 0.0
    ngrams = list(zip(*(units[start:] for start in range(ngram)), strict=False))
    return 1 - len(set(ngrams)) / len(ngrams)
