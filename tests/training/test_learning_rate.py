import pytest

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
