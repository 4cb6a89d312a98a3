"""Final answers as texts, which of them are equal, and the classes that completions vote for."""

from concurrent.futures import Future

import pytest

from grpo_cli.evaluation import majority
from grpo_cli.evaluation.majority import Ballot, answers_in_pool, count, count_in_pool
from grpo_cli.rewards.math import final_answer, math, same_answer
from grpo_cli.scoring.calls import RewardExecutor
from grpo_cli.scoring.guards import CallResult
from grpo_cli.scoring.pool import Call


def never(one: str, other: str) -> bool:
    raise AssertionError(f"{one} and {other} are compared")


def hanging(seconds: float) -> Call:
    return Call("tests.pool_rewards:does", {"completions": ["sleep"]}, seconds)


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("There are 3 apples and then 7 pears.", "7"),
        ("so x is $\\frac{1}{2}$, as said", "0.5"),
        ("It costs 1,250 dollars in all", "1250"),
        ("(" * 40 + " 12", "12"),
    ],
)
def test_what_is_right_in_prose_has_an_answer_that_is_equal(text: str, gold: str) -> None:
    expected = math([text], answer=[gold])[0] == 1.0
    answer = final_answer(text)
    assert (answer is not None and same_answer(answer, gold)) == expected


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("1/2", "0.5", True),
        (r"\dfrac{1}{2}", r"\frac24", True),
        ("18 dollars", "18", True),
        ("x=5", "5", True),
        ("(1, 2)", "(2, 1)", False),
        ("Evelyn", "evelyn", True),
        ("Evelyn", "Frank", False),
        ("31_4", "31", True),
    ],
)
def test_same_answer_either_way(one: str, other: str, equal: bool) -> None:
    assert same_answer(one, other) is equal
    assert same_answer(other, one) is equal


def test_same_answer_takes_the_arguments_of_the_reward() -> None:
    assert same_answer("18%", "18")
    # Only one of the two has a unit: with the other one as gold there is nothing to require.
    assert same_answer("18 cm", "18", units="require")
    assert not same_answer("18 cm", "18 m", units="require")


def test_what_the_reward_judges_right_is_one_class_and_never_a_wrong_one() -> None:
    answers = ["1/2", "half", "1/2", "0.5", None, None]
    ballot = count(answers, [True, True, False, False, True, False], lambda one, other: False)
    assert ballot == Ballot([3, 1, 1], {0})
    # Nor where they are equal by mathematics: the judgement may rest on more than the answer.
    ballot = count(["1/2", "0.5"], [True, False], lambda one, other: True)
    assert ballot.votes == [1, 1]


def test_a_right_completion_without_an_answer_votes() -> None:
    assert count([None, "5"], [True, True], never) == Ballot([2], {0})
    assert count([None], [True], never) == Ballot([1], {0})


def test_equal_texts_are_not_compared() -> None:
    ballot = count(["5", "5", "7", "7"], [False, False, True, True], never)
    assert ballot == Ballot([2, 2], {1})
    asked: list[tuple[str, str]] = []

    def same(one: str, other: str) -> bool:
        asked.append((one, other))
        return {one, other} == {"1/2", "0.5"}

    count(["1/2", "0.5", "3", "0.5", "3"], [False] * 5, same)
    assert asked == [("1/2", "0.5"), ("1/2", "3")]  # and the second 0.5 is known


@pytest.mark.programs
def test_many_problems_in_the_pool(executor: RewardExecutor) -> None:
    problems = [
        (["1/2", "0.5", "7", r"\frac12"], [False, False, True, False]),
        (["3", "3", None], [False, False, False]),
        (["18 cm", "18 m"], [False, False]),
    ]
    ballots = count_in_pool(problems, executor, units="ignore")
    assert [b.votes for b in ballots] == [[3, 1], [2], [2]]
    assert ballots[0] == count(*problems[0], same_answer)
    ballots = count_in_pool(problems, executor)
    assert ballots[2].votes == [1, 1]


def test_comparisons_that_run_out_of_time_fall_back_to_text(
    executor: RewardExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = executor.pool.submit
    monkeypatch.setattr(majority, "PROBLEM_SECONDS", 0.2)
    monkeypatch.setattr(executor.pool, "submit", lambda call: submit(hanging(call.seconds)))
    answers = ["1/2", "0.5", "1/2"]
    ballots = count_in_pool([(answers, [False] * 3), (["3"], [False])], executor)
    assert [b.votes for b in ballots] == [[2, 1], [1]]


def test_answers_in_the_pool(executor: RewardExecutor) -> None:
    texts = [rf"It is \boxed{{{n}}}." for n in range(70)] + ["nothing here"]
    assert answers_in_pool(texts, executor) == [*map(str, range(70)), None]
    assert answers_in_pool([], executor) == []


@pytest.mark.programs
def test_one_text_that_runs_out_of_time_abstains_alone(
    executor: RewardExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, submit = "odd", executor.pool.submit

    def submitted(call: Call) -> Future[CallResult]:
        return submit(hanging(0.2) if slow == call.arguments["text"] else call)

    monkeypatch.setattr(executor.pool, "submit", submitted)
    found = answers_in_pool([r"\boxed{1}", slow, r"\boxed{2}"], executor)
    assert found == ["1", None, "2"]
