"""The numbers of a probe, from groups made by hand."""

import math
from dataclasses import replace

from grpo_cli.algorithm.settings import Advantage
from grpo_cli.config.recipe import Recipe
from grpo_cli.evaluation.probe.run import measure, signal_key
from grpo_cli.evaluation.probe.verdict import Measured
from grpo_cli.generation.settings import Generation
from grpo_cli.records import Group, Rollout
from grpo_cli.scoring.settings import Reward
from tests.conftest import make_group, make_rollout

EOS = 9
RECIPE = Recipe(
    reward={
        "right": Reward("exact_match"),
        "form": Reward("regex", weight=0.5, args={"pattern": "1"}),
    },
    generation=Generation(num_generations=2),
)


def rollout(right: float | None, ids: list[int], *, cut: bool = False, row: int = 0) -> Rollout:
    parts = {"right": right, "form": 1.0}
    reward = math.nan if right is None else right + 0.5
    return make_rollout(
        completion_ids=ids,
        finish_reason="length" if cut else "stop",
        columns={"answer": f"answer {row}"},
        row=row,
        parts=parts,
        prompt=f"prompt {row}",
        reward=reward,
    )


GROUPS = [
    make_group(3, [rollout(1.0, [7, EOS]), rollout(0.0, [7, 8], cut=True),
                   rollout(1.0, [7, EOS]), rollout(1.0, [5])]),
    make_group(8, [rollout(0.0, [7, EOS], row=1) for _ in range(4)]),
]  # fmt: skip


def measured(groups: list[Group], samples: int = 4) -> Measured:
    logged = {"rewards/right/timeouts": 2.0, "time/rewards/right": 4.0}
    return measure(RECIPE, groups, samples, logged, {})


def test_by_hand() -> None:
    m = measured(GROUPS)
    assert (m.prompts, m.samples, m.completions, m.num_generations) == (2, 4, 8, 2)
    assert m.pass_rate.value == 3 / 8
    assert m.rates == [(0, 0.75), (1, 0.0)]
    assert m.signal[2].value == 0.25, "3 of the 6 pairs of the first prompt"
    assert (m.differing, m.is_constant, m.identical) == (1, False, 0.5)
    assert m.truncated == 1 / 8
    assert (m.lengths["p50"], m.lengths["max"], m.lengths["mean"]) == (2.0, 2.0, 15 / 8)
    right, form = m.rewards["right"], m.rewards["form"]
    assert (right.mean, right.constant, right.timeouts, right.seconds) == (3 / 8, None, 2, 0.5)
    assert form.constant == 1.0


def test_a_completion_without_a_value() -> None:
    groups = [make_group(0, [rollout(None, [7, EOS]), rollout(0.0, [7, EOS])])]
    m = measured(groups, samples=2)
    assert m.rewards["right"].none == 1
    assert m.rates == [(0, 0.0)]
    assert m.signal[2].value == 0.0, "one reward is there and the other is not"


def test_what_has_to_differ() -> None:
    a, b = rollout(1.0, [7]), rollout(0.0, [7])
    b = replace(b, reward_parts={"right": 0.0, "form": 3.0}, outcome_reward=1.5)  # the same sum
    assert signal_key(RECIPE, a) == signal_key(RECIPE, b)
    apart = replace(RECIPE, advantage=Advantage(rule="gdpo"))
    assert signal_key(apart, a) != signal_key(apart, b)
    b = replace(b, step_rewards={"form": [(0, 1.0)]})
    assert signal_key(RECIPE, a) != signal_key(RECIPE, b)
    assert signal_key(RECIPE, rollout(None, [7])) is None
