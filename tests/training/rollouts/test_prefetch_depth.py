import itertools
import json
import math

from grpo_cli.config.schema import Vllm
from grpo_cli.training.rollouts.prefetch_depth import CALM_STEPS, PrefetchDepth
from tests.tables import table

HIGH, MIDDLE, LOW = 0.06, 0.04, 0.01
AUTO = Vllm(prefetch="auto", prefetch_max_difference=0.05)


def depths(most: int, differences: list[float | None], vllm: Vllm = AUTO) -> list[int]:
    """The steps that are prefetched after each step."""
    depth, found = PrefetchDepth(most, vllm), []
    for difference in differences:
        depth.follow(difference)
        found.append(depth.steps)
    return found


@table(
    "most, differences, expected",
    [
        (3, [MIDDLE] * 4, [3, 3, 3, 3]),
        # After the first the three steps that are prefetched already are passed over.
        (3, [HIGH] * 9, [2, 2, 2, 2, 1, 1, 1, 0, 0]),
        (1, [HIGH] * 4, [0, 0, 0, 0]),
        (1, [HIGH, HIGH, *[LOW] * 5], [0] * 6 + [1]),
        (2, [HIGH, LOW, LOW, *[LOW] * 4, MIDDLE, *[LOW] * 5], [1] * 12 + [2]),  # in a row
        (2, [HIGH, None, math.nan, *[LOW] * 2, None, math.nan, *[LOW] * 3], [1] * 9 + [2]),
        (2, [LOW] * 20, [2] * 20),  # never more than the recipe says
        (0, [HIGH] * 4, [0] * 4),
    ],
)
def test_depths(most: int, differences: list[float | None], expected: list[int]) -> None:
    assert CALM_STEPS == 5
    assert depths(most, differences) == expected


def test_a_fixed_depth_stays() -> None:
    assert depths(2, [9.0] * 9, Vllm()) == [2] * 9


def test_a_stored_depth_goes_on_unless_its_settings_have_changed() -> None:
    straight = PrefetchDepth(2, AUTO)
    for difference in (HIGH, LOW, LOW, LOW):
        straight.follow(difference)
    stored = json.loads(json.dumps(straight.to_state()))
    resumed, deeper, fixed = (PrefetchDepth(m, v) for m, v in ((2, AUTO), (3, AUTO), (2, Vllm())))
    for depth in (resumed, deeper, fixed):
        depth.restore(stored)
    assert vars(resumed) == vars(straight)
    assert (resumed.steps, resumed.calm) == (1, 1)
    assert (deeper.steps, fixed.steps) == (3, 2)
    fresh = PrefetchDepth(2, AUTO)
    fresh.restore(None)
    assert fresh.steps == 2


def test_a_limit_between_two_depths_makes_no_lasting_swing() -> None:
    """One step of age is above the limit, none is below half of it: raises become rare."""
    depth, ages, raises = PrefetchDepth(1, AUTO), [1], []
    for step in range(400):
        before = depth.steps
        depth.follow(HIGH if ages[-1] else LOW)
        ages.append(before)  # what is sampled with the new number is used one step later
        raises += [step] if depth.steps > before else []
    gaps = [b - a for a, b in itertools.pairwise(raises)]
    assert gaps == sorted(gaps), gaps
    assert gaps[-1] > 80, gaps
