r"""Which completions of a problem give the same answer: the classes that maj@k votes among.

Answers are equal by mathematics, not by their text, so that 1/2, 0.5 and \frac12 are one class.
Nothing heavy is imported here: worker processes call `compare` and `read`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpo_cli import heartbeat
from grpo_cli.pool import Call, Done

if TYPE_CHECKING:
    from grpo_cli.reward_calls import Crew

PROBLEM_SECONDS = 10.0  # for all comparisons of one problem
CHUNK = 32  # texts that one call reads
CHUNK_SECONDS, TEXT_SECONDS = 5.0, 2.0  # for a chunk, and for a text of one that ran out of time


@dataclass(frozen=True)
class Ballot:
    """The completions of one problem, by their answers."""

    answers: list[str]  # [classes]: the first one of each, in the order of first appearance
    votes: list[list[int]]  # [classes]: which completions give it
    right: set[int]  # the classes that are right: one at most
    abstained: list[int]  # completions without an answer


def count(
    answers: Sequence[str | None], right: Sequence[bool], same: Callable[[str, str], bool]
) -> Ballot:
    """Sorts completions into classes of equal answers.

    What the reward says is kept to: answers that it judges right are equal to the gold one, hence
    one class; a right and a wrong one are never. `same` is asked of wrong answers that are written
    differently, against the first of each class. A right completion always votes: one of which no
    answer is known joins the class of the right ones.

    Args:
        answers: of each completion; None without one. right: whether the reward judges it right.
        same: whether two answers are equal.
    """
    ballot = Ballot([], [], set(), [])
    known: dict[str, int] = {}  # classes of wrong answers, by each of their spellings
    for completion, (answer, is_right) in enumerate(zip(answers, right, strict=True)):
        if is_right:
            its = next(iter(ballot.right), None)
            if its is not None:
                ballot.answers[its] = ballot.answers[its] or answer or ""
        elif answer is None:
            ballot.abstained.append(completion)
            continue
        else:
            its = known.get(answer)
            if its is None:
                wrong = (i for i in range(len(ballot.answers)) if i not in ballot.right)
                its = next((i for i in wrong if same(ballot.answers[i], answer)), None)
        if its is None:
            its = len(ballot.answers)
            ballot.answers.append(answer or "")
            ballot.votes.append([])
        if is_right:
            ballot.right.add(its)
        elif answer is not None:
            known[answer] = its
        ballot.votes[its].append(completion)
    return ballot


def count_in_pool(
    problems: Sequence[tuple[Sequence[str | None], Sequence[bool]]],
    crew: Crew,
    *,
    units: str = "ignore",
    percent: str = "sign",
) -> tuple[list[Ballot], int]:
    """`count` of many problems by `same_answer` of the reward math, in the crew's processes.

    Args:
        problems: the answers of each one's completions, and whether these are right. units,
            percent: arguments of the reward.

    Returns:
        (their ballots, of how many problems the comparisons came to no end within
        `PROBLEM_SECONDS`; their answers are held against each other as text).
    """
    under_way: dict[int, Future[Done]] = {}
    for i, (answers, right) in enumerate(problems):
        spellings = {a for a, r in zip(answers, right, strict=True) if a is not None and not r}
        if len(spellings) > 1:
            arguments = {
                "answers": list(answers),
                "right": list(right),
                "units": units,
                "percent": percent,
            }
            under_way[i] = _start(crew, "compare", arguments, PROBLEM_SECONDS)
    ballots, given_up = [], 0
    for i, (answers, right) in enumerate(problems):
        done = _awaited(under_way[i]) if i in under_way else Done()
        given_up += done.error is not None
        compared = i in under_way and done.error is None
        ballots.append(done.values if compared else count(answers, right, lambda one, other: False))
    return ballots, given_up


def answers_in_pool(texts: Sequence[str], crew: Crew) -> list[str | None]:
    """`final_answer` of the reward math of each text, in the crew's processes.

    A text whose answer is not found within `TEXT_SECONDS` has none.
    """

    def start(texts: Sequence[str], seconds: float) -> Future[Done]:
        return _start(crew, "read", {"texts": list(texts)}, seconds)

    chunks = [texts[i : i + CHUNK] for i in range(0, len(texts), CHUNK)]
    chunked = [start(chunk, CHUNK_SECONDS) for chunk in chunks]
    found: list[str | None] = []
    for chunk, future in zip(chunks, chunked, strict=True):
        done = _awaited(future)
        if done.error is None:
            found += done.values
            continue
        alone = [start([text], TEXT_SECONDS) for text in chunk]
        found += [None if d.error is not None else d.values[0] for d in map(_awaited, alone)]
    return found


def compare(
    answers: Sequence[str | None], right: Sequence[bool], units: str, percent: str
) -> Ballot:
    """`count` by the rules of the reward math; called in a worker process."""
    from grpo_cli.rewards.math import same_answer

    return count(answers, right, functools.partial(same_answer, units=units, percent=percent))


def read(texts: Sequence[str]) -> list[str | None]:
    """The final answers of texts; called in a worker process."""
    from grpo_cli.rewards.math import final_answer

    return [final_answer(text) for text in texts]


def _start(crew: Crew, function: str, arguments: dict[str, object], seconds: float) -> Future[Done]:
    # Imported before the first call's clock starts, where no worker is there yet.
    crew.preload |= {"grpo_cli.votes", "grpo_cli.rewards.math", "math_verify"}
    return crew.pool.submit(Call(f"grpo_cli.votes:{function}", arguments, seconds))


def _awaited(future: Future[Done]) -> Done:
    """What a call has come to; says every second that this process is alive."""
    while True:
        try:
            return future.result(timeout=1.0)
        except TimeoutError:
            heartbeat.beat()
