"""Judges whether a run can learn, and suggests settings to change.

Each check returns findings of one of three kinds:

    stops    the run cannot learn as it stands: no group has anything to learn from, or an error
             ends it
    slows    it can learn, and would learn more or sooner with other settings
    note     something that may be intended, or not
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from grpo_cli.config.schedules import at_step
from grpo_cli.config.schema import Recipe
from grpo_cli.errors import listed
from grpo_cli.evaluation.probe.measures import Measured
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
class Finding:
    """A finding of a probe, and the settings that fix it."""

    kind: str  # stops, slows or note
    name: str
    message: str
    settings: tuple[str, ...] = ()  # words of the command line
    shows_examples: bool = False


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
    recipe = at_step(recipe, 0)[0]
    found = [finding for check in CHECKS for finding in check(recipe, m)]
    found.sort(key=lambda f: ("stops", "slows", "note").index(f.kind))
    stopping = [f for f in found if f.kind == "stops"]
    own = m.own_signal
    if stopping:
        return Verdict(found, f"The run cannot learn as it stands: {stopping[0].message}")
    return Verdict(
        found,
        f"The run can learn: {share_in_words(own)} of the groups of {own.size} completions "
        f"have rewards that differ{_a_step(recipe, own)}.",
    )


def _a_step(recipe: Recipe, own: SignalShare) -> str:
    wanted = recipe.prompts_per_step
    if recipe.generation.dynamic_sampling:
        return ""
    return f", about {own.share * wanted:.0f} of {wanted} prompts a step"


def share_in_words(found: SignalShare) -> str:
    """Formats a share with its interval as text."""
    return f"{found.share:.2f} [{found.low:.2f}, {found.high:.2f}]"


def errors(recipe: Recipe, m: Measured) -> Iterator[Finding]:
    """Finds failures that end a run: of rewards, of environments, of the sampler."""
    for name, reward in m.rewards.items():
        if reward.stops_the_run:
            yield Finding(
                "stops",
                "reward_error",
                f"reward {name} failed on {reward.errors} of {m.completions} completions, and "
                f"reward.{name}.on_error = stop; the first: it {reward.error}",
                (f"reward.{name}.on_error=count",),
            )
        elif reward.errors:
            yield Finding(
                "slows",
                "reward_error",
                f"reward {name} failed on {reward.errors} of {m.completions} completions, which "
                f"have no value of it; the first: it {reward.error}",
            )
    limit = recipe.environment.max_failed_share
    if m.failed_environments > limit:
        yield Finding(
            "stops",
            "environment_error",
            f"the environments of {m.failed_environments:.0%} of the rollouts failed, more than "
            f"environment.max_failed_share = {limit:g}; the last error: {m.environment_error}",
        )
    gap = m.mismatch
    most = recipe.generation.max_logp_difference
    if gap is not None and gap.mean > max(MISMATCH, TIMES * gap.rounding):
        stops = most is not None and gap.mean > most
        changed = recipe.generation.changed_by
        by = f"; {listed(changed)} (of generation) change what is sampled" if changed else ""
        yield Finding(
            "stops" if stops else "slows",
            "mismatch",
            f"the sampler's log-probabilities differ from the trainer's by {gap.mean:.3g} nats a "
            f"token in the mean, {gap.max:.3g} at most{by}"
            + (f"; above generation.max_logp_difference = {most:g} a run stops" if stops else ""),
            () if changed else ("loss.sampling_correction=token_truncate",),
        )


def signal(recipe: Recipe, m: Measured) -> Iterator[Finding]:
    """Finds the reason why groups have no signal, or a group size with more signal."""
    if not any(r.applied for r in m.rewards.values()):
        if not m.failed_environments and not any(r.errors for r in m.rewards.values()):
            yield Finding(
                "stops",
                "no_reward",
                "every reward of every completion is None: no function applies to the data.",
                shows_examples=True,
            )
        return
    rule, args = recipe.advantage.rule, recipe.advantage.args
    is_over_step = rule == "reinforce_pp" and args.get("baseline") == "none"
    if m.differing:
        yield from _never_ends(recipe, m)
        yield from _group_size(recipe, m)
        return
    if is_over_step and not m.is_constant:
        yield Finding(
            "note",
            "between_prompts",
            "the rewards of a prompt's completions are all equal, and only differ between prompts; "
            "with advantage.args.baseline = none the run trains on that.",
        )
        return
    yield _without_signal(recipe, m)


def _without_signal(recipe: Recipe, m: Measured) -> Finding:
    """Returns the reason why no group has rewards that differ."""
    of, (key, limit) = recipe.generation, limit_of(recipe, m)
    rare = f" At most {m.own_signal.high:.2f} of the groups may differ (95 % limit)."
    every = f"{m.completions} completions of {m.prompts} prompts"
    if m.excluded == 1:
        return Finding(
            "stops",
            "truncated",
            f"all {every} reach {key} = {limit}, and loss.mask_truncated = true leaves them out.",
            (f"{key}={4 * limit}",),
            True,
        )
    only = next((r.constant for r in m.rewards.values()), None)
    if m.is_constant and m.reward_mean is not None and only == 1 and len(m.rewards) == 1:
        return Finding(
            "stops",
            "solved",
            f"all {every} have the reward {m.reward_mean:.3g}: there is nothing left to learn, or "
            "the reward accepts everything.",
            (),
            True,
        )
    if m.identical > ALL_IDENTICAL:
        return Finding(
            "stops",
            "identical",
            f"the completions of a prompt are identical for {m.identical:.0%} of the prompts: with "
            f"generation.temperature = {of.temperature:g}, top_p = {of.top_p:g} and top_k = "
            f"{of.top_k} nothing is tried out.",
            ("generation.temperature=1", "generation.top_p=1", "generation.top_k=0"),
        )
    if m.truncated >= ALL_TRUNCATED:
        return Finding(
            "stops",
            "truncated",
            f"{m.truncated:.0%} of {every} reach {key} = {limit} before they end, and no rewards "
            f"of a prompt differ{_constant(m)}.",
            (f"{key}={4 * limit}",),
            True,
        )
    if m.is_constant:
        return Finding(
            "stops",
            "constant",
            f"all {every} have the reward {m.reward_mean:.3g}. The answers may be in another "
            "column than the reward reads, the prompt may not ask for the form that the reward "
            f"wants, or the model cannot solve any of them.{rare}",
            (),
            True,
        )
    return Finding(
        "stops",
        "depends_on_prompt",
        f"the rewards of {every} differ between prompts and never between the completions of one: "
        f"the reward does not depend on the completion, or its value never changes.{rare}",
        (),
        True,
    )


def _never_ends(recipe: Recipe, m: Measured) -> Iterator[Finding]:
    """Finds runs whose completions are all truncated, and right only by accident.

    Tasks whose answer is as long as the limit, such as a choice of one token, pass more often.
    """
    if m.truncated < ALL_TRUNCATED or m.pass_rate is None or m.pass_rate.value >= BY_ACCIDENT:
        return
    key, limit = limit_of(recipe, m)
    yield Finding(
        "stops",
        "truncated",
        f"{m.truncated:.0%} of {m.completions} completions of {m.prompts} prompts reach {key} = "
        f"{limit} before they end, and {m.pass_rate.value:.1%} of them are right: the rewards "
        "differ by accidents of what was cut off.",
        (f"{key}={4 * limit}",),
        True,
    )


def _constant(m: Measured) -> str:
    return f": all are {m.reward_mean:.3g}" if m.is_constant and m.reward_mean is not None else ""


def _group_size(recipe: Recipe, m: Measured) -> Iterator[Finding]:
    """Suggests a larger group size or dynamic sampling where few groups have a signal."""
    own = m.own_signal
    if own.share >= LOW_SIGNAL:
        return
    settings: list[str] = []
    gain = ""
    larger = (s for s in m.signal if s.size > own.size and s.share >= own.share + GAIN)
    if best := next(larger, None):
        settings.append(f"generation.num_generations={best.size}")
        gain = (
            f" Raise generation.num_generations from {own.size} to {best.size}: "
            f"{own.share:.2f} -> {best.share:.2f}."
        )
    if not recipe.generation.dynamic_sampling:
        settings.append("generation.dynamic_sampling=true")
    yield Finding(
        "slows",
        "low_signal",
        f"only {own.share:.2f} of the groups have rewards that differ.{gain}",
        tuple(settings),
    )


def limit_of(recipe: Recipe, m: Measured) -> tuple[str, int]:
    """Returns the key and the value of the limit that truncates completions."""
    reasons, of_turns = m.stop_reasons, recipe.episode.turn_tokens
    if of_turns is not None and reasons.get("turn_tokens", 0) > reasons.get("max_tokens", 0):
        return "episode.turn_tokens", of_turns
    return "generation.max_completion_tokens", recipe.generation.max_completion_tokens


def endings(recipe: Recipe, m: Measured) -> Iterator[Finding]:
    """Finds truncated completions."""
    key, limit = limit_of(recipe, m)
    never_ends = any(True for _ in _never_ends(recipe, m)) or not m.differing
    if m.truncated > MANY_TRUNCATED and not (never_ends and m.truncated >= ALL_TRUNCATED):
        yield Finding(
            "slows",
            "truncated",
            f"{m.truncated:.0%} of the completions reach {key} = {limit}.",
            (f"{key}={2 * limit}",),
        )


def rewards(recipe: Recipe, m: Measured) -> Iterator[Finding]:
    """Finds rewards that are constant or exceed their timeout."""
    for name, reward in m.rewards.items():
        if len(m.rewards) > 1 and reward.constant is not None and reward.weight:
            yield Finding(
                "slows",
                "constant_reward",
                f"reward {name} is {reward.constant:.3g} for every completion: it teaches nothing.",
                shows_examples=bool(m.differing),
            )
        if reward.timeouts:
            yield Finding(
                "slows",
                "timeouts",
                f"reward {name} ran out of time on {reward.timeouts} of {m.completions} "
                f"completions (p99 of a call: {reward.seconds_p99:.3g} s).",
                (f"reward.{name}.timeout={2 * max(1.0, reward.seconds_p99):.0f}",),
            )


CHECKS: tuple[Callable[[Recipe, Measured], Iterator[Finding]], ...] = (
    errors, signal, endings, rewards,
)  # fmt: skip
