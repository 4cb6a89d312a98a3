import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from grpo_cli.config.recipe import Recipe
from grpo_cli.data.settings import Dataset
from grpo_cli.distributed.workers import Workers
from grpo_cli.evaluation.estimates import estimate
from grpo_cli.evaluation.evaluator import Evaluator, judged_text
from grpo_cli.evaluation.settings import Eval
from grpo_cli.evaluation.summary import ProblemStats, as_metrics, summarize
from grpo_cli.evaluation.tasks import TaskResult, held_out
from grpo_cli.generation.base import Generator, Request
from grpo_cli.generation.sampling import Sampling
from grpo_cli.generation.settings import Generation
from grpo_cli.records import Completion, Prompt
from grpo_cli.reporting.reporter import nested
from grpo_cli.scoring.scorer import Scorer
from grpo_cli.scoring.settings import Reward
from tests.conftest import make_group, make_rollout
from tests.episodes import make_episode
from tests.evaluation.modes import task_of


def rollout(correct: float | None, *, tokens: int = 2, **settings: Any) -> Any:
    reward = math.nan if correct is None else correct
    return make_rollout(
        completion_ids=[7] * tokens, parts={"right": correct}, reward=reward, **settings
    )


def numbers(rollouts: list[list[Any]], right: str = "right") -> dict[str, float]:
    groups = [make_group(i, of) for i, of in enumerate(rollouts)]
    found = [ProblemStats.of(g, right) for g in groups]
    return summarize(found, Eval(), len(rollouts[0]))


def test_summarize_single_completions() -> None:
    rollouts = [
        rollout(1.0, tokens=4),
        rollout(0.0, tokens=6, finish_reason="length"),
        rollout(0.5, tokens=1),  # nearly right is not right
        rollout(None, tokens=1),  # no function applied: not right, and no part of the mean
    ]
    interval = estimate([1, 0, 0, 0], 4)
    assert numbers([[r] for r in rollouts]) == pytest.approx(
        {
            "n": 4,
            "accuracy": 0.25,
            "accuracy_low": interval.low,
            "accuracy_high": interval.high,
            "reward": 0.5,
            "graded": 0.25,
            "mean_length": 3.0,
            "clipped_ratio": 0.25,
            "rewards/right/mean": 0.5,
        }
    )


def test_summarize_episodes() -> None:
    good, failed = make_episode((None, None)), make_episode((None,), stop_reason="env_error")
    good = replace(good, reward_parts={"r": 1.0}, reward=1.0)
    failed = replace(failed, reward_parts={"r": None}, reward=math.nan)
    metrics = numbers([[good], [failed]], right="r")
    assert metrics["accuracy"] == 0.5
    assert metrics["reward"] == 1.0
    assert (metrics["turns"], metrics["unscored"]) == (1.5, 1)


def test_summarize_several_completions_and_rewards() -> None:
    others = iter([3.0, *[None] * 7])
    groups = [
        [rollout(c, reward_parts={"right": c, "other": next(others)}) for c in row]
        for row in ((1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 0.0))
    ]
    found = numbers(groups)
    interval = estimate([0.25, 0.75], 8)
    assert (found["accuracy"], found["n"], found["completions"]) == (0.5, 2, 8)
    assert (found["accuracy_low"], found["accuracy_high"]) == (interval.low, interval.high)
    assert found["mean@4"] == found["pass@1"] == 0.5
    assert found["pass@2"] == pytest.approx((1 - 3 / 6 + 1) / 2)  # C(3, 2) / C(4, 2) draw none
    assert found["pass@4"] == 1.0
    assert found["rewards/other/mean"] == 3.0
    assert "maj@4" not in found, "nothing says what was answered"
    assert numbers(groups, "other")["accuracy"] == 0.0


ASKS = "\nThink step by step."


@pytest.mark.parametrize(
    ("said", "judged"),
    [
        ("It is 7.", "It is 7."),
        ("It is 7.\n\nWhat is 8 + 8?" + ASKS, "It is 7."),  # a problem of the model's own
        ("First.\n\nIt is 7.\n\nWhat is 8 + 8?" + ASKS, "First.\n\nIt is 7."),
        ("It is 7.\nWhat is 8 + 8?" + ASKS, "It is 7.\nWhat is 8 + 8?"),
        ("\n\nWhat is 8 + 8?" + ASKS, ""),
        ("5 + 2.\n\nThe answer is 7." + ASKS, "5 + 2.\n\nThe answer is 7."),  # said again
        ("5 + 2.\n\n\\boxed{7}\nWhat is 8?" + ASKS, "5 + 2.\n\n\\boxed{7}\nWhat is 8?"),
        ("5 + 2.\n\n\\boxed{7}\n\nWhat is 8?" + ASKS, "5 + 2.\n\n\\boxed{7}"),
        ("def f():\n\n    return 7\nprint(", "def f():\n\n    return 7"),  # asks nothing
    ],
)
def test_what_is_judged_ends_before_a_stop_text(said: str, judged: str) -> None:
    stopped = make_rollout(text=said, finish_reason="stop")
    assert judged_text(stopped, (ASKS, "\nprint("), (ASKS,)) == judged
    cut_off = make_rollout(text=said, finish_reason="length")
    assert judged_text(cut_off, (ASKS, "\nprint("), (ASKS,)) == said


