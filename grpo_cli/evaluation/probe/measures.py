"""Computes the numbers of a probe from its scored groups."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_cli.algorithm.objective import rule_function
from grpo_cli.algorithm.variants import parameters
from grpo_cli.config.schedules import at_step
from grpo_cli.config.schema import Recipe
from grpo_cli.evaluation.estimates import Estimate, quantile
from grpo_cli.evaluation.probe.samples import Scored, Size
from grpo_cli.evaluation.probe.signal import (
    SIZES,
    RewardCounts,
    SignalShare,
    pass_rate,
    signal_share,
)
from grpo_cli.records import Completion, Group, Rollout

LENGTHS = (0.1, 0.5, 0.9, 0.99)  # quantiles
EXAMPLES = 3  # completions shown in a verdict
SHOWN = 200  # longest text shown, in characters


@dataclass(frozen=True)
class RewardStats:
    """The numbers of one reward function."""

    weight: float
    mean: float | None
    applied: int  # number of completions with a value
    none: int  # number of completions without a value, failures included
    errors: int
    timeouts: int
    error: str | None  # message of the first error
    on_error: str  # the recipe's `on_error`
    constant: float | None  # the common value, if all completions have the same
    seconds_p99: float  # 99th percentile of the seconds per completion

    @property
    def stops_the_run(self) -> bool:
        """Whether a failure of the function ends the run."""
        return self.errors > 0 and self.on_error == "stop"


@dataclass(frozen=True)
class Mismatch:
    """The difference between the trainer's and the sampler's log-probabilities, in nats."""

    mean: float
    max: float
    tokens: int
    rounding: float = 0.0  # mean 16-bit rounding error of the trainer's log-probabilities


@dataclass(frozen=True)
class Example:
    """A completion shown in a verdict, and its rewards."""

    row: int
    prompt: str
    completion: str
    rewards: dict[str, float | None]


@dataclass(frozen=True)
class Measured:
    """The numbers of a probe."""

    prompts: int
    samples: int
    completions: int
    num_generations: int  # group size of the recipe
    right: str  # name of the reward whose value 1 counts as right
    is_graded: bool  # whether that reward has values other than 0 and 1
    pass_rate: Estimate | None  # None for a graded reward
    reward_mean: float | None
    rates: list[tuple[int, float]]  # (row, pass rate); the mean reward if the reward is graded
    signal: list[SignalShare]  # one entry per group size
    own_signal: SignalShare  # at the recipe's group size
    differing: int  # number of prompts whose samples have differing rewards
    is_constant: bool  # whether all completions of all prompts have one reward
    identical: float  # share of prompts whose completions have identical tokens
    excluded: float  # share of completions excluded by loss.mask_truncated
    truncated: float
    eos: float
    stop_reasons: dict[str, float]  # share of episodes by stop reason
    failed_environments: float
    environment_error: str | None
    lengths: dict[str, float]
    rewards: dict[str, RewardStats]
    mismatch: Mismatch | None
    sampling_seconds: float
    scoring_seconds: float  # scoring time after sampling has ended
    examples: list[Example]


def measure(
    recipe: Recipe,
    scored: Scored,
    size: Size,
    eos_ids: Collection[int],
) -> Measured:
    """Computes the numbers of a probe.

    Args:
        eos_ids: tokens that end a completion.
    """
    recipe = at_step(recipe, 0)[0]
    group_size = recipe.generation.num_generations
    right = next(n for n in (recipe.eval.accuracy, *recipe.reward) if n in recipe.reward)
    rollouts = scored.rollouts
    values = [v for r in rollouts if (v := r.reward_parts[right]) is not None]
    is_graded = not {*values} <= {0.0, 1.0}
    keys = [[signal_key(recipe, r) for r in g.rollouts] for g in scored.groups]
    counts = [
        RewardCounts.of(own, [r.excluded for r in g.rollouts])
        for own, g in zip(keys, scored.groups, strict=True)
    ]
    rates = [(g.prompt.row, _rate(g, right, is_graded)) for g in scored.groups]
    known = [(row, rate) for row, rate in rates if not math.isnan(rate)]
    total = [r.reward for r in rollouts if r.is_scored]
    lengths = sorted(r.completion.sampled_tokens for r in rollouts)
    failed = [r.completion for r in rollouts if r.completion.environment_failed]
    stops = Counter(end_of(r.completion, eos_ids) for r in rollouts)
    every_key = {key for own in keys for key in own}
    return Measured(
        prompts=len(scored.groups),
        samples=size.samples,
        completions=len(rollouts),
        num_generations=group_size,
        right=right,
        is_graded=is_graded,
        pass_rate=None if is_graded or not known else pass_rate(_rights(scored.groups, right)),
        reward_mean=math.fsum(total) / len(total) if total else None,
        rates=known,
        signal=[signal_share(counts, n) for n in SIZES if n <= size.samples],
        own_signal=signal_share(counts, min(group_size, size.samples)),
        differing=sum(c.without_signal(c.completions) < 1 for c in counts),
        is_constant=len(every_key) == 1,
        identical=_share(len({tuple(r.completion.ids) for r in g.rollouts}) == 1
                         for g in scored.groups),
        excluded=_share(r.excluded for r in rollouts),
        truncated=stops["length"] / len(rollouts),
        eos=stops["eos"] / len(rollouts),
        stop_reasons=_shares(r.completion.stop_reason for r in rollouts),
        failed_environments=len(failed) / len(rollouts),
        environment_error=(failed[-1].env_error or failed[-1].stop_reason) if failed else None,
        lengths={f"p{100 * q:g}": float(quantile(lengths, q)) for q in LENGTHS}
        | {"mean": sum(lengths) / len(lengths), "max": float(lengths[-1])},
        rewards={name: _stats(recipe, scored, name) for name in recipe.reward},
        mismatch=_mismatch(scored.gaps, scored.rounding),
        sampling_seconds=scored.sampling_seconds,
        scoring_seconds=scored.scoring_seconds,
        examples=[_example(r) for r in _worth_showing(scored.groups)],
    )  # fmt: skip


def signal_key(recipe: Recipe, rollout: Rollout) -> Hashable | None:
    """Returns the reward key of a rollout; a group whose keys are equal has zero advantages.

    The key holds the reward (or each function's reward, for rules that normalise them separately)
    and the rewarded steps. It is None if no reward function applied.
    """
    if not rollout.is_scored:
        return None
    steps = tuple(
        (name, tuple(value for _, value in of)) for name, of in rollout.step_rewards.items()
    )
    if "parts" in parameters(rule_function(recipe.advantage))[0]:
        return tuple(rollout.reward_parts.items()), steps
    return rollout.outcome_reward, steps


def end_of(completion: Completion, eos_ids: Collection[int]) -> str:
    """Returns the way a completion ended: `length`, `eos` or `other`."""
    if completion.finish_reason == "length":
        return "length"
    own = [i for i, s in zip(completion.ids, completion.sampled_mask.tolist(), strict=True) if s]
    return "eos" if own and own[-1] in eos_ids else "other"


def _rights(groups: Sequence[Group], right: str) -> list[list[bool]]:
    found = [
        [v == 1 for r in g.rollouts if (v := r.reward_parts[right]) is not None] for g in groups
    ]
    return [own for own in found if own]


def _rate(group: Group, right: str, is_graded: bool) -> float:
    """Returns a prompt's pass rate, or its mean reward if graded; NaN without rewards."""
    if is_graded:
        values = [r.reward for r in group.rollouts if r.is_scored]
    else:
        values = [v for r in group.rollouts if (v := r.reward_parts[right]) is not None]
    return math.fsum(values) / len(values) if values else math.nan


def _stats(recipe: Recipe, scored: Scored, name: str) -> RewardStats:
    results, config = scored.results[name], recipe.reward[name]
    values = [v.value for v in results if v.value is not None]
    failures = [v for v in results if v.error is not None and not v.timed_out]
    seconds = sorted(v.seconds for v in results if v.seconds > 0) or [0.0]  # 0: cached
    return RewardStats(
        weight=config.weight,
        mean=math.fsum(values) / len(values) if values else None,
        applied=len(values),
        none=len(results) - len(values),
        errors=len(failures),
        timeouts=sum(v.timed_out for v in results),
        error=failures[0].error if failures else None,
        on_error=config.on_error,
        constant=values[0] if values and len({*values}) == 1 else None,
        seconds_p99=quantile(seconds, 0.99),
    )


def _mismatch(gaps: Sequence[float], rounding: float) -> Mismatch | None:
    if not gaps:
        return None
    return Mismatch(math.fsum(gaps) / len(gaps), max(gaps), len(gaps), rounding)


def _worth_showing(groups: Sequence[Group]) -> list[Rollout]:
    """Returns the first completion of `EXAMPLES` evenly spaced groups."""
    step = max(1, len(groups) // EXAMPLES)
    return [g.rollouts[0] for g in groups[::step][:EXAMPLES]]


def _example(rollout: Rollout) -> Example:
    prompt = rollout.prompt
    text = prompt.text if isinstance(prompt.text, str) else str(prompt.text[-1]["content"])
    return Example(
        row=prompt.row,
        prompt=shortened(text, from_end=True),
        completion=shortened(rollout.text),
        rewards=dict(rollout.reward_parts),
    )


def shortened(text: str, *, from_end: bool = False) -> str:
    """Truncates a text to `SHOWN` characters, at its end or at its beginning."""
    if len(text) <= SHOWN:
        return text
    return "…" + text[-SHOWN + 1 :] if from_end else text[: SHOWN - 1] + "…"


def _share(flags: Iterable[bool]) -> float:
    found = [*flags]
    return sum(found) / len(found) if found else 0.0


def _shares(names: Iterable[str]) -> dict[str, float]:
    counts = Counter(filter(None, names))
    total = sum(counts.values())
    return {name: count / total for name, count in counts.most_common()}


def as_data(measured: Measured) -> dict[str, Any]:
    """Converts the numbers to JSON values; NaN and infinity become null."""
    return _plain(dataclasses.asdict(measured))  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
