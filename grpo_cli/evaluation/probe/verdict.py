"""Judges whether a run can learn from the numbers of a probe, suggests settings, and prints both.

Each check yields findings of one of two kinds:

    stops    the run cannot learn as it stands: no group has anything to learn from, or an error
             ends it
    slows    it can learn, and would learn more or sooner with other settings
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from grpo_cli.config.interpolation import masked
from grpo_cli.config.schedules import at_step
from grpo_cli.config.schema import Recipe
from grpo_cli.errors import listed
from grpo_cli.evaluation.estimates import Estimate
from grpo_cli.evaluation.probe.signal import SignalShare
from grpo_cli.models.self_check import TIMES

LOW_SIGNAL = 0.5  # share of groups with a signal below which larger groups are considered
GAIN = 0.1  # least gain in that share for a larger group to be suggested
MANY_TRUNCATED = 0.3
ALL_TRUNCATED = 0.99
BY_ACCIDENT = 0.05  # pass rate below which truncated completions are right by accident
ALL_IDENTICAL = 0.9
MISMATCH = 0.05  # nats a token; in 16 bit at least `TIMES` the trainer's own rounding


@dataclass(frozen=True)
class RewardStats:
    """The numbers of one reward function."""

    weight: float
    mean: float | None  # None: it applied to no completion
    none: int  # number of completions without a value, failures included
    errors: int
    timeouts: int
    error: str | None  # message of the first error
    on_error: str  # the recipe's `on_error`
    constant: float | None  # the common value, if all completions have the same
    seconds: float  # mean seconds per completion


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
    stop_reasons: dict[str, float]  # share of episodes by stop reason
    failed_environments: float
    environment_error: str | None
    lengths: dict[str, float]
    rewards: dict[str, RewardStats]
    mismatch: Mismatch | None
    examples: list[Example]


@dataclass(frozen=True)
class Finding:
    """A finding of a probe, and the settings that fix it."""

    kind: str  # stops or slows
    name: str
    message: str
    settings: tuple[str, ...] = ()  # words of the command line


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
        """Whether no finding stops the run."""
        return not self.reasons


def judge(recipe: Recipe, m: Measured) -> Verdict:
    """Judges the numbers of a probe of `recipe`."""
    recipe, own = at_step(recipe, 0)[0], m.own_signal
    checks = (failures, signal, endings, values)
    found = [finding for check in checks for finding in check(recipe, m)]
    found.sort(key=lambda f: f.kind != "stops")
    if found and found[0].kind == "stops":
        return Verdict(found, f"The run cannot learn as it stands: {found[0].message}")
    number = recipe.prompts_per_step
    of_a_step = f", about {own.share * number:.0f} of {number} prompts a step"
    return Verdict(
        found,
        f"The run can learn: {own.share:.2f} [{own.low:.2f}, {own.high:.2f}] of the groups of "
        f"{own.size} completions have rewards that differ"
        f"{'' if recipe.generation.dynamic_sampling else of_a_step}.",
    )


def failures(recipe: Recipe, m: Measured) -> Iterator[Finding]:
    """Finds failures that end a run: of rewards, of environments, of the sampler."""
    for name, reward in m.rewards.items():
        message = f"reward {name} failed on {reward.errors} of {m.completions} completions, "
        first = f"the first: it {reward.error}"
        if reward.errors and reward.on_error == "stop":
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
    gap, most = m.mismatch, recipe.generation.max_logp_difference
    if gap is not None and gap.mean > max(MISMATCH, TIMES * gap.rounding):
        changed = recipe.generation.changed_by
        message = (
            f"the sampler's log-probabilities differ from the trainer's by {gap.mean:.3g} nats a "
            f"token in the mean, {gap.max:.3g} at most"
        )
        if changed:
            message += f"; {listed(changed)} (of generation) change what is sampled"
        if stops := most is not None and gap.mean > most:
            message += f"; above generation.max_logp_difference = {most:g} a run stops"
        settings = () if changed else ("loss.sampling_correction=token_truncate",)
        yield Finding("stops" if stops else "slows", "mismatch", message, settings)


def signal(recipe: Recipe, m: Measured) -> Iterator[Finding]:
    """Finds the reason why groups have no signal, or a group size with more signal."""
    if all(r.mean is None for r in m.rewards.values()):
        if not m.failed_environments and not any(r.errors for r in m.rewards.values()):
            message = "every reward of every completion is None: no function applies to the data."
            yield Finding("stops", "no_reward", message)
        return
    rule, args = recipe.advantage.rule, recipe.advantage.args
    is_over_step = rule == "reinforce_pp" and args.get("baseline") == "none"
    if not m.differing and is_over_step and not m.is_constant:
        return  # trains on differences between prompts
    if not m.differing:
        yield Finding("stops", *without_signal(recipe, m))
    elif never_ends(m):
        assert m.pass_rate is not None, "checked"
        key, limit = limit_of(recipe, m)
        yield Finding(
            "stops",
            "truncated",
            f"{m.truncated:.0%} of {m.completions} completions of {m.prompts} prompts reach {key} "
            f"= {limit} before they end, and {m.pass_rate.value:.1%} of them are right: the "
            "rewards differ by accidents of what was cut off.",
            (f"{key}={4 * limit}",),
        )
    if m.differing and (own := m.own_signal).share < LOW_SIGNAL:
        settings, message = [], f"only {own.share:.2f} of the groups have rewards that differ."
        larger = (s for s in m.signal if s.size > own.size and s.share >= own.share + GAIN)
        if best := next(larger, None):
            settings.append(f"generation.num_generations={best.size}")
            message += (
                f" Raise generation.num_generations from {own.size} to {best.size}: "
                f"{own.share:.2f} -> {best.share:.2f}."
            )
        if not recipe.generation.dynamic_sampling:
            settings.append("generation.dynamic_sampling=true")
        yield Finding("slows", "low_signal", message, tuple(settings))


def without_signal(recipe: Recipe, m: Measured) -> tuple[str, str, tuple[str, ...]]:
    """Returns why no group has rewards that differ: name, message, settings."""
    of, (key, limit) = recipe.generation, limit_of(recipe, m)
    longer = (f"{key}={4 * limit}",)
    rare = f" At most {m.own_signal.high:.2f} of the groups may differ (95 % limit)."
    every = f"{m.completions} completions of {m.prompts} prompts"
    if m.excluded == 1:
        why = f"all {every} reach {key} = {limit}, and loss.mask_truncated = true leaves them out."
        return "truncated", why, longer
    only = [r.constant for r in m.rewards.values()]
    if m.is_constant and only == [1]:
        why = (
            f"all {every} have the reward {m.reward_mean:.3g}: there is nothing left to learn, or "
            "the reward accepts everything."
        )
        return "solved", why, ()
    if m.identical > ALL_IDENTICAL:
        why = (
            f"the completions of a prompt are identical for {m.identical:.0%} of the prompts: with "
            f"generation.temperature = {of.temperature:g}, top_p = {of.top_p:g} and top_k = "
            f"{of.top_k} nothing is tried out."
        )
        varied = ("generation.temperature=1", "generation.top_p=1", "generation.top_k=0")
        return "identical", why, varied
    if m.truncated >= ALL_TRUNCATED:
        why = (
            f"{m.truncated:.0%} of {every} reach {key} = {limit} before they end, and no rewards "
            f"of a prompt differ."
        )
        return "truncated", why, longer
    if m.is_constant:
        why = (
            f"all {every} have the reward {m.reward_mean:.3g}. The answers may be in another "
            "column than the reward reads, the prompt may not ask for the form that the reward "
            f"wants, or the model cannot solve any of them.{rare}"
        )
        return "constant", why, ()
    why = (
        f"the rewards of {every} differ between prompts and never between the completions of one: "
        f"the reward does not depend on the completion, or its value never changes.{rare}"
    )
    return "depends_on_prompt", why, ()


def never_ends(m: Measured) -> bool:
    """Returns whether all completions are truncated, and right only by accident.

    Tasks whose answer is as long as the limit, such as a choice of one token, pass more often.
    """
    is_rare = m.pass_rate is not None and m.pass_rate.value < BY_ACCIDENT
    return m.truncated >= ALL_TRUNCATED and is_rare


def limit_of(recipe: Recipe, m: Measured) -> tuple[str, int]:
    """Returns the key and the value of the limit that truncates completions."""
    reasons, of_turns = m.stop_reasons, recipe.episode.turn_tokens
    if of_turns is not None and reasons.get("turn_tokens", 0) > reasons.get("max_tokens", 0):
        return "episode.turn_tokens", of_turns
    return "generation.max_completion_tokens", recipe.generation.max_completion_tokens


def endings(recipe: Recipe, m: Measured) -> Iterator[Finding]:
    """Finds truncated completions, unless `signal` has reported them."""
    key, limit = limit_of(recipe, m)
    is_reported = m.truncated >= ALL_TRUNCATED and (never_ends(m) or not m.differing)
    if m.truncated > MANY_TRUNCATED and not is_reported:
        message = f"{m.truncated:.0%} of the completions reach {key} = {limit}."
        yield Finding("slows", "truncated", message, (f"{key}={2 * limit}",))


def values(recipe: Recipe, m: Measured) -> Iterator[Finding]:
    """Finds rewards that are constant or exceed their timeout."""
    for name, reward in m.rewards.items():
        if len(m.rewards) > 1 and reward.constant is not None and reward.weight:
            yield Finding(
                "slows",
                "constant_reward",
                f"reward {name} is {reward.constant:.3g} for every completion: it teaches nothing.",
            )
        if reward.timeouts:
            yield Finding(
                "slows",
                "timeouts",
                f"reward {name} ran out of time on {reward.timeouts} of {m.completions} "
                f"completions; raise reward.{name}.timeout.",
            )


def show(console: Console, title: str, m: Measured, verdict: Verdict) -> None:
    """Prints all numbers of a probe and its verdict."""
    console.print(f"{title}: {m.prompts} prompts x {m.samples} completions", markup=False)
    table = Table(title="share of groups whose rewards differ")
    for head in ("group size", "share", "95 % interval"):
        table.add_column(head, justify="right")
    table.add_column("", no_wrap=True)
    for size, s in sorted({s.size: s for s in [*m.signal, m.own_signal]}.items()):
        note = "<- generation.num_generations" if size == m.num_generations else ""
        table.add_row(str(size), f"{s.share:.3f}", f"{s.low:.3f} to {s.high:.3f}", note)
    console.print(table)
    table = Table("reward", title="rewards")
    for head in ("mean", "without a value", "raised", "late", "a completion"):
        table.add_column(head, justify="right")
    for name, r in m.rewards.items():
        mean = "none" if r.mean is None else f"{r.mean:.3f}"
        counts = (str(n) for n in (r.none, r.errors, r.timeouts))
        table.add_row(name, mean, *counts, f"{r.seconds:.2g} s")
    console.print(table)
    for line in [*lines(m), "", *verdict_lines(m, verdict)]:
        console.print(line, markup=False, soft_wrap=True)


def lines(m: Measured) -> Iterator[str]:
    """Yields lines for the numbers that are not in a table."""
    if (rate := m.pass_rate) is not None:
        solved, hopeless = (sum(rate == end for _, rate in m.rates) for end in (1, 0))
        yield (
            f"pass rate     {rate.value:.3f} [{rate.low:.3f}, {rate.high:.3f}] ({m.right}); "
            f"{solved} prompts always solved, {hopeless} never"
        )
    quantiles = "  ".join(f"{name} {value:.0f}" for name, value in m.lengths.items())
    yield f"length        {quantiles} tokens"
    yield (
        f"endings       {m.truncated:.1%} truncated; all identical for {m.identical:.1%} of prompts"
    )
    if m.stop_reasons:
        reasons = ", ".join(f"{name} {share:.1%}" for name, share in m.stop_reasons.items())
        yield f"episodes      {reasons}"
    if (gap := m.mismatch) is not None:
        yield (
            f"log-probs     |trainer - sampler| is {gap.mean:.2g} nats a token in the mean, "
            f"{gap.max:.2g} at most ({gap.tokens:,} tokens)"
        )


def verdict_lines(m: Measured, verdict: Verdict) -> Iterator[str]:
    """Yields the verdict: a sentence, each finding with its settings, and completions."""
    yield masked(verdict.sentence)
    for number, finding in enumerate(verdict.findings):
        change = f"Change: {' '.join(finding.settings)}" if finding.settings else ""
        # The sentence already contains the first finding that stops the run.
        text = finding.message if number or finding.kind != "stops" else ""
        if text or change:
            yield f"- {masked(f'{text} {change}'.strip())}"
    for example in () if verdict.can_learn else m.examples:
        values = example.rewards.items()
        shown = (f"{name} {'none' if v is None else f'{v:.3g}'}" for name, v in values)
        yield masked(f"  row {example.row}: prompt {example.prompt!r}")
        yield masked(f"    completion {example.completion!r} -> {', '.join(shown)}")
