"""Says in plain words whether a run can learn, and which settings to change.

Each check returns findings of one of three kinds:

    stops    the run cannot learn as it stands: no group has anything to learn from, or an error
             ends it
    slows    it can learn, and would learn more or sooner with other settings
    note     something that may be meant, or not
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from grpo_cli.config.schedules import at_step
from grpo_cli.config.schema import Recipe
from grpo_cli.errors import listed
from grpo_cli.evaluation.probe.measures import Measured, RewardStats
from grpo_cli.evaluation.probe.signal import SignalShare
from grpo_cli.models.self_check import TIMES

LOW_SIGNAL = 0.5  # share of groups with a signal below which larger groups are looked at
GAIN = 0.1  # that a larger group has to bring
MANY_TRUNCATED = 0.3
ALL_TRUNCATED = 0.99
BY_ACCIDENT = 0.05  # of completions that are all cut off: right ones
ALL_IDENTICAL = 0.9
MANY = 0.5  # of prompts that are solved, or that no completion solves
SOME = 0.05
MISMATCH = 0.05  # nats a token, or in 16 bit `TIMES` the trainer's own rounding if that is more
SLOW_SHARE = 0.5  # of the time of sampling that scoring adds
SLOW_SECONDS = 2.0


@dataclass(frozen=True)
class Finding:
    """One thing that a probe found, and the settings that change it."""

    kind: str  # stops, slows or note
    name: str
    message: str
    settings: tuple[str, ...] = ()  # as words of the command line
    shows_examples: bool = False


@dataclass(frozen=True)
class Verdict:
    """The conclusion of a probe."""

    findings: list[Finding]  # those that stop the run first
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
    """Returns the conclusion from the numbers of a probe of `recipe`."""
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
    if own.share is None or recipe.generation.dynamic_sampling:
        return ""
    return f", about {own.share * wanted:.0f} of {wanted} prompts a step"


def share_in_words(found: SignalShare) -> str:
    """Returns a share with its interval as text, or its bounds."""
    if found.share is None:
        return f"between {found.low:.2f} and {found.high:.2f}"
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


def prompts(recipe: Recipe, m: Measured) -> Iterator[Finding]:
    """Finds prompts that render oddly."""
    checks = m.prompt_checks
    most = recipe.dataset.max_prompt_tokens
    longer = f"dataset.max_prompt_tokens={2 * most}"
    if checks.rows and checks.dropped > SOME * checks.rows:
        yield Finding(
            "slows",
            "prompts_dropped",
            f"{checks.dropped:,} of {checks.rows:,} rows are dropped: longer than "
            f"dataset.max_prompt_tokens = {most}, or with images that cannot be read.",
            (longer,),
        )
    for column, rows in checks.empty_columns.items():
        yield Finding(
            "slows" if rows < checks.prompts else "stops",
            "empty_column",
            f"the column {column!r}, which a reward reads, is empty in {rows:,} of "
            f"{checks.prompts:,} rows.",
        )
    if checks.duplicates > SOME * checks.prompts:
        yield Finding(
            "note",
            "duplicates",
            f"{checks.duplicates:,} of {checks.prompts:,} prompts are there more than once.",
        )
    if checks.blank:
        yield Finding("note", "blank", f"{checks.blank:,} prompts have no text.")
    if checks.without_bos:
        yield Finding(
            "note",
            "without_bos",
            f"{checks.without_bos:,} of {checks.prompts:,} prompts do not begin with the "
            "tokenizer's beginning-of-sequence token, as the others do.",
        )
    if checks.double_bos:
        yield Finding(
            "slows",
            "double_bos",
            f"{checks.double_bos:,} of {checks.prompts:,} prompts begin with two tokens of the "
            "beginning of a sequence: the data holds one, and the tokenizer adds one.",
        )
    if checks.unknown_tokens > 0.01:
        yield Finding(
            "slows",
            "unknown_tokens",
            f"{checks.unknown_tokens:.1%} of the tokens of prompts are the unknown token: the "
            "tokenizer does not know the characters of the data.",
        )
    if checks.unused_template:
        yield Finding(
            "note",
            "unused_template",
            "the tokenizer has a chat template, and dataset.chat = false does not use it.",
            ("dataset.chat=true",),
        )


def signal(recipe: Recipe, m: Measured) -> Iterator[Finding]:
    """Finds out why groups have no signal, or which group size has more."""
    if not any(r.applied for r in m.rewards.values()):
        if not m.failed_environments and not any(r.errors for r in m.rewards.values()):
            yield Finding(
                "stops",
                "no_reward",
                "every reward of every completion is None: no function applies to the data.",
                shows_examples=True,
            )
        return
    is_over_step = recipe.advantage.rule == "reinforce_pp" and recipe.advantage.baseline == "none"
    if m.differing:
        yield from _never_ends(recipe, m)
        yield from _group_size(recipe, m)
        return
    if is_over_step and not m.is_constant:
        yield Finding(
            "note",
            "between_prompts",
            "the rewards of a prompt's completions are all equal, and only differ between prompts; "
            "with advantage.baseline = none the run trains on that.",
        )
        return
    yield _without_signal(recipe, m)


def _without_signal(recipe: Recipe, m: Measured) -> Finding:
    """Returns why no group has rewards that differ."""
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
    """Finds runs whose completions are all cut off, where one is right by accident only.

    Tasks whose answer is as long as the limit, such as a choice of one token, are right more often.
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
    """Finds a group size with more signal, or says that steps are filled up."""
    own = m.own_signal
    if own.share is None or own.share >= LOW_SIGNAL:
        return
    settings: list[str] = []
    larger = [s for s in m.signal if s.size > own.size and s.share is not None]
    best = next((s for s in larger if s.share is not None and s.share >= own.share + GAIN), None)
    gain = ""
    if best is not None and best.share is not None:
        settings.append(f"generation.num_generations={best.size}")
        gain = (
            f" Raise generation.num_generations from {own.size} to {best.size}: "
            f"{own.share:.2f} -> {best.share:.2f}."
        )
    else:
        beyond = next((s for s in m.signal if s.size > own.size and s.is_bounds), None)
        if beyond is not None and beyond.low >= own.share + GAIN:
            settings.append(f"generation.num_generations={beyond.size}")
            gain = f" With groups of {beyond.size} it is {share_in_words(beyond)} (bounds)."
    if not recipe.generation.dynamic_sampling:
        settings.append("generation.dynamic_sampling=true")
    yield Finding(
        "slows",
        "low_signal",
        f"only {own.share:.2f} of the groups have rewards that differ.{gain}",
        tuple(settings),
    )


