"""Warns when a run goes wrong, without ending it; docs/alarms.md defines each alarm.

An alarm is a rule for one number of a step, with a sentence:

    Level   the value is beyond a fixed limit
    Shift   the value is far from the median of earlier steps of this run

A rule holds once its condition is met in `steps` measurements in a row, until it is not met in as
many. A step in which the metric was not measured changes nothing. An alarm is raised once in such
an episode: it is printed, and written as a line of alarms.jsonl. To add one, add an entry below and
its row to docs/alarms.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_cli.algorithm.loss import STALENESS
from grpo_cli.config.recipe import Recipe
from grpo_cli.errors import TrainingError

if TYPE_CHECKING:
    from grpo_cli.training.callbacks import Event

Metrics = Mapping[str, float]
Value = Callable[[Metrics], float | None]  # the number of a step; None: it was not measured


@dataclass
class WatchState:
    """The progress of a rule, which a checkpoint stores."""

    rule: str = ""  # its parameters; a rule with other ones starts over
    values: list[float] = field(default_factory=list)  # earlier values, for a Shift
    beyond: int = 0  # measurements in a row
    usual: int = 0  # measurements in a row that are not beyond
    holds: bool = False


@dataclass(frozen=True)
class Level:
    """A value is beyond a fixed limit: at or above `above`, or at or below `below`."""

    above: float = math.inf
    below: float = -math.inf
    steps: int = 1  # measurements in a row

    def is_beyond(self, value: float, state: WatchState) -> bool:
        return value >= self.above or value <= self.below


@dataclass(frozen=True)
class Shift:
    """A value is far from the median of earlier values.

    The limit is the larger of median · factor and median + added. With a factor below 1 it is
    median · factor, and smaller values are beyond it. Values beyond the limit do not enter the
    window, since a lasting change would then become usual.

    Args:
        added: smallest difference to the median, in the metric's unit.
        window: number of earlier values.
        first: the window holds the first values of the run rather than the last ones.
        least: number of earlier values below which nothing is beyond.
        steps: measurements in a row.
    """

    factor: float
    added: float = 0.0
    window: int = 50
    first: bool = False
    least: int = 10
    steps: int = 3

    def is_beyond(self, value: float, state: WatchState) -> bool:
        """Compares a value with the earlier ones; adds it to them if it is not beyond."""
        values = state.values
        usual = median(values) if len(values) >= self.least else math.nan
        if self.factor < 1:
            found = value < usual * self.factor
        else:  # no multiple of 0 is a limit
            found = value > max(usual * self.factor, usual + self.added) > 0
        if not found and math.isfinite(value) and not (self.first and len(values) >= self.window):
            state.values = [*values, value][-self.window :]
        return found


@dataclass(frozen=True)
class Watch:
    """A rule for one number of a step."""

    name: str
    rule: Level | Shift
    value: str | Value  # a metric, or a number that is computed from several
    text: str = ""  # sentence of an alarm, in which {value} and {usual} are filled in

    def follow(self, state: WatchState, metrics: Metrics) -> str | None:
        """Follows one step; returns the alarm's sentence if an episode begins, else None."""
        value = metrics.get(self.value) if isinstance(self.value, str) else self.value(metrics)
        if value is None or math.isnan(value):
            return None
        is_beyond = self.rule.is_beyond(value, state)
        state.beyond, state.usual = (state.beyond + 1, 0) if is_beyond else (0, state.usual + 1)
        if state.holds:
            state.holds = state.usual < self.rule.steps
            return None
        state.holds = state.beyond >= self.rule.steps
        usual = median(state.values) if state.values else math.nan
        return self.text.format(value=value, usual=usual) if state.holds else None


ACTIVE = "alarms/active"
EQUAL_STEPS = 3  # steps in a row without any advantage
ONE_REWARD, ONE_REWARD_STEPS = 0.95, 20  # one reward's share of the advantage's variance
CONSTANT_STEPS = 50  # steps in which a reward has one value
MOSTLY_TRUNCATED_STEPS = 10
STEPS_WITHOUT_REWARD = 10  # in a row; more are a fault of the rewards or of the data
MISMATCH = ("sampling/sampling_logp_difference/mean", STALENESS)


class Raised(NamedTuple):
    """An alarm at the step at which its episode begins."""

    name: str
    message: str


class Alarms:
    """Follows the metrics of each step. Every process has the same ones."""

    def __init__(
        self, recipe: Recipe, alarmed: Callable[[int, str, Sequence[Raised]], None]
    ) -> None:
        """Makes the alarms of a recipe; `alarmed` is `Reporter.alarmed`."""
        self.alarms = [*_of_rewards(recipe), *_of_completions(), *_of_updates()]
        self.states: dict[str, WatchState] = {}  # by the name of the alarm
        self.alarmed, self.raised = alarmed, list[Raised]()

    def on_step(self, event: Event) -> None:
        self.raised = self.follow(event.step, event.metrics)
        event.log_own({ACTIVE: float(sum(state.holds for state in self.states.values()))})

    def on_log(self, event: Event) -> None:
        self.alarmed(event.step, "alarm", self.raised)
        without = self.states["no_reward"].beyond
        if without >= STEPS_WITHOUT_REWARD:
            raise TrainingError(
                f"step {event.step}: no completion of the last {without} steps had a reward (every "
                "function returned None)."
            )

    def follow(self, step: int, metrics: Metrics) -> list[Raised]:
        """Follows one step; returns the alarms whose episodes begin, each with its sentence."""
        raised = []
        for alarm in self.alarms:
            rule = repr(alarm.rule)
            if alarm.name not in self.states or self.states[alarm.name].rule != rule:
                self.states[alarm.name] = WatchState(rule)
            text = alarm.follow(self.states[alarm.name], metrics)
            if text is not None:
                raised.append(Raised(alarm.name, f"step {step}: {text}"))
        return raised

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Returns the state for a checkpoint, as plain values."""
        return {name: asdict(state) for name, state in self.states.items()}

    def load_state_dict(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Restores a state that `state_dict` returned; an alarm that has gone is dropped."""
        names = {alarm.name for alarm in self.alarms}
        self.states = {name: WatchState(**state) for name, state in saved.items() if name in names}


