"""Reward: prefers short among right answers, and long among wrong ones."""

from math import cos, pi
from typing import Any

from grpo_cli.rewards import reward
from grpo_cli.rewards._arguments import number, whole
from grpo_cli.rewards._text import Completions
from grpo_cli.rewards.math import math


@reward(timeout=5, preload=("math_verify",))
def cosine_length(
    completions: Completions,
    answer: list[Any],
    completion_ids: list[list[int]],
    *,
    max_completion_tokens: int,
    correct_max: float = 1.0,
    correct_min: float = 0.5,
    wrong_min: float = -1.0,
    wrong_max: float = -0.5,
    exceed: float = -1.0,
    **_: Any,
) -> list[float | None]:
    """Lowers a right answer's reward and raises a wrong one's with length, along half a cosine.

    The cosine reward of "Demystifying Long Chain-of-Thought Reasoning" (arXiv 2502.03373). For a
    completion of t tokens under a limit of T, the end token included,

        value = at_limit + (at_zero - at_limit) * (1 + cos(pi * t / T)) / 2      where t < T,
        value = exceed                                                          where t >= T.

    `at_zero` is correct_max or wrong_min, `at_limit` correct_min or wrong_max: being brief pays for
    what is right, thinking on pays for what is wrong. An answer is right where `math` gives 1.0.

    Recipe args:
        max_completion_tokens: the limit T, in tokens; the run's own unless it is set.
        correct_max: a right answer's value at length 0.
        correct_min: a right answer's value just below the limit.
        wrong_min: a wrong answer's value at length 0.
        wrong_max: a wrong answer's value just below the limit.
        exceed: the value at the limit, where a completion is cut off, right or wrong.

    The paper's own values are 2, 1, -10, 0 and -10, in this order; the defaults are open-r1's,
    which go with other rewards between 0 and 1, and its lowest for `exceed`, which it lacks.

    A row whose gold answer is missing (None or blank) gives None.
    """
    limit = max_completion_tokens
    whole("cosine_length: max_completion_tokens", limit)
    top = number("cosine_length: correct_max", correct_max)
    right = top, number("cosine_length: correct_min", correct_min)
    low = number("cosine_length: wrong_min", wrong_min)
    wrong = low, number("cosine_length: wrong_max", wrong_max)
    beyond: float = number("cosine_length: exceed", exceed)

    def value(correct: float, tokens: int) -> float:
        if tokens >= limit:
            return beyond
        at_zero, at_limit = right if correct == 1.0 else wrong
        return float(at_limit + (at_zero - at_limit) * (1 + cos(pi * tokens / limit)) / 2)

    correctness = math(completions=completions, answer=answer)
    return [
        None if correct is None else value(correct, len(ids))
        for correct, ids in zip(correctness, completion_ids, strict=True)
    ]
