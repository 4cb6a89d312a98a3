"""Judges whether a run can learn from the numbers of a probe, suggests settings, and prints both.

A finding is of one of two kinds:

    stops    the run cannot learn as it stands: no group has anything to learn from, or an error
             ends it
    slows    it can learn, and would learn more or sooner with other settings
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_cli.config.interpolation import masked
from grpo_cli.config.recipe import Recipe
from grpo_cli.errors import counted
from grpo_cli.evaluation.estimates import Estimate

LOW_SIGNAL = 0.5  # share of groups with a signal below which larger groups are considered
GAIN = 0.1  # least gain in that share for a larger group to be suggested
MANY_TRUNCATED = 0.3
ALL_TRUNCATED = 0.99
BY_ACCIDENT = 0.05  # pass rate below which truncated completions are right by accident
ALL_IDENTICAL = 0.9


@dataclass(frozen=True)
class RewardStats:
    """The numbers of one reward function."""

    mean: float | None  # None: it applied to no completion
    none: int  # number of completions without a value, failures included
    errors: int
    timeouts: int
    error: str | None  # message of the first error
    constant: float | None  # the common value, if all completions have the same
    seconds: float  # mean seconds per completion


@dataclass(frozen=True)
class Measured:
    """The numbers of a probe."""

    prompts: int
    samples: int
    completions: int
    num_generations: int  # group size of the recipe
    right: str  # name of the reward whose value 1 counts as right
    pass_rate: Estimate | None  # None if that reward has values other than 0 and 1
    reward_mean: float | None
    rates: list[tuple[int, float]]  # (row, pass rate); the mean reward if there is no pass rate
    signal: dict[int, Estimate]  # share of groups whose rewards differ, by group size
    differing: int  # number of prompts whose samples have differing rewards
    is_constant: bool  # whether all completions of all prompts have one reward
    identical: float  # share of prompts whose completions have identical tokens
    truncated: float
    stop_reasons: dict[str, float]  # share of episodes by stop reason
    failed_environments: float
    environment_error: str | None
    lengths: dict[str, float]
    rewards: dict[str, RewardStats]

    @property
    def own_size(self) -> int:
        """The recipe's group size, or the largest that was sampled."""
        return min(self.num_generations, self.samples)


@dataclass(frozen=True)
class Finding:
    """A finding of a probe, and the settings that fix it."""

    kind: str  # stops or slows
    name: str
    message: str
    settings: tuple[str, ...] = ()  # overrides for the command line


@dataclass(frozen=True)
class Verdict:
    """The conclusion of a probe."""

    findings: list[Finding]  # findings that stop the run come first
    sentence: str

    @property
    def reasons(self) -> list[str]:
        """The names of the findings that stop the run."""
        return [f.name for f in self.findings if f.kind == "stops"]

    @property
    def can_learn(self) -> bool:
        return not self.reasons


def judge(recipe: Recipe, m: Measured) -> Verdict:
    """Judges the numbers of a probe of `recipe`."""
    own = m.signal[m.own_size]
    found = [*failures(recipe, m), *signal(recipe, m)]
    found.sort(key=lambda f: f.kind != "stops")
    if found and found[0].kind == "stops":
        return Verdict(found, f"The run cannot learn as it stands: {found[0].message}")
    number = recipe.prompts_per_step
    of_a_step = f", about {own.value * number:.0f} of {number} prompts a step"
    return Verdict(
        found,
        f"The run can learn: {own.value:.2f} [{own.low:.2f}, {own.high:.2f}] of the groups of "
        f"{m.own_size} completions have rewards that differ"
        f"{'' if recipe.generation.dynamic_sampling else of_a_step}.",
    )


def failures(recipe: Recipe, m: Measured) -> Iterator[Finding]:
    """Finds failures that end a run: of rewards and of environments."""
    for name, reward in m.rewards.items():
        message = f"reward {name} failed on {reward.errors} of {m.completions} completions, "
        first = f"the first: it {reward.error}"
        if reward.errors and recipe.reward[name].on_error == "stop":
            message += f"and reward.{name}.on_error = stop; {first}"
            yield Finding("stops", "reward_error", message, (f"reward.{name}.on_error=count",))
        elif reward.errors:
            yield Finding("slows", "reward_error", f"{message}which have no value of it; {first}")
    limit = recipe.environment.max_failed_share
    if m.failed_environments > limit:
        yield Finding(
            "stops",
            "environment_error",
            f"the environments of {m.failed_environments:.0%} of the rollouts failed, more than "
            f"environment.max_failed_share = {limit:g}; the last error: {m.environment_error}",
        )


