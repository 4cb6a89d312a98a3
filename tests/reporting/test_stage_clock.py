"""Where a step's time goes, by a clock that is set by hand; and the line that shows it."""

import pytest

from grpo_cli.config import parsing
from grpo_cli.config.recipe import Recipe
from grpo_cli.records import RolloutStats, StepStats
from grpo_cli.reporting.progress import STAGES, times
from grpo_cli.reporting.stage_clock import Clock, possible_stages
from tests.conftest import CPU


class Hands:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hands() -> Hands:
    return Hands()


def step(*lengths: int) -> StepStats:
    """A group of completions of these lengths; each prompt has 2 tokens."""
    return {
        0: [RolloutStats(0.0, 0.0, {}, {}, 2, tokens, False, False, tokens) for tokens in lengths]
    }


def recipe(**sections: object) -> Recipe:
    data = {"train": "rows.jsonl", "prompt": "{question}"}
    tree = {"model": {"path": "here"}, "dataset": data, "reward": {"exact_match": {}}}
    return parsing.parse({"recipe": "test", **tree, **sections})


def test_stages_add_up_and_tokens_are_counted(hands: Hands) -> None:
    clock = Clock(CPU, timer=hands)
    for seconds in (0.5, 1.5):
        with clock.stage("generate"):
            hands.now += seconds
    hands.now += 2.0  # in no stage
    assert clock.metrics(step(3, 5)) == {
        "time/generate": 2.0,
        "step_time": 4.0,
        "tokens_per_second": 3.0,  # two prompts of 2 tokens, completions of 3 and 5, in 4 s
    }


def test_a_stage_within_another_is_counted_once(hands: Hands) -> None:
    clock = Clock(CPU, timer=hands)
    with clock.stage("forward_backward"):
        hands.now += 1.0
        for _ in range(2):
            with clock.stage("idle"):
                hands.now += 2.0
                with clock.stage("weights"):
                    hands.now += 4.0
        hands.now += 8.0
    with clock.stage("optimizer"):
        hands.now += 16.0
    found = clock.metrics(step(1))
    assert found["time/forward_backward"] == 9.0
    assert found["time/idle"] == 4.0
    assert found["time/weights"] == 8.0
    assert found["time/optimizer"] == 16.0
    assert found["step_time"] == 37.0


def test_stages_that_a_recipe_can_have() -> None:
    plain = ["generate", "reward", "forward_backward", "optimizer", "weights"]
    assert possible_stages(recipe(), reference=False, processes=1) == plain
    assert possible_stages(recipe(), False, processes=2) == [*plain, "idle"]
    with_reference = [*plain[:2], "ref_logprobs", *plain[2:]]
    assert possible_stages(recipe(), reference=True, processes=1) == with_reference
    several: list[dict[str, object]] = [
        {"update": {"num_iterations": 2}},
        {"update": {"minibatches": 2}},
        {"generation": {"dynamic_sampling": True}},
    ]
    for sections in several:
        found = possible_stages(recipe(**sections), False, 1)
        assert found == [*plain[:2], "old_logprobs", *plain[2:]]
    in_reward = recipe(loss={"beta": 0.1, "kl_in": "reward"})
    assert possible_stages(in_reward, True, 2) == list(STAGES)
    assert possible_stages(in_reward, False, 1) == plain


def test_utilisation_is_flops_over_what_the_stage_s_time_allowed(hands: Hands) -> None:
    clock = Clock(CPU, peak=1000.0, timer=hands)
    with clock.stage("generate"):
        hands.now += 4.0
    with clock.stage("forward_backward"):
        hands.now += 2.0
        with clock.stage("idle"):  # not held against the training
            hands.now += 6.0
    clock.count("generate", lambda: 100.0)
    clock.count("generate", lambda: 300.0)
    clock.count("forward_backward", lambda: 500.0)
    found = clock.metrics(step(1))
    assert found["mfu/generate"] == 0.1
    assert found["mfu/forward_backward"] == 0.25


FIGURES = {
    "time/generate": 4.06,
    "time/reward": 0.204,
    "time/rewards/math": 50.0,  # of the workers, not a stage
    "time/old_logprobs": 0.099,  # below 1 % of the step
    "time/ref_logprobs": 0.1,
    "time/forward_backward": 4.8,
    "time/weights": 0.0,
    "step_time": 10.0,
    "tokens_per_second": 1812.4,
    "mfu/generate": 0.02,
    "mfu/forward_backward": 0.413,
}


def test_the_line_of_times() -> None:
    stages = "generate 4.1 s · reward 0.20 · ref 0.10 · fwd/bwd 4.8"
    assert times(FIGURES) == f"{stages} | 1,812 tok/s | MFU 41 %"
    without_mfu = {key: value for key, value in FIGURES.items() if not key.startswith("mfu/")}
    assert times(without_mfu) == f"{stages} | 1,812 tok/s"
    assert times(FIGURES | {"mfu/forward_backward": 0.0314}).endswith("MFU 3.1 %")
    assert times(FIGURES | {"mfu/forward_backward": 0.0996}).endswith("MFU 10 %")
    assert times(FIGURES | {"time/generate": 123.4}).startswith("generate 123 s · reward")
    assert times({"step_time": 1.0, "tokens_per_second": 5.0}) == "5 tok/s"
