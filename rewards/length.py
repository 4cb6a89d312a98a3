"""Reward: the completion has about the wanted length."""

from typing import Any

from grpo_cli.rewards import reward
from grpo_cli.rewards._arguments import one_of, whole
from grpo_cli.rewards._text import Completions, completion_texts

UNITS = ("characters", "tokens")


@reward
def length(
    completions: Completions,
    completion_ids: list[list[int]] | None = None,
    *,
    target: int = 20,
    unit: str = "characters",
    **_: Any,
) -> list[float | None]:
    """Returns minus the distance of the completion's length from `target`: 0.0 is best.

    Recipe args:
        target: the length wanted, 0 or more.
        unit: "characters" counts the completion's text, "tokens" its token ids as sampled, the end
            token included.
    """
    one_of("length: unit", unit, UNITS)
    whole("length: target", target, least=0)
    if unit == "tokens" and completion_ids is None:
        raise ValueError('length: unit "tokens" needs completion_ids, and none were passed.')
    measured = completion_ids if unit == "tokens" else completion_texts(completions, "<think>")
    assert measured is not None
    return [-float(abs(target - len(one))) for one in measured]