def test_the_mean_of_benchmarks_has_an_interval_of_theirs() -> None:
    """Arms of 0.3 and 0.4 below, 0.05 and 0.12 above: 0.5 and 0.13, halved."""
    ends = ((0.5, 0.2, 0.55), (0.9, 0.5, 1.02))
    results: list[Any] = []
    for name, (middle, low, high) in zip("ab", ends, strict=True):
        numbers = {"accuracy": middle, "accuracy_low": low, "accuracy_high": high, "n": 9.0}
        numbers |= {"reward": middle, "mean_length": 3.0, "clipped_ratio": 0.0}
        results.append(TaskResult(task_of(name, "cot"), numbers, []))
    found = as_metrics(results)
    assert found["eval/accuracy"] == pytest.approx(0.7)
    assert found["eval/accuracy_low"] == pytest.approx(0.7 - 0.25)
    assert found["eval/accuracy_high"] == pytest.approx(0.7 + 0.065)
    alone = as_metrics(results[:1])
    for key in ("accuracy", "accuracy_low", "accuracy_high"):
        assert alone[f"eval/{key}"] == pytest.approx(alone[f"eval/a/{key}"])


def test_numbers_are_nested_for_a_file() -> None:
    flat = {
        "n": 2.0, "accuracy": 0.5, "accuracy_low": 0.1, "accuracy_high": 0.9, "pass@2": 1.0,
        "pass@2_low": 0.3, "pass@2_high": 1.0, "rewards/math/mean": 0.5,
        "subject/a/b/accuracy": 0.0,
        "subject/a/b/accuracy_low": 0.0, "subject/a/b/accuracy_high": 0.8, "subject/a/b/n": 1.0,
    }  # fmt: skip
    assert nested(flat) == {
        "n": 2,
        "accuracy": 0.5,
        "interval_95": [0.1, 0.9],
        "pass@2": 1.0,
        "intervals_95": {"pass@2": [0.3, 1.0]},
        "rewards/math/mean": 0.5,
        "by": {"subject": {"a/b": {"accuracy": 0.0, "interval_95": [0.0, 0.8], "n": 1}}},
    }


class Recites(Generator):
    """A generator that says the first token of a prompt and 2; it notes its requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, Sampling]] = []

    def sample(self, request: Request) -> Iterator[tuple[int, list[Completion]]]:
        self.asked.append((request.num_generations, request.sampling))
        for number, p in enumerate(request.prompts):
            completion = Completion([p.ids[0], 2], [0.0] * 2, "stop")
            yield number, [completion] * request.num_generations


def test_an_evaluation_completes_and_scores_every_row(tokenizer: PreTrainedTokenizerFast) -> None:
    generator = Recites()
    letters = [chr(ord("a") + i % 26) for i in range(70)]
    prompts = [
        Prompt(row, tokenizer(text)["input_ids"], text, {"answer": "a"})
        for row, text in enumerate(letters)
    ]
    rewards = {"first": Reward("length", args={"target": 1}), "exact": Reward("exact_match")}
    recipe = Recipe(
        reward=rewards,
        dataset=Dataset(),
        generation=Generation(max_completion_tokens=9, temperature=0.8, top_k=5),
        eval=Eval(accuracy="exact", num_samples=2, temperature=0.6, top_p=0.9),
    )
    seen: list[int] = []
    task = held_out(recipe, "x", prompts, Scorer(rewards, ["answer"], "x"))
    evaluator = Evaluator(recipe.eval, Workers("cpu"), tokenizer, generator, [task])
    results = evaluator.run(lambda done, _: seen.append(done), keep_groups=True)
    found = as_metrics(results)
    assert found["eval/accuracy"] == pytest.approx(3 / 70)  # rows 0, 26 and 52 are an a
    assert found["eval/rewards/first/mean"] == 0.0
    groups = results[0].groups
    assert [g.prompt.row for g in groups] == list(range(70))
    assert [r.text for r in groups[1].rollouts] == ["b", "b"]
    assert [r.reward_parts["exact"] for g in groups[:2] for r in g.rollouts] == [1, 1, 0, 0]
    assert set(generator.asked) == {(2, Sampling(9, temperature=0.6, top_p=0.9))}
    assert max(seen) == 70
    assert [r.groups for r in evaluator.run()] == [[]], "kept only where they are asked for"
