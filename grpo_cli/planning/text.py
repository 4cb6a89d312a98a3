"""Prints a plan: memory by stage and part, times, the run, and what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grpo_cli.planning.plan import Change, Plan

MOST_CHANGES = 8


def text_of(recipe: str, plan: Plan, changes: Sequence[Change], notes: Sequence[str]) -> str:
    """Returns a plan as text for a terminal."""
    s, work, device = plan.settings, plan.work, plan.device
    several = f"{plan.gpus} x {device.name}" if plan.gpus > 1 else device.name
    mean = sum(work.lengths) / len(work.lengths)
    rates = "measured here" if plan.speeds.is_measured else "assumed"
    lines = [
        f"{recipe}: {number(plan.shape.parameters)}parameters on {several} "
        f"({gb(device.memory)} of memory counted each)",
        "",
        f"memory of the busiest device: {gb(plan.memory.peak)} at most, in {plan.peak_stage}: "
        f"{'fits' if plan.fits else 'DOES NOT FIT'}",
        *memory_lines(plan),
        "",
        f"a step: {s.prompts:,} prompts of {s.prompt_tokens:,} tokens x {s.num_generations} "
        f"completions of {mean:,.4g} tokens in the mean; {number(plan.work.tokens)}tokens, "
        f"{number(plan.flops_per_step, UNITS)}FLOPs",
        f"micro-batches: {round(work.scale * len(work.trained)):,} of at most "
        f"{s.micro_tokens:,} tokens on each device",
        f"time of a step ({rates}): {duration(plan.step_seconds)}",
    ]
    width = max(map(len, plan.seconds))
    for stage, seconds in plan.seconds.items():
        share = seconds / plan.step_seconds if plan.step_seconds else 0.0
        lines.append(f"  {stage:{width}}  {duration(seconds):>10}  {share:6.1%}")
    hours = plan.run_seconds * plan.gpus / 3600
    lines += [
        f"the run: {plan.steps:,} steps, {duration(plan.run_seconds)}, "
        f"{hours:,.3g} device hours; {gb(plan.disk)} for {plan.checkpoints} "
        f"checkpoint{'' if plan.checkpoints == 1 else 's'}",
    ]
    if changes:
        lines += ["", "to make it fit:", *change_lines(plan, changes)]
    lines += ["", *(f"note: {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def memory_lines(plan: Plan) -> list[str]:
    """Returns a line for each stage: its peak, then its parts, the largest first."""
    lines = []
    stages = plan.memory.by_stage
    width = max(map(len, stages))
    for stage, parts in stages.items():
        ordered = sorted(parts.items(), key=lambda part: -part[1])
        shown = ", ".join(f"{name} {gb(size)}" for name, size in ordered if size >= 1e6)
        lines.append(f"  {stage:{width}}  {gb(sum(parts.values())):>9}  {shown}")
    return lines


def change_lines(plan: Plan, changes: Sequence[Change]) -> list[str]:
    """Returns a line for each change; the first one that fits is marked."""
    lines = []
    for n, change in enumerate(changes[:MOST_CHANGES]):
        saved = plan.memory.peak - change.plan.memory.peak
        slower = change.plan.step_seconds - plan.step_seconds
        fits = "fits" if change.plan.fits else "does not fit yet"
        mark = "*" if n == 0 and change.plan.fits else " "
        lines.append(
            f"{mark} {change.words}\n    {change.what}: {gb(change.plan.memory.peak)} "
            f"(-{gb(saved)}), {duration(change.plan.step_seconds)} a step "
            f"({'+' if slower >= 0 else '-'}{duration(abs(slower))}), {fits}"
        )
    if not changes[0].plan.fits:
        lines.append("  none of them makes it fit: use more or larger devices, or a smaller model")
    return lines


def gb(size: float) -> str:
    """Returns bytes in GB of 10^9, or in MB."""
    if size < 1e9:
        return f"{size / 1e6:,.0f} MB"
    return f"{size / 1e9:,.{1 if size < 99.95e9 else 0}f} GB"


COUNTS = {12: "T", 9: "B", 6: "M"}  # letters of powers of 10: of tokens and parameters
UNITS = {18: "E", 15: "P", 12: "T", 9: "G", 6: "M"}  # of FLOPs


def number(value: float, letters: Mapping[int, str] = COUNTS) -> str:
    """Returns a number, a letter for its power of 10 and a space: "1.02 M "."""
    for power, letter in letters.items():
        if value >= 10**power:
            return f"{value / 10**power:.3g} {letter} "
    return f"{value:,.0f} "  # the unit follows


def duration(seconds: float) -> str:
    """Returns seconds in the unit that reads best."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h" if seconds < 200 * 3600 else f"{seconds / 86400:.3g} days"