def signal(recipe: Recipe, m: Measured) -> Iterator[Finding]:
    """Finds the reason why groups have no signal, a larger group with more, and cut completions."""
    if all(r.mean is None for r in m.rewards.values()):
        if not m.failed_environments and not any(r.errors for r in m.rewards.values()):
            message = "every reward of every completion is None: no function applies to the data."
            yield Finding("stops", "no_reward", message)
        return
    of, key = recipe.generation, "generation.max_completion_tokens"
    limit = of.max_completion_tokens
    if m.stop_reasons.get("turn_tokens", 0) > m.stop_reasons.get("max_tokens", 0):
        key, limit = "episode.turn_tokens", recipe.episode.turn_tokens or limit
    size, own = m.own_size, m.signal[m.own_size]
    every = f"{m.completions} completions of {m.prompts} prompts"
    is_over_step = recipe.advantage.rule == "reinforce_pp" and (
        recipe.advantage.args.get("baseline") == "none"
    )
    trains = m.differing or (is_over_step and not m.is_constant)
    # Answers as long as the limit, such as a choice of one token, are right more often.
    is_rare = m.pass_rate is not None and m.pass_rate.value < BY_ACCIDENT
    if not trains and m.is_constant and [r.constant for r in m.rewards.values()] == [1]:
        why = (
            f"all {every} have the reward {m.reward_mean:.3g}: there is nothing left to learn, or "
        )
        yield Finding("stops", "solved", f"{why}the reward accepts everything.")
    elif not trains and m.identical > ALL_IDENTICAL:
        why = (
            f"the completions of a prompt are identical for {m.identical:.0%} of the prompts: with "
            f"generation.temperature = {of.temperature:g}, top_p = {of.top_p:g} and top_k = "
            f"{of.top_k} nothing is tried out."
        )
        varied = ("generation.temperature=1", "generation.top_p=1", "generation.top_k=0")
        yield Finding("stops", "identical", why, varied)
    elif m.truncated >= ALL_TRUNCATED and (not trains or (m.differing and is_rare)):
        right = f", and {m.pass_rate.value:.1%} of them are right" if m.pass_rate else ""
        out = "; loss.mask_truncated = true excludes them" if recipe.loss.mask_truncated else ""
        why = f"{m.truncated:.0%} of {every} reach {key} = {limit} before they end{right}{out}."
        yield Finding("stops", "truncated", why, (f"{key}={4 * limit}",))
    elif not trains:
        found = f"are all {m.reward_mean:.3g}" if m.is_constant else "differ only between prompts"
        why = (
            f"the rewards of {every} {found}. The answers may be in another column than the reward "
            "reads, the prompt may not ask for the form that the reward wants, or the model cannot "
            f"solve any of them. At most {own.high:.2f} of the groups may differ (95 % limit)."
        )
        yield Finding("stops", "no_signal", why)
    elif m.truncated > MANY_TRUNCATED:
        message = f"{m.truncated:.0%} of the completions reach {key} = {limit}."
        yield Finding("slows", "truncated", message, (f"{key}={2 * limit}",))
    if m.differing and own.value < LOW_SIGNAL:
        settings, message = [], f"only {own.value:.2f} of the groups have rewards that differ."
        larger = (n for n, s in m.signal.items() if n > size and s.value >= own.value + GAIN)
        if best := min(larger, default=None):
            settings.append(f"generation.num_generations={best}")
            message += (
                f" Raise generation.num_generations from {size} to {best}: {own.value:.2f} -> "
                f"{m.signal[best].value:.2f}."
            )
        if not of.dynamic_sampling:
            settings.append("generation.dynamic_sampling=true")
        yield Finding("slows", "low_signal", message, tuple(settings))


def lines(title: str, m: Measured, verdict: Verdict) -> Iterator[str]:
    """Yields the numbers of a probe, its verdict with settings, and completions."""
    yield f"{title}: {m.prompts} prompts x {m.samples} completions"
    yield "share of groups whose rewards differ [95 % interval]:"
    for size, s in sorted(m.signal.items()):
        note = "  <- generation.num_generations" if size == m.num_generations else ""
        yield f"  groups of {size:<3} {s.value:.3f} [{s.low:.3f}, {s.high:.3f}]{note}"
    if (rate := m.pass_rate) is not None:
        solved, hopeless = (sum(rate == end for _, rate in m.rates) for end in (1, 0))
        yield (
            f"pass rate     {rate.value:.3f} [{rate.low:.3f}, {rate.high:.3f}] ({m.right}); "
            f"{counted(solved, 'prompt')} always solved, {hopeless} never"
        )
    for name, r in m.rewards.items():
        mean = "none" if r.mean is None else f"{r.mean:.3f}"
        same = "" if r.constant is None else ", the same for every completion"
        yield (
            f"reward        {name} {mean}{same}; {r.none} without a value, {r.errors} raised, "
            f"{r.timeouts} late, {r.seconds:.2g} s a completion"
        )
    quantiles = "  ".join(f"{name} {value:.0f}" for name, value in m.lengths.items())
    yield f"length        {quantiles} tokens"
    yield (
        f"endings       {m.truncated:.1%} truncated; all identical for {m.identical:.1%} of prompts"
    )
    if m.stop_reasons:
        reasons = ", ".join(f"{name} {share:.1%}" for name, share in m.stop_reasons.items())
        yield f"episodes      {reasons}"
    yield f"\n{masked(verdict.sentence)}"
    for number, finding in enumerate(verdict.findings):
        change = f"Change: {' '.join(finding.settings)}" if finding.settings else ""
        # The sentence already contains the first finding that stops the run.
        text = finding.message if number or finding.kind != "stops" else ""
        if text or change:
            yield f"- {masked(f'{text} {change}'.strip())}"
