"""Warns of a run that goes wrong and lets it go on; docs/alarms.md defines each alarm.

An alarm is a rule (`watches.py`) for one number of a step, with a sentence. It is raised once in an
episode: a line of alarms.jsonl, and a printed one. To add an alarm: an entry in `alarms_of`, its
name in `ALARMS`, its row in docs/alarms.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from grpo_cli.algorithm.loss import STALENESS
from grpo_cli.config.schema import ALARMS, Recipe
from grpo_cli.errors import TrainingError
from grpo_cli.reporting.watches import Level, Metrics, Rule, Shift, Value, Watch, Watches, measured

ACTIVE = "alarms/active"
EQUAL_STEPS = 3  # steps in a row without any advantage
ONE_REWARD_STEPS = 20  # in which one reward carries the advantage's variance
CONSTANT_STEPS = 50  # in which a reward has one value
MOSTLY_TRUNCATED_STEPS = 10
MISMATCH = ("sampling/sampling_logp_difference/mean", STALENESS)


class Raised(NamedTuple):
    """An alarm at the step at which its episode begins."""

    name: str
    message: str


@dataclass(frozen=True)
class Alarm:
    """A rule with its sentence, in which {value}, {limit} and {usual} are filled in."""

    watch: Watch
    text: str


class Alarms:
    """Follows the metrics of each step. Every process has the same ones."""

    def __init__(self, recipe: Recipe) -> None:
        self.alarms = list(alarms_of(recipe))
        self.watches = Watches()
        self.most_without_reward = recipe.scoring.max_steps_without_reward

    def follow(self, step: int, metrics: Metrics) -> list[Raised]:
        """Follows one step; returns the alarms whose episodes begin, each with its sentence."""
        texts = {alarm.watch.name: alarm.text for alarm in self.alarms}
        found = self.watches.follow([alarm.watch for alarm in self.alarms], metrics)
        return [
            Raised(watch.name, f"step {step}: {texts[watch.name].format(**vars(judged))}")
            for watch, judged in found
        ]

    @property
    def active(self) -> float:
        """The number of alarms whose episodes have not ended."""
        names = {alarm.watch.name for alarm in self.alarms}
        return float(sum(s.holds for name, s in self.watches.states.items() if name in names))

    def check_rewards(self, step: int) -> None:
        """Checks that there are rewards at all.

        Raises:
            TrainingError: no completion of max_steps_without_reward steps in a row had a reward.
        """
        without = self.watches.states["no_reward"].beyond
        if 0 < self.most_without_reward <= without:
            raise TrainingError(
                f"step {step}: no completion of the last {without} steps had a reward (every "
                "function returned None); scoring.max_steps_without_reward=0 continues."
            )

    def to_state(self) -> dict[str, dict[str, Any]]:
        """Returns what a checkpoint stores."""
        return self.watches.to_state()

    def restore(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Restores what `to_state` has returned."""
        self.watches.restore(saved, [alarm.watch for alarm in self.alarms])


def alarms_of(recipe: Recipe) -> Iterator[Alarm]:
    """Yields the alarms of a recipe, in the order of `ALARMS`, without those that it ignores."""
    for name in ALARMS:
        if name not in recipe.alarms.ignore or name == "no_reward":
            yield from _MAKERS[name](recipe)


def _alarm(name: str, rule: Rule, value: Value, text: str) -> Iterator[Alarm]:
    yield Alarm(Watch(name, rule, value), text)


def _no_reward(recipe: Recipe) -> Iterator[Alarm]:
    def is_missing(metrics: Metrics) -> float:
        return float(math.isnan(metrics["reward"]))

    return _alarm(
        "no_reward",
        Level(above=1.0),
        is_missing,
        "no completion has a reward, since every function returned None; nothing is learned. Look "
        "at the columns that they read.",
    )


def _equal_rewards(recipe: Recipe) -> Iterator[Alarm]:
    def silent_share(metrics: Metrics) -> float | None:
        return None if math.isnan(metrics["reward"]) else metrics.get("frac_zero_advantage")

    return _alarm(
        "equal_rewards",
        Level(above=1.0, steps=EQUAL_STEPS),
        silent_share,
        f"for {EQUAL_STEPS} steps all completions of each prompt had the same reward, so that no "
        "completion had an advantage; nothing is learned.",
    )


def _reward_calls(recipe: Recipe) -> Iterator[Alarm]:
    kinds = {"timeouts": "did not end in time", "errors": "failed"}
    for name in recipe.reward:
        for kind, what in kinds.items():
            yield from _alarm(
                f"reward_calls/{name}/{kind}",
                Level(above=1.0),
                measured(f"rewards/{name}/{kind}"),
                f"{{value:g}} calls of the reward {name} {what}; rewards/{name}/{kind} in "
                "metrics.jsonl counts them.",
            )


