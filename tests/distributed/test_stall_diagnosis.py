"""Who holds a job up: states as processes tell them, and the sentence that comes of it."""

import pytest

from grpo_cli.distributed import stall_diagnosis
from grpo_cli.distributed.heartbeat import Activity
from grpo_cli.distributed.stall_diagnosis import PublishedState

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
) -> PublishedState:
    """What a process told `age` seconds ago."""
    state = Activity(stage, step, quiet, waiting, inside)
    return PublishedState.of(
        stall_diagnosis.status_message(number, state, done=False).encode(), NOW - age
    )


def test_who_is_silent() -> None:
    running = {0: seen("update"), 1: seen("reward", age=20.0), 2: seen("update", age=5.0)}
    assert stall_diagnosis.silent(running, NOW, 5.0) == [1], "5 s are not yet more than 5 s"
    assert stall_diagnosis.silent(running, NOW, 4.9) == [1, 2]


BUSY = {
    0: seen("generate", quiet=61.0, inside=70.0),
    1: seen("generate", quiet=65.0, inside=66.0, age=1.0),
    2: seen("generate", quiet=62.0, waiting=True),
    3: seen("generate", quiet=62.0, inside=70.0),
}


@pytest.mark.parametrize(
    ("running", "mute", "stall", "expected"),
    [
        (BUSY, [], 61.4, "61 s: 1 has been in generate of step 3 for 67 s; 2 more are busy, the "),
        (BUSY, [], 61.6, None),
        (BUSY, [0], 62.4, "62 s: 1 has been in"),  # whose last heartbeat does not count
        (
            {
                0: seen("update", quiet=400.0, inside=400.0, waiting=True),
                1: seen("reward", quiet=300.0, inside=300.0),
                2: seen("update", quiet=500.0, inside=500.0, waiting=True),
            },
            [],
            120.0,
            "2 minutes: 1 has been in reward of step 3 for 5 minutes, the others wait",
        ),
        (
            {
                0: seen("update", quiet=90.0, waiting=True),
                1: seen("update", quiet=0.0, waiting=True, age=95.0),
            },
            [1],
            60.0,
            "60 s: 1, last in update of step 3, has given no answer for 95 s "
            "(stopped, in code that holds the GIL, or its machine hangs), the others wait",
        ),
        (
            {r: seen("update", quiet=60.0 + r, inside=90.0, waiting=True) for r in range(3)},
            [],
            60.0,
            "60 s: 2 has been in update of step 3 for 90 s, and all wait for one another",
        ),
        ({0: seen("start", quiet=200.0)}, [], 50.0, "3 minutes: 0 has been in start"),
        ({0: seen("start", quiet=199.0)}, [], 50.0, None),  # four times as long
    ],
)
def test_diagnose(
    running: dict[int, PublishedState], mute: list[int], stall: float, expected: str | None
) -> None:
    found = stall_diagnosis.diagnose(running, mute, NOW, stall, str)
    if expected is None:
        assert found is None
    else:
        assert found[1].startswith(f"stalled for {expected}")
        assert f": {found[0]}" in found[1]
