import math
from collections.abc import Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from grpo_cli.config import Dataset, Eval, Generation, Recipe, Reward
from grpo_cli.distributed import Workers
from grpo_cli.evaluate import Evaluator, interval_95, summarize
from grpo_cli.generation import OnGroup, ignore
from grpo_cli.rollouts import Completion, Prompt
from grpo_cli.sampling import Sampling
from grpo_cli.scoring import Scorer
from tests.conftest import make_group, make_rollout


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    [
        # Newcombe 1998 (Statistics in Medicine 17, 857-872), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        # with z² = 3.8415: 0 of 10 ends at z² / (10 + z²); 5 of 10 is 0.5 ± 0.5 z / sqrt(10 + z²)
        (0, 10, 0.0, 0.2775),
        (5, 10, 0.2366, 0.7634),
        (10, 10, 0.7225, 1.0),
        (1, 1, 0.2065, 1.0),
    ],
)
def test_wilsons_interval_of_single_completions(
    right: int, of: int, low: float, high: float
) -> None:
    shares = [1.0] * right + [0.0] * (of - right)
    assert interval_95(shares, single=True) == pytest.approx((low, high), abs=5e-5)


def test_wilsons_interval_stays_in_its_range() -> None:
    for of in range(1, 200):
        assert interval_95([0.0] * of, single=True)[0] >= 0
        assert interval_95([1.0] * of, single=True)[1] <= 1


def test_the_interval_over_problems_of_several_completions() -> None:
    # mean 0.5, variance (4 · 0.25²) / 3 = 1/12, half = 1.959964 · sqrt(1/48) = 0.28290
    shares = [0.25, 0.75, 0.25, 0.75]
    assert interval_95(shares, single=False) == pytest.approx((0.21710, 0.78290), abs=1e-5)
    # wider than 0 to 1: mean 0.5, variance 0.5, half = 1.959964 · 0.5
    assert interval_95([0.0, 1.0], single=False) == (0.0, 1.0)
    # one problem says nothing about others
    assert interval_95([0.5], single=False) == (0.0, 1.0)


def rollout(correct: float | None, *, tokens: int = 2, **settings: Any) -> Any:
    reward = math.nan if correct is None else correct
    return make_rollout(
        completion_ids=[7] * tokens, parts={"right": correct}, reward=reward, **settings
    )


def test_summarize_single_completions() -> None:
    rollouts = [
        rollout(1.0, tokens=4),
        rollout(0.0, tokens=6, finish_reason="length"),
        rollout(0.5, tokens=1),  # nearly right is not right
        rollout(None, tokens=1),  # no function applied: not right, and no part of the mean
    ]
    found = summarize([make_group(i, [r]) for i, r in enumerate(rollouts)], "right")
    low, high = interval_95([1, 0, 0, 0], single=True)
    assert found == pytest.approx(
        {
            "eval/accuracy": 0.25,
            "eval/accuracy_low": low,
            "eval/accuracy_high": high,
            "eval/reward": 0.5,
            "eval/mean_length": 3.0,
            "eval/clipped_ratio": 0.25,
            "eval/rewards/right/mean": 0.5,
        }
    )


def test_summarize_several_completions_and_rewards() -> None:
    groups = [
        make_group(0, [rollout(1.0), rollout(0.0), rollout(0.0), rollout(0.0)]),
        make_group(1, [rollout(1.0), rollout(1.0), rollout(1.0), rollout(0.0)]),
    ]
    for i, r in enumerate(r for g in groups for r in g.rollouts):
        r.reward_parts["other"] = None if i else 3.0
    found = summarize(groups, "right")
    assert found["eval/accuracy"] == 0.5
    # over two problems with shares 1/4 and 3/4: half = 1.959964 · sqrt(0.125 / 2) = 0.48999
    assert found["eval/accuracy_low"] == pytest.approx(0.01001, abs=1e-5)
    assert found["eval/accuracy_high"] == pytest.approx(0.98999, abs=1e-5)
    assert found["eval/rewards/other/mean"] == 3.0
    assert summarize(groups, "other")["eval/accuracy"] == 0.0