def _one_reward(recipe: Recipe) -> Iterator[Alarm]:
    weighted = weighted_rewards(recipe)
    limit = recipe.alarms.reward_share

    def share_of(name: str) -> Value:
        def share(metrics: Metrics) -> float | None:
            varied = sum(metrics.get(f"rewards/{other}/std", 0.0) > 0 for other in weighted)
            return metrics.get(f"rewards/{name}/advantage_share") if varied > 1 else None

        return share

    for name in weighted if len(weighted) > 1 else ():
        yield from _alarm(
            f"one_reward/{name}",
            Level(above=limit, calm=limit - 0.05, steps=ONE_REWARD_STEPS),
            share_of(name),
            f"the reward {name} carries {{value:.0%}} of the advantage's variance, and more than "
            f"{limit:.0%} in each of the last {ONE_REWARD_STEPS} steps in which others varied too: "
            "these teach next to nothing. Change the weights, or use advantage=gdpo.",
        )


def _constant_reward(recipe: Recipe) -> Iterator[Alarm]:
    weighted = weighted_rewards(recipe)
    for name in weighted if len(weighted) > 1 else ():
        yield from _alarm(
            f"constant_reward/{name}",
            Level(below=0.0, steps=CONSTANT_STEPS),
            measured(f"rewards/{name}/std"),
            f"the reward {name} has had the same value for all completions of each of the last "
            f"{CONSTANT_STEPS} steps: it teaches nothing.",
        )


def weighted_rewards(recipe: Recipe) -> list[str]:
    """Returns the names of the reward functions that have a weight."""
    return [name for name, reward in recipe.reward.items() if reward.weight]


def _length(recipe: Recipe) -> Iterator[Alarm]:
    return _alarm(
        "length",
        Shift(factor=2.0, added=4.0, least=5),
        measured("completions/mean_length"),
        "completions have a mean length of {value:.0f} tokens, {usual:.0f} in the median of the "
        "steps before: look at the newest ones. A reward that pays for length does this, and a "
        "policy that no longer ends its text.",
    )


def _truncated(recipe: Recipe) -> Iterator[Alarm]:
    return _alarm(
        "truncated",
        Shift(factor=1.0, added=0.25, least=5),
        measured("completions/clipped_ratio"),
        "{value:.0%} of the completions are cut off by generation.max_completion_tokens, "
        "{usual:.0%} in the median of the steps before.",
    )


def _mostly_truncated(recipe: Recipe) -> Iterator[Alarm]:
    return _alarm(
        "mostly_truncated",
        Level(above=0.9, calm=0.8, steps=MOSTLY_TRUNCATED_STEPS),
        measured("completions/clipped_ratio"),
        "{value:.0%} of the completions are cut off by generation.max_completion_tokens, and at "
        f"least nine of ten in each of the last {MOSTLY_TRUNCATED_STEPS} steps: the model does not "
        "end its text, or the limit is too short for it.",
    )


def _entropy(recipe: Recipe) -> Iterator[Alarm]:
    return _alarm(
        "entropy",
        Shift(factor=0.1, window=3, first=True, least=3, steps=2),
        measured("entropy"),
        "the entropy is {value:.3g} nats a token, less than a tenth of the {usual:.3g} that the "
        "run began with: completions of a prompt are nearly the same. A lower learning rate, "
        "loss.epsilon_high or loss.entropy_coef keeps it up.",
    )


def _clip_ratio(recipe: Recipe) -> Iterator[Alarm]:
    return _alarm(
        "clip_ratio",
        Level(above=0.3, calm=0.2, steps=3),
        measured("clip_ratio/region_mean"),
        "{value:.0%} of the tokens that train are clipped: the updates of a step move the policy "
        "too far. Lower optimizer.learning_rate, or take fewer updates a step.",
    )


def _mismatch(recipe: Recipe) -> Iterator[Alarm]:
    def difference(metrics: Metrics) -> float | None:
        found = [metrics[key] for key in MISMATCH if key in metrics]
        return max(found, default=None)

    return _alarm(
        "mismatch",
        Shift(factor=3.0, added=0.01, window=20, first=True, steps=5),
        difference,
        "the sampler's log-probabilities differ from the trainer's by {value:.3g} in the mean, "
        "{usual:.3g} in the first steps: the samples come less and less from the policy that is "
        "trained. Look at the weight check, prefetch_steps and the sampler's data type.",
    )


def _grad_norm(recipe: Recipe) -> Iterator[Alarm]:
    return _alarm(
        "grad_norm",
        Shift(factor=10.0, least=20, steps=1, of_start=3.0),
        measured("grad_norm"),
        "the gradient's norm is {value:.3g}, {usual:.3g} in the median of the steps before.",
    )


_MAKERS: dict[str, Callable[[Recipe], Iterator[Alarm]]] = {
    "no_reward": _no_reward,
    "equal_rewards": _equal_rewards,
    "reward_calls": _reward_calls,
    "one_reward": _one_reward,
    "constant_reward": _constant_reward,
    "length": _length,
    "truncated": _truncated,
    "mostly_truncated": _mostly_truncated,
    "entropy": _entropy,
    "clip_ratio": _clip_ratio,
    "mismatch": _mismatch,
    "grad_norm": _grad_norm,
}
