import copy
from typing import Any

import pytest

from grpo_cli.algorithm.settings import Loss
from grpo_cli.config.knob import value_at
from grpo_cli.config.parsing import SCHEDULABLE
from grpo_cli.config.recipe import Recipe
from grpo_cli.config.schedules import Schedule, at_step, between, scheduled_value
from grpo_cli.generation.settings import Generation
from grpo_cli.models.settings import Optimizer
from grpo_cli.training.step import learning_rate


def rates(steps: int, **settings: object) -> list[float]:
    config = Optimizer(learning_rate=1.0, **settings)  # type: ignore[arg-type]
    return [learning_rate(config, step, steps) for step in range(steps)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1.0, 1.0, 1.0, 1.0]),
        ({"warmup_steps": 2}, [0.5, 1.0, 1.0, 1.0]),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0]),
        ({"schedule": "linear"}, [1.0, 0.75, 0.5, 0.25]),
        ({"schedule": "linear", "min_learning_rate": 0.2}, [1.0, 0.8, 0.6, 0.4]),
        ({"schedule": "linear", "warmup_steps": 2}, [0.5, 1.0, 1.0, 0.5]),
        # (1 + cos(0, π/4, π/2, 3π/4)) / 2
        ({"schedule": "cosine"}, [1.0, 0.85355339, 0.5, 0.14644661]),
        ({"schedule": "cosine", "min_learning_rate": 0.2}, [1.0, 0.88284271, 0.6, 0.31715729]),
        ({"schedule": "wsd"}, [1.0, 1.0, 1.0, 1.0]),  # the last step is where the decay begins
        # a warm-up that the run does not outlast
        ({"schedule": "cosine", "warmup_steps": 8}, [0.125, 0.25, 0.375, 0.5]),
    ],
)
def test_learning_rate_by_hand(settings: dict[str, object], expected: list[float]) -> None:
    assert rates(4, **settings) == pytest.approx(expected)


def test_wsd_decays_in_the_last_tenth() -> None:
    found = rates(40, schedule="wsd", min_learning_rate=0.2, warmup_steps=1)
    assert found == pytest.approx([1.0] * 37 + [0.8, 0.6, 0.4])


def test_the_rate_scales_with_its_peak() -> None:
    config = Optimizer(learning_rate=3e-4, schedule="linear", warmup_steps=1)
    assert learning_rate(config, 3, 5) == pytest.approx(1.5e-4)


# Scheduled knobs.


def values(first: float, schedule: Schedule, steps: int) -> list[float]:
    return [scheduled_value(first, schedule, step, steps) for step in range(steps)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # from the first step to the run's last
        (Schedule(to=0.0), [1.0, 5 / 6, 4 / 6, 0.5, 2 / 6, 1 / 6, 0.0]),
        (Schedule(to=7.0), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]),
        (Schedule(to=0.0, begin=2, end=4), [1.0, 1.0, 1.0, 0.5, 0.0, 0.0, 0.0]),
        (Schedule(to=0.0, begin=4), [1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0]),
        (Schedule(to=0.0, end=2), [1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]),
        # what lies past the run's last step is not reached
        (Schedule(to=0.0, end=12), [1.0, 11 / 12, 10 / 12, 0.75, 8 / 12, 7 / 12, 0.5]),
        # (1 + cos(0, π/4, π/2, 3π/4, π)) / 2
        (
            Schedule(to=0.0, shape="cosine", begin=1, end=5),
            [1.0, 1.0, 0.85355339, 0.5, 0.14644661, 0.0, 0.0],
        ),
        (Schedule(to=3.0, shape="cosine", end=3), [1.0, 1.5, 2.5, 3.0, 3.0, 3.0, 3.0]),
        (Schedule(to=0.5, shape="jump"), [0.5] * 7),
        (Schedule(to=0.5, shape="jump", begin=3), [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5]),
        (Schedule(to=0.5, shape="jump", begin=9), [1.0] * 7),
    ],
)
def test_scheduled_value_by_hand(schedule: Schedule, expected: list[float]) -> None:
    assert values(1.0, schedule, 7) == pytest.approx(expected)


def test_a_run_of_one_step_is_at_the_end() -> None:
    assert values(1.0, Schedule(to=0.25), 1) == [0.25]


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_between_starts_and_ends_exactly(shape: str) -> None:
    assert between(0.3, 0.1, 0.0, shape) == pytest.approx(0.3, abs=0)
    assert between(0.3, 0.1, 1.0, shape) == 0.1


def scheduled(schedules: dict[str, Schedule], **settings: Any) -> Recipe:
    return Recipe(steps=5, schedules=schedules, **settings)


def test_at_step_sets_the_scheduled_knobs_and_names_them() -> None:
    recipe = scheduled(
        {
            "loss.beta": Schedule(to=0.0),
            "loss.epsilon_high": Schedule(to=0.2, shape="jump", begin=2),
            "generation.temperature": Schedule(to=0.6, begin=1, end=3),
        },
        loss=Loss(beta=0.04, epsilon_high=0.28, epsilon=0.1),
        generation=Generation(temperature=1.0, top_p=0.9),
    )
    kept = copy.deepcopy(recipe)
    found = [at_step(recipe, step) for step in range(5)]
    assert [r.loss.beta for r, _ in found] == pytest.approx([0.04, 0.03, 0.02, 0.01, 0.0])
    assert [r.loss.epsilon_high for r, _ in found] == [0.28, 0.28, 0.2, 0.2, 0.2]
    temperatures = [r.generation.temperature for r, _ in found]
    assert temperatures == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.6])
    for current, metrics in found:
        assert metrics == {
            "schedule/loss.beta": current.loss.beta,
            "schedule/loss.epsilon_high": current.loss.epsilon_high,
            "schedule/generation.temperature": current.generation.temperature,
        }
        # The rest of a section, and the other sections, are the recipe's own.
        assert (current.loss.epsilon, current.generation.top_p) == (0.1, 0.9)
        assert current.optimizer is recipe.optimizer
        assert current.schedules is recipe.schedules
    assert recipe == kept, "the run's own recipe must not follow the step"


def test_whole_numbers_stay_whole() -> None:
    recipe = scheduled(
        {"generation.num_generations": Schedule(to=5)}, generation=Generation(num_generations=8)
    )
    found = [at_step(recipe, step) for step in range(5)]
    # 8, 7.25, 6.5, 5.75, 5; a half goes to the even number
    assert [r.generation.num_generations for r, _ in found] == [8, 7, 6, 6, 5]
    assert all(type(r.generation.num_generations) is int for r, _ in found)
    logged = [m["schedule/generation.num_generations"] for _, m in found]
    assert logged == [8.0, 7.0, 6.0, 6.0, 5.0]
    assert all(type(v) is float for v in logged)


@pytest.mark.parametrize("key", SCHEDULABLE)
def test_every_knob_that_may_follow_the_step_does(key: str) -> None:
    recipe = scheduled({key: Schedule(to=3.0, shape="jump", begin=2)})
    if value_at(recipe, key) is None:  # then parsing asks for a first value
        section, _, name = key.partition(".")
        setattr(getattr(recipe, section), name, 1.0)
    first = value_at(recipe, key)
    found = [value_at(at_step(recipe, step)[0], key) for step in range(4)]
    assert found == [first, first, 3, 3]
    assert type(found[2]) is type(first)
