"""Prints a probe: tables of its numbers, and the verdict in words."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from grpo_cli.config.interpolation import masked
from grpo_cli.evaluation.probe.measures import Example, Measured
from grpo_cli.evaluation.probe.verdict import Finding, Verdict


def show(console: Console, title: str, measured: Measured, verdict: Verdict) -> None:
    """Prints all numbers of a probe and its verdict."""
    m = measured
    console.print(f"{title}: {m.prompts} prompts x {m.samples} completions", markup=False)
    console.print(signal_table(m))
    table = Table("reward", title="rewards")
    for head in ("mean", "without a value", "raised", "late", "p99 of a call"):
        table.add_column(head, justify="right")
    for name, r in m.rewards.items():
        mean = "none" if r.mean is None else f"{r.mean:.3f}"
        counts = (str(n) for n in (r.none, r.errors, r.timeouts))
        table.add_row(name, mean, *counts, f"{r.seconds_p99:.2g} s")
    console.print(table)
    for line in lines(m):
        console.print(line, markup=False, soft_wrap=True)
    console.print()
    for line in verdict_lines(m, verdict):
        console.print(line, markup=False, soft_wrap=True)


def signal_table(m: Measured) -> Table:
    """Builds a table of the share of groups whose rewards differ, by group size."""
    table = Table(title="share of groups whose rewards differ")
    for head in ("group size", "share", "95 % interval"):
        table.add_column(head, justify="right")
    table.add_column("", no_wrap=True)
    every = {s.size: s for s in [*m.signal, m.own_signal]}
    for size, found in sorted(every.items()):
        note = "<- generation.num_generations" if size == m.num_generations else ""
        table.add_row(str(size), f"{found.share:.3f}", f"{found.low:.3f} to {found.high:.3f}", note)
    return table


def lines(m: Measured) -> Iterator[str]:
    """Yields lines for the numbers that are not in a table."""
    if m.pass_rate is not None:
        rate = m.pass_rate
        solved, hopeless = (sum(rate == end for _, rate in m.rates) for end in (1, 0))
        yield (
            f"pass rate     {rate.value:.3f} [{rate.low:.3f}, {rate.high:.3f}] ({m.right}); "
            f"{solved} prompts always solved, {hopeless} never"
        )
    quantiles = "  ".join(f"{name} {value:.0f}" for name, value in m.lengths.items())
    yield f"length        {quantiles} tokens"
    yield (
        f"endings       {m.eos:.1%} with the end token, {m.truncated:.1%} truncated; all identical "
        f"for {m.identical:.1%} of prompts"
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
    yield (
        f"seconds       {m.sampling_seconds:.1f} of sampling, {m.scoring_seconds:.1f} more of "
        "scoring"
    )


def verdict_lines(m: Measured, verdict: Verdict) -> Iterator[str]:
    """Yields the verdict: a sentence, each finding with its settings, and completions."""
    yield verdict.sentence
    first = True
    for finding in verdict.findings:
        if not (first and finding.kind == "stops"):  # the sentence already contains it
            yield f"- {said(finding)}"
        elif finding.settings:
            yield f"- change: {' '.join(finding.settings)}"
        first = first and finding.kind != "stops"
    if any(f.shows_examples for f in verdict.findings):
        for example in m.examples:
            yield from example_lines(example)


def said(finding: Finding) -> str:
    """Formats a finding with its settings as text."""
    prefix = "note: " if finding.kind == "note" else ""
    change = f" Change: {' '.join(finding.settings)}" if finding.settings else ""
    end = "" if finding.message.endswith((".", "!")) or not change else "."
    return masked(f"{prefix}{finding.message}{end}{change}")


def example_lines(example: Example) -> Iterator[str]:
    """Yields lines that show a completion and its rewards."""
    values = ", ".join(
        f"{name} {'none' if value is None else f'{value:.3g}'}"
        for name, value in example.rewards.items()
    )
    yield masked(f"  row {example.row}: prompt {example.prompt!r}")
    yield masked(f"    completion {example.completion!r} -> {values}")
