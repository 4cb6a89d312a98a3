r"""Reward: the answer is written where a checker finds it, in `\boxed{...}` or after `####`."""

from typing import Any

from grpo_cli.rewards import reward
from grpo_cli.rewards._arguments import one_of
from grpo_cli.rewards._text import (
    Completions,
    boxed_answers,
    completion_texts,
    count_boxes,
    hashes_answer,
    without_thoughts,
)


@reward
def boxed_format(completions: Completions, *, style: str = "boxed", **_: Any) -> list[float | None]:
    r"""Returns 1.0 where the completion states one final answer in the asked style, else 0.0.

    Recipe args:
        style: "boxed" asks for exactly one `\boxed{...}`, closed and not empty, anywhere after the
            last `</think>`, if there is one (a `<think>` that never closes leaves nothing to read).
            "hashes" asks for GSM8K's ending: `#### 42` as the last line, and only one such.

    Whether the answer is right does not matter here: combine with `math`.
    """
    one_of("boxed_format: style", style, tuple(_CHECKS))
    check = _CHECKS[style]
    return [float(check(without_thoughts(text))) for text in completion_texts(completions)]


def _has_one_box(text: str) -> bool:
    # A second box counts even when it is left open, so `\boxed{3} ... \boxed{4` is not one answer.
    return count_boxes(text) == 1 and any(answer.strip() for answer in boxed_answers(text))


def _ends_in_hashes(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    return (
        bool(lines)
        and lines[-1].startswith("####")
        and hashes_answer(lines[-1]) is not None
        and sum(line.startswith("####") for line in lines) == 1
    )


_CHECKS = {"boxed": _has_one_box, "hashes": _ends_in_hashes}