def test_a_reward_that_never_applied_has_no_mean() -> None:
    found = summarize([make_group(0, [rollout(None)])], "right")
    assert math.isnan(found["eval/rewards/right/mean"])
    assert math.isnan(found["eval/reward"])
    assert found["eval/accuracy"] == 0.0


class Recites:
    """A generator that completes prompt [n, ...] with n and 2; it notes how it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, Sampling]] = []

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_generations: int,
        sampling: Sampling,
        seeds: Sequence[int],
        on_group: OnGroup = ignore,
    ) -> list[list[Completion]]:
        self.asked.append((num_generations, sampling))
        groups = [[Completion([p[0], 2], [-0.5, 0.0], "stop")] * num_generations for p in prompts]
        for number, group in enumerate(groups):
            on_group(number, group)
        return groups

    def update_weights(self, policy: Any, step: int) -> dict[str, float]:
        return {}

    def rest(self) -> None: ...

    def close(self) -> None: ...


def second_character(completions: list[str]) -> list[list[tuple[int, float]]]:
    return [[(1, 2.0)]] * len(completions)


def test_steps_may_be_rewarded_by_characters(tokenizer: PreTrainedTokenizerFast) -> None:
    rewards = {
        "exact": Reward("exact_match"),
        "steps": Reward("tests.test_evaluate:second_character", weight=0.5),
    }
    recipe = Recipe(reward=rewards, generation=Generation(max_completion_tokens=9))
    ids = tokenizer("é")["input_ids"]
    prompts = [Prompt(row, ids, "", {"answer": "x"}) for row in range(3)]
    scorer = Scorer(rewards, ["answer"], "x")

    class Repeats(Recites):
        def generate(
            self,
            prompts: Sequence[Sequence[int]],
            num_generations: int,
            sampling: Sampling,
            seeds: Sequence[int],
            on_group: OnGroup = ignore,
        ) -> list[list[Completion]]:
            groups = [[Completion([*p, *p, 2], [0.0] * 5, "stop")] for p in prompts]
            for number, group in enumerate(groups):
                on_group(number, group)
            return groups

    found = Evaluator(recipe, Workers("cpu"), tokenizer, Repeats(), scorer, prompts).run()
    assert [row["completion"] for row in found.rows] == ["éé"] * 3
    assert found.metrics["eval/rewards/steps/mean"] == 2.0
    assert found.metrics["eval/reward"] == 1.0
    assert found.metrics["eval/accuracy"] == 0.0


def test_an_evaluation_completes_and_scores_every_row(tokenizer: PreTrainedTokenizerFast) -> None:
    generator = Recites()
    letters = [chr(ord("a") + i % 26) for i in range(70)]  # more than one chunk
    prompts = [
        Prompt(row, tokenizer(text)["input_ids"], text, {"answer": "a"})
        for row, text in enumerate(letters)
    ]
    rewards = {
        "first": Reward("length", args={"target": 1}),
        "exact": Reward("exact_match"),
    }
    recipe = Recipe(
        reward=rewards,
        dataset=Dataset(),
        generation=Generation(max_completion_tokens=9, temperature=0.8, top_k=5),
        eval=Eval(accuracy="exact", num_samples=2, temperature=0.6, top_p=0.9),
    )
    seen: list[int] = []
    evaluator = Evaluator(
        recipe, Workers("cpu"), tokenizer, generator, Scorer(rewards, ["answer"], "x"), prompts
    )
    found = evaluator.run(lambda done, _: seen.append(done))
    assert found.metrics["eval/accuracy"] == pytest.approx(3 / 70)  # rows 0, 26 and 52 are an a
    assert found.metrics["eval/rewards/first/mean"] == 0.0
    assert [(row["row"], row["sample"]) for row in found.rows] == [
        (i, j) for i in range(70) for j in range(2)
    ]
    assert found.rows[3]["completion"] == "b"
    assert [row["correct"] for row in found.rows[:4]] == [True, True, False, False]
    assert set(generator.asked) == {(2, Sampling(9, temperature=0.6, top_p=0.9))}
    assert seen[-1] == 70