def difficulty(recipe: Recipe, m: Measured) -> Iterator[Finding]:
    """Finds data that is mostly solved, or of which most is out of reach."""
    if m.is_graded or not m.differing:
        return
    solved = sum(rate == 1 for _, rate in m.rates) / max(len(m.rates), 1)
    hopeless = sum(rate == 0 for _, rate in m.rates) / max(len(m.rates), 1)
    if solved > MANY:
        yield Finding(
            "note",
            "easy",
            f"{solved:.0%} of the prompts are solved by all {m.samples} completions: harder "
            "data would train more.",
        )
    if hopeless > MANY:
        yield Finding(
            "note",
            "hard",
            f"{hopeless:.0%} of the prompts are solved by none of {m.samples} completions: easier "
            "data, a supervised start or worked examples in the prompt would train more.",
        )


def limit_of(recipe: Recipe, m: Measured) -> tuple[str, int]:
    """Returns the key and the value of the limit that cuts completions off."""
    reasons, of_turns = m.stop_reasons, recipe.episode.turn_tokens
    if of_turns is not None and reasons.get("turn_tokens", 0) > reasons.get("max_tokens", 0):
        return "episode.turn_tokens", of_turns
    return "generation.max_completion_tokens", recipe.generation.max_completion_tokens


def endings(recipe: Recipe, m: Measured) -> Iterator[Finding]:
    """Finds completions that are cut off, or that do not end by themselves."""
    key, limit = limit_of(recipe, m)
    ended = "none ended" if m.ended_length is None else (
        f"99 % of those that ended have at most {m.ended_length:.0f} tokens"
    )  # fmt: skip
    never_ends = any(True for _ in _never_ends(recipe, m)) or not m.differing
    if m.truncated > MANY_TRUNCATED and not (never_ends and m.truncated >= ALL_TRUNCATED):
        yield Finding(
            "slows",
            "truncated",
            f"{m.truncated:.0%} of the completions reach {key} = {limit} ({ended}).",
            (f"{key}={2 * limit}",),
        )
    if not m.eos and m.truncated < 1 and not m.stop_reasons:
        yield Finding(
            "note",
            "no_eos",
            "no completion ends with the model's end token; they end by generation.stop.",
        )
    if m.identical > MANY and m.differing:
        yield Finding(
            "slows",
            "identical",
            f"all completions are identical for {m.identical:.0%} of the prompts.",
            ("generation.temperature=1",),
        )


def rewards(recipe: Recipe, m: Measured) -> Iterator[Finding]:
    """Finds rewards that say nothing, change by themselves, or take long."""
    for name, reward in m.rewards.items():
        if len(m.rewards) > 1:
            yield from _constant_part(name, reward, m)
        if reward.changed:
            yield Finding(
                "slows",
                "not_repeatable",
                f"reward {name} gave {reward.changed} of {reward.scored_twice} completions another "
                "value when they were scored again: a part of its differences is noise.",
            )
        if reward.timeouts:
            yield Finding(
                "slows",
                "timeouts",
                f"reward {name} ran out of time on {reward.timeouts} of {m.completions} "
                f"completions (p99 of a call: {reward.seconds_p99:.3g} s).",
                (f"reward.{name}.timeout={2 * max(1.0, reward.seconds_p99):.0f}",),
            )
    slow = m.scoring_seconds > max(SLOW_SECONDS, SLOW_SHARE * m.sampling_seconds)
    if slow:
        name, slowest = max(m.rewards.items(), key=lambda item: item[1].seconds_p50)
        yield Finding(
            "slows",
            "slow_reward",
            f"scoring takes {m.scoring_seconds:.1f} s more after {m.sampling_seconds:.1f} s of "
            f"sampling; the slowest reward is {name}, {slowest.seconds_p50:.3g} s a completion "
            f"(p99 {slowest.seconds_p99:.3g} s). More calls at a time: reward.{name}.concurrency "
            "for an async function, scoring.workers for one with a timeout.",
        )


def _constant_part(name: str, reward: RewardStats, m: Measured) -> Iterator[Finding]:
    if reward.constant is not None and reward.weight:
        yield Finding(
            "slows",
            "constant_reward",
            f"reward {name} is {reward.constant:.3g} for every completion: it teaches nothing.",
            shows_examples=bool(m.differing),
        )
    elif reward.constant_groups == 1 and reward.applied:
        yield Finding(
            "slows",
            "constant_reward",
            f"reward {name} is the same for all completions of a prompt: it teaches nothing.",
        )


CHECKS: tuple[Callable[[Recipe, Measured], Iterator[Finding]], ...] = (
    errors, prompts, signal, difficulty, endings, rewards,
)  # fmt: skip