def _of_rewards(recipe: Recipe) -> Iterator[Watch]:
    yield Watch(
        "no_reward",
        Level(above=1.0),
        lambda metrics: float(math.isnan(metrics["reward"])),
        "no completion has a reward: each function returned None or failed; nothing is learned. "
        "Look at the columns that they read.",
    )
    yield Watch(
        "equal_rewards",
        Level(above=1.0, steps=EQUAL_STEPS),
        lambda metrics: (
            None if math.isnan(metrics["reward"]) else metrics.get("frac_zero_advantage")
        ),
        f"for {EQUAL_STEPS} steps all completions of each prompt had the same reward, so that no "
        "completion had an advantage; nothing is learned.",
    )
    for name in recipe.reward:
        for kind, what in (("timeouts", "did not end in time"), ("errors", "failed")):
            yield Watch(
                f"reward_calls/{name}/{kind}",
                Level(above=1.0),
                f"rewards/{name}/{kind}",
                f"{{value:g}} calls of the reward {name} {what}; rewards/{name}/{kind} in "
                "metrics.jsonl counts them.",
            )
    weighted = [name for name, reward in recipe.reward.items() if reward.weight]
    for name in weighted if len(weighted) > 1 else ():
        yield Watch(
            f"one_reward/{name}",
            Level(above=ONE_REWARD, steps=ONE_REWARD_STEPS),
            _share_of(name, weighted),
            f"the reward {name} carries {{value:.0%}} of the advantage's variance, and more than "
            f"{ONE_REWARD:.0%} in each of the last {ONE_REWARD_STEPS} steps in which others varied "
            "too: these teach next to nothing. Change the weights, or use advantage=gdpo.",
        )
        yield Watch(
            f"constant_reward/{name}",
            Level(below=0.0, steps=CONSTANT_STEPS),
            f"rewards/{name}/std",
            f"the reward {name} has had the same value for all completions of each of the last "
            f"{CONSTANT_STEPS} steps: it teaches nothing.",
        )


def _share_of(name: str, weighted: Sequence[str]) -> Value:
    """Returns a reward's share of the advantage's variance; None if fewer than two rewards vary."""

    def share(metrics: Metrics) -> float | None:
        varied = sum(metrics.get(f"rewards/{other}/std", 0.0) > 0 for other in weighted)
        return metrics.get(f"rewards/{name}/advantage_share") if varied > 1 else None

    return share


def _of_completions() -> Iterator[Watch]:
    yield Watch(
        "length",
        Shift(factor=2.0, added=4.0, least=5),
        "completions/mean_length",
        "completions have a mean length of {value:.0f} tokens, {usual:.0f} in the median of the "
        "steps before: look at the newest ones. A reward that pays for length does this, and a "
        "policy that no longer ends its text.",
    )
    yield Watch(
        "truncated",
        Shift(factor=1.0, added=0.25, least=5),
        "completions/clipped_ratio",
        "{value:.0%} of the completions are cut off by generation.max_completion_tokens, "
        "{usual:.0%} in the median of the steps before.",
    )
    yield Watch(
        "mostly_truncated",
        Level(above=0.9, steps=MOSTLY_TRUNCATED_STEPS),
        "completions/clipped_ratio",
        "{value:.0%} of the completions are cut off by generation.max_completion_tokens, and at "
        f"least nine of ten in each of the last {MOSTLY_TRUNCATED_STEPS} steps: the model does not "
        "end its text, or the limit is too short for it.",
    )
    yield Watch(
        "entropy",
        Shift(factor=0.1, window=3, first=True, least=3, steps=2),
        "entropy",
        "the entropy is {value:.3g} nats a token, less than a tenth of the {usual:.3g} that the "
        "run began with: completions of a prompt are nearly the same. A lower learning rate, "
        "loss.epsilon_high or loss.entropy_coef keeps it up.",
    )


def _of_updates() -> Iterator[Watch]:
    yield Watch(
        "clip_ratio",
        Level(above=0.3, steps=3),
        "clip_ratio/region_mean",
        "{value:.0%} of the tokens that train are clipped: the updates of a step move the policy "
        "too far. Lower optimizer.learning_rate, or take fewer updates a step.",
    )
    yield Watch(
        "mismatch",
        Shift(factor=3.0, added=0.01, window=20, first=True, steps=5),
        lambda metrics: max((metrics[key] for key in MISMATCH if key in metrics), default=None),
        "the sampler's log-probabilities differ from the trainer's by {value:.3g} in the mean, "
        "{usual:.3g} in the first steps: the samples come less and less from the policy that is "
        "trained. Look at the weight check, prefetch_steps and the sampler's data type.",
    )
    yield Watch(
        "grad_norm",
        # Against the start: in a converged run, single values as large as there are normal.
        Shift(factor=10.0, window=20, first=True, least=20, steps=1),
        "grad_norm",
        "the gradient's norm is {value:.3g}, {usual:.3g} in the median of the first steps.",
    )
