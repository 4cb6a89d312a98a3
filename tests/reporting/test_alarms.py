"""Each alarm with a simulated run that raises it and one that must not."""

import json
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_cli.config.recipe import Recipe
from grpo_cli.errors import TrainingError
from grpo_cli.reporting.alarms import Alarms
from grpo_cli.scoring.settings import Reward
from tests.tables import table

NAN = math.nan
Series = Callable[[int], dict[str, float]]  # the metrics of a step, from 1


def make_recipe() -> Recipe:
    rewards = {
        "right": Reward("x"),
        "style": Reward("x", weight=0.5),
        "logged": Reward("x", weight=0),
    }
    return Recipe(reward=rewards)


def make_alarms(recipe: Recipe) -> Any:
    return Alarms(recipe, lambda step, kind, raised: None)


def raised(series: Series, steps: int = 120, recipe: Recipe | None = None) -> list[tuple[int, str]]:
    """(step, name) of each alarm of a simulated run, which is healthy but for `series`."""
    alarms, draw = make_alarms(recipe or make_recipe()), random.Random(0)
    found = []
    for step in range(1, steps + 1):
        metrics = healthy(step, draw) | series(step)
        found += [(step, alarm.name) for alarm in alarms.follow(step, metrics)]
    return found


def healthy(step: int, draw: random.Random) -> dict[str, float]:
    """A step of a run that learns: the length grows, the entropy falls, the rest is noise."""
    share = draw.uniform(0.4, 0.9)
    metrics = {
        "reward": 0.3 + 0.005 * step + draw.gauss(0, 0.05),
        "frac_zero_advantage": draw.uniform(0.1, 0.7),
        "completions/mean_length": (300 + 3 * step) * draw.uniform(0.85, 1.15),
        "completions/clipped_ratio": draw.uniform(0.02, 0.15),
        "clip_ratio/region_mean": draw.uniform(0.0, 0.05),
        "sampling/sampling_logp_difference/mean": draw.uniform(0.003, 0.006),
        "grad_norm": math.exp(draw.gauss(0, 0.5)),
        "rewards/right/std": draw.uniform(0.2, 0.5),
        "rewards/style/std": draw.uniform(0.2, 0.5),
        "rewards/right/advantage_share": share,
        "rewards/style/advantage_share": 1 - share,
        "rewards/logged/advantage_share": 0.0,
        "rewards/right/timeouts": 0.0,
    }
    if step == 1 or step % 10 == 0:
        metrics["entropy"] = 0.6 * math.exp(-step / 100)
    return metrics


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_raises_no_alarm(seed: int) -> None:
    alarms, draw = make_alarms(make_recipe()), random.Random(seed)
    for step in range(1, 201):
        assert alarms.follow(step, healthy(step, draw)) == []


def after(step: int, **values: float) -> Series:
    names = {key.replace("__", "/"): value for key, value in values.items()}
    return lambda now: names if now > step else {}


def only(first: int, last: int, **values: float) -> Series:
    inner = after(first - 1, **values)
    return lambda now: inner(now) if now <= last else {}


LENGTH, CUT = "completions__mean_length", "completions__clipped_ratio"
SHARE = "rewards__right__advantage_share"
MISMATCH = "sampling__sampling_logp_difference__mean"


@table(
    "series, expected",
    [
        (after(50, reward=NAN), [(51, "no_reward")]),
        (after(50, frac_zero_advantage=1.0), [(53, "equal_rewards")]),
        (only(51, 52, frac_zero_advantage=1.0), []),
        (after(50, frac_zero_advantage=0.99), []),
        (after(50, frac_zero_advantage=1.0, reward=NAN), [(51, "no_reward")]),
        (after(50, rewards__right__timeouts=2.0), [(51, "reward_calls/right/timeouts")]),
        (after(50, rewards__style__errors=2.0), [(51, "reward_calls/style/errors")]),
        (after(50, **{SHARE: 0.99}), [(70, "one_reward/right")]),
        (after(50, **{SHARE: 0.94}), []),
        # The other is constant, which is its own alarm: what varies carries everything.
        (after(50, **{SHARE: 1.0}, rewards__style__std=0.0), [(100, "constant_reward/style")]),
        (only(51, 99, rewards__style__std=0.0), []),
        (after(50, completions__mean_length=1200.0), [(53, "length")]),
        (only(51, 52, completions__mean_length=1200.0), []),
        (after(50, completions__mean_length=500.0), []),
        (lambda step: {"completions/mean_length": 3 + 3.0 * (step > 50)}, []),  # of 3 to 6 tokens
        (after(50, completions__clipped_ratio=0.6), [(53, "truncated")]),
        (after(50, completions__clipped_ratio=0.25), []),
        (after(0, completions__clipped_ratio=0.95), [(10, "mostly_truncated")]),
        (after(0, completions__clipped_ratio=0.7), []),
        (lambda step: {"entropy": 0.02} if step > 50 and step % 10 == 0 else {}, [(70, "entropy")]),
        (lambda step: {"entropy": 0.1} if step > 50 and step % 10 == 0 else {}, []),
        (after(50, clip_ratio__region_mean=0.4), [(53, "clip_ratio")]),
        (after(50, clip_ratio__region_mean=0.25), []),
        (after(50, **{MISMATCH: 0.03}), [(55, "mismatch")]),
        (after(50, **{MISMATCH: 0.012}), []),
        (lambda step: {"sampling/sampling_logp_difference/mean": 1e-7 * step}, []),
        (lambda step: {"staleness/logp_difference": 0.001 * step}, [(36, "mismatch")]),
        (only(51, 51, grad_norm=40.0), [(51, "grad_norm")]),
        (only(51, 51, grad_norm=5.0), []),
        # A converged run: a single step with an advantage is no larger than those at the beginning.
        (lambda step: {"grad_norm": 0.02 if step % 10 else 1.5} if step > 30 else {}, []),
        (
            lambda step: {"grad_norm": 0.02 if step != 90 else 40.0} if step > 30 else {},
            [(90, "grad_norm")],
        ),
    ],
)
def test_alarms(series: Series, expected: list[tuple[int, str]]) -> None:
    assert raised(series) == expected


def test_steps_without_any_reward_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_cli.reporting.alarms.STEPS_WITHOUT_REWARD", 3)
    alarms = make_alarms(Recipe())
    nothing, something = ({"reward": r, "frac_zero_advantage": 0.0} for r in (NAN, 0.5))
    for step, metrics in enumerate([nothing, nothing, something, nothing, nothing], start=1):
        alarms.follow(step, metrics)
        alarms.on_log(SimpleNamespace(step=step))
    alarms.follow(6, nothing)
    with pytest.raises(TrainingError, match="step 6: no completion of the last 3 steps"):
        alarms.on_log(SimpleNamespace(step=6))


@pytest.mark.parametrize("stop_after", [20, 51, 52, 60])
def test_a_stored_state_goes_on_as_if_nothing_had_happened(stop_after: int) -> None:
    alarms, found = make_alarms(make_recipe()), []
    for step in range(1, 80):
        if step == stop_after:
            stored = json.loads(json.dumps(alarms.state_dict()))
            alarms = make_alarms(make_recipe())
            alarms.load_state_dict(stored | {"gone": {}})
        long = {"completions/mean_length": 1200.0} if step > 50 else {}
        found += alarms.follow(step, healthy(step, random.Random(step)) | long)
    assert [alarm.name for alarm in found] == ["length"]
    assert found[0].message.startswith("step 53: ")
