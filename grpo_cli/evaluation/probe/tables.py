"""Prints a probe: tables of its numbers, and the verdict in words."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from grpo_cli.config.interpolation import masked
from grpo_cli.evaluation.probe.measures import Example, Measured, RewardStats
from grpo_cli.evaluation.probe.verdict import Finding, Verdict

WIDTH = 40  # characters of the longest bar


def show(console: Console, title: str, measured: Measured, verdict: Verdict) -> None:
    """Prints everything that a probe has measured, and its verdict."""
    console.print(histogram_table(title, measured))
    console.print(signal_table(measured))
    console.print(rewards_table(measured))
    for line in lines(measured):
        console.print(line, markup=False, soft_wrap=True)
    console.print()
    for line in verdict_lines(measured, verdict):
        console.print(line, markup=False, soft_wrap=True)


def histogram_table(title: str, m: Measured) -> Table:
    """Returns the histogram of prompts by their pass rate, or by their mean reward."""
    head = "mean reward" if m.is_graded else f"pass rate ({m.right})"
    table = Table(title=f"{title}: {m.prompts} prompts x {m.samples} completions")
    table.add_column(head, justify="right")
    table.add_column("prompts", justify="right")
    table.add_column("", min_width=WIDTH)
    most = max((b.prompts for b in m.histogram), default=1)
    for b in m.histogram:
        bar = "#" * round(WIDTH * b.prompts / max(most, 1))
        table.add_row(b.label, str(b.prompts), bar or ("." if b.prompts else ""))
    return table


def signal_table(m: Measured) -> Table:
    """Returns the share of groups whose rewards differ, by group size."""
    table = Table(title="share of groups whose rewards differ")
    for head in ("group size", "share", "95 % interval"):
        table.add_column(head, justify="right")
    table.add_column("", no_wrap=True)
    every = {s.size: s for s in [*m.signal, m.own_signal]}
    for size, found in sorted(every.items()):
        note = "<- generation.num_generations" if size == m.num_generations else ""
        if found.is_bounds:
            note = f"bounds: more than {m.samples} completions {note}".strip()
        share = "" if found.share is None else f"{found.share:.3f}"
        table.add_row(str(size), share, f"{found.low:.3f} to {found.high:.3f}", note)
    return table


def rewards_table(m: Measured) -> Table:
    """Returns the rewards: mean, how often constant, failures, seconds, and whether they repeat."""
    table = Table("reward", title="rewards: how often all completions of a prompt have one value")
    for head in ("mean", "constant", "without", "p50", "p99", "repeats"):
        table.add_column(head, justify="right")
    for name, reward in m.rewards.items():
        table.add_row(name, *_cells(reward))
    return table


def _cells(r: RewardStats) -> Iterator[str]:
    yield "none" if r.mean is None else f"{r.mean:.3f}"
    yield "everywhere" if r.constant is not None else f"{r.constant_groups:.0%}"
    failures = {"none": r.none - r.errors, "raised": r.errors, "late": r.timeouts}
    yield ", ".join(f"{number} {how}" for how, number in failures.items() if number > 0) or "0"
    yield from (seconds(s) for s in (r.seconds_p50, r.seconds_p99))
    yield "yes" if not r.changed else f"{r.changed}/{r.scored_twice} differ"


def seconds(value: float) -> str:
    """Returns a time in the unit that fits."""
    if value >= 1:
        return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"
    return f"{1e3 * value:.2g} ms" if value >= 1e-3 else f"{1e6 * value:.2g} us"


def lines(m: Measured) -> Iterator[str]:
    """Yields the numbers that are no table."""
    if m.pass_rate is not None:
        rate = m.pass_rate
        yield f"pass rate     {rate.value:.3f} [{rate.low:.3f}, {rate.high:.3f}] over all prompts"
    quantiles = "  ".join(f"{name} {value:.0f}" for name, value in m.lengths.items())
    yield f"length        {quantiles} tokens"
    yield (
        f"endings       {m.eos:.1%} with the end token, {m.other_stops:.1%} by stop strings or "
        f"environments, {m.truncated:.1%} truncated; all identical for {m.identical:.1%} of prompts"
    )
    if m.stop_reasons:
        reasons = ", ".join(f"{name} {share:.1%}" for name, share in m.stop_reasons.items())
        yield f"episodes      {reasons}"
    if m.mismatch is not None:
        gap = m.mismatch
        yield (
            f"log-probs     |trainer - sampler| is {gap.mean:.2g} nats a token in the mean, "
            f"{gap.max:.2g} at most ({gap.tokens:,} tokens)"
        )
    p = m.prompt_checks
    rows = f" of {p.rows:,} rows" if p.rows is not None else ""
    yield (
        f"prompts       {p.kept:,}{rows}, at most {p.longest:,} tokens; {p.dropped:,} dropped, "
        f"{p.duplicates:,} duplicates"
    )
    yield (
        f"seconds       {m.sampling_seconds:.1f} of sampling, {m.scoring_seconds:.1f} more of "
        "scoring"
    )


def verdict_lines(m: Measured, verdict: Verdict) -> Iterator[str]:
    """Yields the verdict: a sentence, each finding with its settings, and completions."""
    yield verdict.sentence
    first = True
    for finding in verdict.findings:
        if not (first and finding.kind == "stops"):  # the sentence says it
            yield f"- {said(finding)}"
        elif finding.settings:
            yield f"- change: {' '.join(finding.settings)}"
        first = first and finding.kind != "stops"
    if any(f.shows_examples for f in verdict.findings):
        for name, reward in m.rewards.items():
            yield masked(f"  reward {name}: {reward.wants}")
        for example in m.examples:
            yield from example_lines(example)


def said(finding: Finding) -> str:
    """Returns a finding with its settings as text."""
    prefix = "note: " if finding.kind == "note" else ""
    change = f" Change: {' '.join(finding.settings)}" if finding.settings else ""
    end = "" if finding.message.endswith((".", "!")) or not change else "."
    return masked(f"{prefix}{finding.message}{end}{change}")


def example_lines(example: Example) -> Iterator[str]:
    """Yields a completion, and what the rewards were given with it."""
    values = ", ".join(
        f"{name} {'none' if value is None else f'{value:.3g}'}"
        for name, value in example.rewards.items()
    )
    yield masked(f"  row {example.row}: prompt {example.prompt!r}")
    yield masked(f"    completion {example.completion!r} -> {values}")
    for name, value in example.columns.items():
        yield masked(f"    {name}: {value!r}")
