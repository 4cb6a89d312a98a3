"""Reward: the completion matches a regular expression."""

import functools
import re
from typing import Any

from grpo_cli.rewards import reward
from grpo_cli.rewards._arguments import boolean, one_of
from grpo_cli.rewards._text import Completions, completion_texts

MODES = ("search", "fullmatch")


@reward(timeout=2, timeout_value=0.0)
def regex(
    completions: Completions,
    answer: list[Any] | None = None,
    *,
    pattern: str,
    mode: str = "search",
    compare: bool = False,
    **_: Any,
) -> list[float | None]:
    r"""Returns 1.0 where the completion matches the recipe's regular expression, else 0.0.

    Recipe args:
        pattern: in the syntax of Python's `re`. In YAML write it in single quotes, which leave
            backslashes as they are: '\d+ apples'. Flags stand in it: '(?i)yes' takes upper and
            lower case as equal.
        mode: "search" looks for the first match anywhere; "fullmatch" asks for the whole text.
        compare: also require that the text of the pattern's first group equals the column `answer`,
            white space at both ends aside. A row whose answer is missing (None) gives None.

    The whole completion is read, thoughts included: `</think>` in the pattern keeps it behind them.
    A completion on which the pattern backtracks for longer than the reward's timeout gets 0.0 and
    counts as timed out.
    """
    one_of("regex: mode", mode, MODES)
    if not isinstance(pattern, str):
        raise ValueError(f"regex: pattern is {pattern!r}; it must be a text, in quotes.")
    boolean("regex: compare", compare)
    compiled = _compiled(pattern)
    match = compiled.search if mode == "search" else compiled.fullmatch
    texts = completion_texts(completions, "<think>")
    if not compare:
        return [float(match(text) is not None) for text in texts]
    if compiled.groups == 0:
        raise ValueError(f"regex: pattern is {pattern!r}; with compare it must have a group.")
    if answer is None:
        raise ValueError("regex: compare is true, and there is no column answer to compare with.")
    firsts = [found[1] if (found := match(text)) else None for text in texts]
    return [
        None if gold is None else float(first is not None and first.strip() == str(gold).strip())
        for first, gold in zip(firsts, answer, strict=True)
    ]


@functools.lru_cache
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"regex: pattern is {pattern!r:.500}; it must be a regular expression of Python's re: "
            f"{error}."
        ) from error
