"""Reward: the thoughts stand between tags, and an answer follows them."""

import re
from typing import Any

from grpo_cli.rewards import reward
from grpo_cli.rewards._arguments import boolean
from grpo_cli.rewards._text import Completions, completion_texts

OPENING, CLOSING = "<think>", "</think>"
FILLERS = "\u115f\u1160\u2800\u3164\uffa0"  # letters of Unicode that are blank


@reward
def think_format(
    completions: Completions, *, opening: bool = True, answer_tag: str | None = None, **_: Any
) -> list[float | None]:
    """Returns 1.0 where the completion is `<think>...</think>` and then an answer, else 0.0.

    Each tag stands there once, so that thoughts are not nested; nothing stands before the first;
    neither the thoughts nor the answer are blank. White space at both ends counts for nothing.

    Recipe args:
        opening: whether the completion begins with `<think>`; false where the chat template ends
            the prompt with it, as DeepSeek-R1's does. Such a completion must not repeat it.
        answer_tag: a name such as "answer": what follows the thoughts must be exactly
            `<answer>...</answer>`, and neither tag may stand anywhere else.
    """
    boolean("think_format: opening", opening)
    is_name = isinstance(answer_tag, str) and re.fullmatch(r"[A-Za-z][\w-]*", answer_tag)
    if answer_tag is not None and (not is_name or answer_tag == "think"):
        raise ValueError(
            f"think_format: answer_tag is {answer_tag!r}; it must be a tag's name, such as "
            '"answer", other than "think".'
        )
    return [
        float(_is_in_format(text.strip(), opening, answer_tag))
        for text in completion_texts(completions, OPENING if opening else "")
    ]


def _is_in_format(text: str, opening: bool, answer_tag: str | None) -> bool:
    if opening:
        if not text.startswith(OPENING):
            return False
        text = text.removeprefix(OPENING)
    if OPENING in text or text.count(CLOSING) != 1:
        return False
    thoughts, _, answer = text.partition(CLOSING)
    if answer_tag is not None:
        start, end = f"<{answer_tag}>", f"</{answer_tag}>"
        if text.count(start) != 1 or text.count(end) != 1:
            return False
        answer = answer.strip()
        if not (answer.startswith(start) and answer.endswith(end)):
            return False
        answer = answer[len(start) : -len(end)]
    return _is_seen(thoughts) and _is_seen(answer)


def _is_seen(text: str) -> bool:
    """Returns whether a text has a character that shows: no space, mark or filler."""
    return any(c.isprintable() and not c.isspace() and c not in FILLERS for c in text)
