from grpo_cli.reporting.alarms import Level, Shift, Watch, WatchState
from tests.tables import table


def episodes(rule: Level | Shift, values: list[float | None]) -> list[int]:
    """The indices at which an episode begins."""
    watch, state = Watch("x", rule, "x"), WatchState()
    steps = ({} if value is None else {"x": value} for value in values)
    return [i for i, metrics in enumerate(steps) if watch.follow(state, metrics) is not None]


NAN = float("nan")


@table(
    "rule, values, expected",
    [
        (Level(above=2), [1, 2, 3, 1, 2], [1, 4]),
        (Level(below=2), [3, 2, 1, 3, 1], [1, 4]),
        (Level(above=2, steps=3), [2, 2, 1, 2, 2, 2], [5]),
        (Level(above=2, steps=2), [2, None, 2], [2]),  # a step that measured nothing
        (Level(above=2, steps=2), [2, NAN, 2], [2]),
        # An episode ends after as many others, and only then another begins.
        (Level(above=2, steps=2), [2, 2, 1, 2, 2, 2], [1]),
        (Level(above=2, steps=2), [2, 2, 1, 1, 2, 2], [1, 5]),
        (Shift(factor=2, least=3, steps=1), [1, 1, 9], []),  # nothing to compare with yet
        (Shift(factor=2, least=3, steps=1), [1, 1, 1, 2, 2.1], [4]),
        (Shift(factor=2, least=3, steps=1), [1, 1, 1, 3, 3, 1.4, 3], [3, 6]),
        (Shift(factor=2, added=5, least=3, steps=1), [1, 1, 1, 3, 6.5], [4]),
        # What is beyond does not become the usual.
        (
            Shift(factor=2, least=3, window=3, steps=2),
            [1, 1, 1, 3, 3, 3, 3, 3, 3, 1, 1, 3, 3],
            [4, 12],
        ),
        # The last three, and the first three.
        (Shift(factor=2, least=3, window=3, steps=1), [1, 1, 1, 2, 2, 2, 3, 3], []),
        (Shift(factor=2, least=3, window=3, steps=1, first=True), [1, 1, 1, 2, 2, 2, 3], [6]),
        (Shift(factor=0.1, least=3, window=3, steps=1, first=True), [1, 1, 1, 0.2, 0.09], [4]),
        (Shift(factor=10, least=3, steps=1), [0, 0, 0, 9], []),  # ten times nothing
        (Shift(factor=10, added=1, least=3, steps=1), [0, 0, 0, 9], [3]),
        (Shift(factor=2, least=3, steps=1), [float("inf"), 1, 1, 1, 3], [4]),
    ],
)
def test_episodes(rule: Level | Shift, values: list[float | None], expected: list[int]) -> None:
    assert episodes(rule, values) == expected
