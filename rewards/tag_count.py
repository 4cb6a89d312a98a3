"""Reward: each wanted tag occurs once in the completion."""

from collections.abc import Sequence
from typing import Any

from grpo_cli.rewards import reward
from grpo_cli.rewards._text import Completions, completion_texts

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@reward
def tag_count(
    completions: Completions, *, tags: Sequence[str] = TAGS, **_: Any
) -> list[float | None]:
    r"""Returns the share of the wanted tags that occur exactly once, from 0.0 to 1.0.

    A gentler slope than `think_format`: order and nesting count for nothing, and a tag that occurs
    twice is as bad as one that is missing.

    Recipe args:
        tags: the texts to count, as they are written. One may hold line breaks, such as
            "<think>\n".
    """
    tags = _checked(tags)
    return [
        sum(text.count(tag) == 1 for tag in tags) / len(tags)
        for text in completion_texts(completions, "<think>")
    ]


def _checked(tags: Any) -> Sequence[str]:
    is_list = isinstance(tags, Sequence) and not isinstance(tags, str)
    texts = [tag for tag in tags if isinstance(tag, str) and tag] if is_list else []
    if not texts or len(set(texts)) != len(tags):
        raise ValueError(
            f"tag_count: tags is {tags!r}; it must be a list of texts, none empty, none twice."
        )
    return texts
