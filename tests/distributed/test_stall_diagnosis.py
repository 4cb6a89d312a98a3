"""Who holds a job up: states as processes tell them, and the sentence that comes of it."""

import pytest

from grpo_cli.distributed import stall_diagnosis
from grpo_cli.distributed.heartbeat import State
from grpo_cli.distributed.stall_diagnosis import Seen

NOW = 1000.0


def seen(
    stage: str,
    *,
    quiet: float = 0.0,
    inside: float = 0.0,
    waiting: bool = False,
    step: int | None = 3,
    age: float = 0.5,
    number: int = 1,
) -> Seen:
    """What a process told `age` seconds ago."""
    state = State(stage, step, quiet, waiting, inside)
    return Seen.of(stall_diagnosis.status_message(number, state, done=False).encode(), NOW - age)


def test_what_is_told_is_what_is_seen() -> None:
    state = State("reward", 7, 1.5, True, 2.5)
    found = Seen.of(stall_diagnosis.status_message(4, state, done=True).encode(), 10.0)
    assert (found.state, found.done, found.at) == (state, True, 10.0)
    assert found.beaten == 8.5
    assert found.doing == "reward of step 7"
    assert stall_diagnosis.doing(state._replace(step=None)) == "reward"


def test_who_is_silent_and_how_long_all_are_quiet() -> None:
    running = {
        0: seen("update", quiet=30.0, age=1.0),
        1: seen("reward", quiet=5.0, age=20.0),
        2: seen("update", quiet=40.0, age=5.0),
    }
    assert stall_diagnosis.silent(running, NOW, 5.0) == [1], "5 s are not yet more than 5 s"
    assert stall_diagnosis.silent(running, NOW, 4.9) == [1, 2]
    assert stall_diagnosis.quiet(running, [], NOW) == 25.0, (
        "1 beat 20 s + 5 s ago, the others before"
    )


def test_the_one_that_does_not_wait_is_to_blame() -> None:
    running = {
        0: seen("update", quiet=400.0, inside=400.0, waiting=True),
        1: seen("reward", quiet=300.0, inside=300.0),
        2: seen("update", quiet=500.0, inside=500.0, waiting=True),
    }
    assert stall_diagnosis.slowest(running, [], NOW) == (
        1,
        " has been in reward of step 3 for 5 minutes, the others wait",
    )


def test_of_several_that_are_busy_the_one_that_beat_first() -> None:
    running = {
        0: seen("generate", quiet=61.0, inside=70.0),
        1: seen("generate", quiet=65.0, inside=66.0, age=1.0),
        2: seen("generate", quiet=1.0, waiting=True),
        3: seen("generate", quiet=62.0, inside=70.0),
    }
    assert stall_diagnosis.slowest(running, [], NOW) == (
        1,
        " has been in generate of step 3 for 67 s; 2 more are busy, the others wait",
    )


def test_a_silent_one_is_to_blame_even_if_it_waited_when_it_was_last_heard_of() -> None:
    running = {
        0: seen("update", quiet=90.0, waiting=True),
        1: seen("update", quiet=0.0, waiting=True, age=95.0),
    }
    assert stall_diagnosis.slowest(running, [1], NOW) == (
        1,
        ", last in update of step 3, has given no answer for 95 s "
        "(stopped, in code that holds the GIL, or its machine hangs), the others wait",
    )


def test_all_wait_for_one_another() -> None:
    running = {r: seen("update", quiet=60.0 + r, inside=90.0, waiting=True) for r in range(3)}
    rank, what = stall_diagnosis.slowest(running, [], NOW)
    assert rank == 2
    assert what == " has been in update of step 3 for 90 s, and all wait for one another"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (99.4, "99 s"),
        (100.0, "2 minutes"),
    ],
)
def test_spelt(seconds: float, text: str) -> None:
    assert stall_diagnosis.duration(seconds) == text
