r"""Sorts the completions of a problem into classes of equal answers, among which maj@k votes.

Answers are compared mathematically, not as strings, so that 1/2, 0.5 and \frac12 are one class.
This module imports nothing slow, since worker processes call `compare` and `read`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_cli.distributed import heartbeat
from grpo_cli.scoring.guards import CallResult
from grpo_cli.scoring.pool import Call

if TYPE_CHECKING:
    from grpo_cli.scoring.calls import RewardExecutor

PROBLEM_SECONDS = 10.0  # limit for all comparisons of one problem
TEXT_SECONDS = 2.0  # limit for reading the answer of one text


@dataclass(frozen=True)
class Ballot:
    """The number of completions of one problem in each class of equal answers."""

    votes: list[int]  # [classes], in order of appearance
    right: set[int]  # indices of the right classes: at most one


def count(
    answers: Sequence[str | None], right: Sequence[bool], same: Callable[[str, str], bool]
) -> Ballot:
    """Sorts completions into classes of equal answers.

    All answers that the reward judges right form one class, which holds no wrong answer. Wrong
    answers that are written differently are compared by `same` with the first answer of each class.
    A right completion without a known answer votes for the right class.

    Args:
        answers: the answer of each completion; None without one.
        right: whether the reward judges each completion right.
        same: returns whether two answers are equal.
    """
    votes: list[int] = []
    first: list[str] = []  # the first answer of each class
    right_class: int | None = None
    known: dict[str, int] = {}  # index of a class of wrong answers, by each spelling
    for answer, is_right in zip(answers, right, strict=True):
        if is_right:
            its = right_class
        elif answer is None:
            continue
        elif (its := known.get(answer)) is None:
            wrong = (i for i in range(len(votes)) if i != right_class)
            its = next((i for i in wrong if same(first[i], answer)), None)
        if its is None:
            its = len(votes)
            first.append(answer or "")
            votes.append(0)
        if is_right:
            right_class = its
        elif answer is not None:
            known[answer] = its
        votes[its] += 1
    return Ballot(votes, set() if right_class is None else {right_class})


def count_in_pool(
    problems: Sequence[tuple[Sequence[str | None], Sequence[bool]]],
    executor: RewardExecutor,
    **how: str,
) -> list[Ballot]:
    """Counts the answers of many problems by `same_answer` of the reward math, in worker processes.

    If the comparisons of a problem exceed `PROBLEM_SECONDS`, its answers are compared as strings.

    Args:
        problems: (answers, whether each is right) for the completions of each problem.
        how: the reward's arguments `forms` and `units`, if they are set.
    """
    under_way: dict[int, Future[CallResult]] = {}
    for i, (answers, right) in enumerate(problems):
        spellings = {a for a, r in zip(answers, right, strict=True) if a is not None and not r}
        if len(spellings) > 1:
            arguments = {"answers": [*answers], "right": [*right], **how}
            under_way[i] = _start(executor, "compare", arguments, PROBLEM_SECONDS)
    ballots = []
    for i, (answers, right) in enumerate(problems):
        done = _awaited(under_way[i]) if i in under_way else None
        if done is not None and done.error is None:
            ballots.append(done.values)
        else:
            ballots.append(count(answers, right, lambda one, other: False))
    return ballots


def answers_in_pool(
    texts: Sequence[str], executor: RewardExecutor, **reading: object
) -> list[str | None]:
    """Extracts the final answer of each text, as the reward math does, in worker processes.

    A text that exceeds `TEXT_SECONDS` gets None.

    Args:
        reading: the reward's arguments `final` and `unclosed_think`, if they are set.
    """
    under_way = [
        _start(executor, "read", {"text": text, **reading}, TEXT_SECONDS) for text in texts
    ]
    return [None if d.error is not None else d.values for d in map(_awaited, under_way)]


def compare(answers: Sequence[str | None], right: Sequence[bool], **how: str) -> Ballot:
    """Counts answers by the rules of the reward math; called in a worker process."""
    from grpo_cli.rewards.math import same_answer

    return count(answers, right, functools.partial(same_answer, **how))


def read(text: str, **reading: Any) -> str | None:
    """Returns the final answer of a text; called in a worker process."""
    from grpo_cli.rewards.math import final_answer

    found: str | None = final_answer(text, **reading)
    return found


def _start(
    executor: RewardExecutor, function: str, arguments: dict[str, object], seconds: float
) -> Future[CallResult]:
    # Preloaded before the first call's timeout starts, if no worker is running yet.
    executor.preload |= {"grpo_cli.evaluation.majority", "grpo_cli.rewards.math", "math_verify"}
    return executor.pool.submit(
        Call(f"grpo_cli.evaluation.majority:{function}", arguments, seconds)
    )


def _awaited(future: Future[CallResult]) -> CallResult:
    """Waits for a call, sending a heartbeat every second."""
    while True:
        try:
            return future.result(timeout=1.0)
        except TimeoutError:
            heartbeat.beat()
