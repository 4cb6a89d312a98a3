"""Predicts the memory and the time of a run, and suggests changes if it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from grpo_cli.config.schema import Recipe
from grpo_cli.errors import UserError
from grpo_cli.planning.memory import Job, Stages, largest_micro_batch, memory, micro_batch_tokens
from grpo_cli.planning.seconds import step_seconds
from grpo_cli.planning.sizes import sizes_of

MOST_CHANGES = 8  # largest number of printed changes


@dataclass(frozen=True)
class Plan:
    """The prediction of one run."""

    job: Job
    memory: Stages  # bytes of one process by stage and part
    seconds: Mapping[str, float] | None  # the busiest process, by stage; None: unknown

    @property
    def by_stage(self) -> dict[str, float]:
        return {stage: sum(parts.values()) for stage, parts in self.memory.items()}

    @property
    def peak_stage(self) -> str:
        return max(self.by_stage, key=lambda stage: self.by_stage[stage])

    @property
    def peak(self) -> float:
        return self.by_stage[self.peak_stage]

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory."""
        return self.peak <= self.job.device.memory

    @property
    def step_seconds(self) -> float | None:
        """The seconds of a step, without rewards."""
        return None if self.seconds is None else sum(self.seconds.values())

    @property
    def disk(self) -> float:
        """The bytes of the checkpoints that the run keeps: trained weights, moments, model."""
        job, recipe = self.job, self.job.recipe
        every = recipe.checkpoint.every
        written = 1 + (recipe.steps - 1) // every if every else 1
        trained = 3 * job.sizes.trained * job.trained_bytes
        model = 0 if job.sizes.adapter else job.sizes.parameters * job.weight_bytes
        return min(written, recipe.checkpoint.keep_last) * (trained + model)

    def as_json(self) -> dict[str, Any]:
        """Returns the prediction as plain values, for plan.json and --json."""
        job, step = self.job, self.step_seconds
        n, lengths = job.recipe.generation.num_generations, job.lengths
        tokens = job.recipe.prompts_per_step * n * (lengths.prompt + lengths.mean)
        return {
            "memory": {stage: round(size) for stage, size in self.by_stage.items()},
            "parts": {
                stage: {part: round(size) for part, size in parts.items() if size >= 1}
                for stage, parts in self.memory.items()
            },
            "peak": round(self.peak),
            "peak_stage": self.peak_stage,
            "fits": self.fits,
            "activations_known": job.sizes.activations is not None,
            "time": self.seconds and {s: rounded(t) for s, t in self.seconds.items()},
            "step_seconds": step and rounded(step),
            "run_seconds": step and rounded(step * job.recipe.steps),
            "tokens_per_step": round(tokens),
            "tokens_per_micro_batch": micro_batch_tokens(job),
            "parameters": job.sizes.parameters,
            "checkpoint_bytes": round(self.disk),
            "prompt_tokens": rounded(lengths.prompt),
            "completion_tokens": rounded(lengths.mean),
            "device": job.device.name,
            "gpus": job.gpus,
        }


def predict(job: Job) -> Plan:
    """Returns the prediction of a run."""
    return Plan(job, memory(job, largest_micro_batch(job)), step_seconds(job))


def rounded(value: float) -> float:
    """Returns a number rounded to 4 significant digits."""
    return float(f"{value:.4g}")


# The knobs that a word of the command line sets by choosing a part of the recipe.
PARTS: dict[str, dict[str, Any]] = {
    "adapter=lora": {"adapter.method": "lora"},
    "adapter=qlora": {"adapter.method": "lora", "model.quantization": "nf4"},
    "distributed=fsdp2": {"distributed.strategy": "fsdp2"},
    "generation=vllm_server": {"generation.engine": "vllm_server"},
    "optimizer=adamw_8bit": {"optimizer.algorithm": "bitsandbytes.optim:AdamW8bit"},
}


@dataclass(frozen=True)
class Change:
    """Words that change the recipe, and the plan of the changed recipe."""

    words: str
    plan: Plan


def changes(plan: Plan) -> list[Change]:
    """Returns single changes that lower the peak, those that fit first.

    If no single change fits, the combination of the best ones comes first.
    """
    found = sorted(single_changes(plan), key=lambda c: (not c.plan.fits, c.plan.peak))
    if not found or found[0].plan.fits:
        return found
    together = found[0]
    while not together.plan.fits and (more := single_changes(together.plan)):
        best = min(more, key=lambda c: c.plan.peak)
        together = Change(f"{together.words} {best.words}", best.plan)
    return [together, *found] if together.plan.fits else found


def single_changes(plan: Plan) -> list[Change]:
    """Returns single changes that lower the peak by more than 1 %."""
    job, found = plan.job, []
    for words in candidates(job):
        recipe = job.recipe
        for word in words.split():
            key, _, text = word.partition("=")
            recipe = with_values(recipe, PARTS.get(word, {key: yaml.safe_load(text)}))
        most, old = recipe.generation.max_completion_tokens, job.lengths
        lengths = replace(old, longest=min(old.longest, most), mean=min(old.mean, most))
        try:
            sizes = sizes_of(job.sizes.config, recipe)
        except UserError:  # such as an adapter without peft
            continue
        changed = predict(replace(job, recipe=recipe, sizes=sizes, lengths=lengths))
        if changed.peak < 0.99 * plan.peak:
            found.append(Change(words, changed))
    return found


def candidates(job: Job) -> list[str]:
    """Returns the words of changes that the recipe allows."""
    fewer, shorter = micro_batch_tokens(job) // 4, job.lengths.longest // 2
    is_quantized = job.recipe.model.quantization != "none"
    half = "model.dtype=bfloat16 mixed_precision=bf16"
    found = ["model.gradient_checkpointing=true", "mixed_precision=bf16", "loss.beta=0.0",
             "optimizer=adamw_8bit", "generation=vllm_server"]  # fmt: skip
    if not is_quantized:
        found.append(f"adapter=lora {half}")
    if not job.sharded:
        found.append(f"adapter=qlora {half}")
        if job.gpus > 1 and not is_quantized:
            found.append("distributed=fsdp2")
    if fewer >= 256:
        found.append(f"update.tokens_per_micro_batch={fewer}")
    if shorter >= 64:
        found.append(f"generation.max_completion_tokens={shorter}")
    return found


def with_values(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Returns the recipe with other values of its knobs, by their full keys."""
    for key, value in values.items():
        section, dot, field = key.partition(".")
        inner = replace(getattr(recipe, section), **{field: value}) if dot else value
        recipe = replace(recipe, **{section: inner})
    return recipe


def text_of(
    plan: Plan, changes: list[Change], notes: list[str], measured: Mapping[str, Any] | None
) -> str:
    """Returns a plan as text for a terminal, with the measurements of a run beside it."""
    job, lengths, measured = plan.job, plan.job.lengths, measured or {}
    several = f"{job.gpus} x {job.device.name}" if job.gpus > 1 else job.device.name
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    activations = "" if job.sizes.activations is not None else ", activations not counted"
    lines = [
        f"{job.recipe.recipe}: {number(job.sizes.parameters)} parameters on {several} "
        f"({gb(job.device.memory)} of memory counted each)",
        "",
        f"memory of one process: {gb(plan.peak)}{activations}, in {plan.peak_stage}: {verdict}",
    ]
    for stage, parts in plan.memory.items():
        ordered = sorted(parts.items(), key=lambda part: -part[1])
        shown = ", ".join(f"{name} {gb(size)}" for name, size in ordered if size >= 1e6)
        cells = beside(gb, plan.by_stage[stage], measured.get("memory", {}).get(stage))
        lines.append(f"  {stage:16}  {cells}  {shown}")
    lines += [
        "",
        f"a step: {job.recipe.prompts_per_step:,} prompts of {lengths.prompt:,.4g} tokens x "
        f"{job.recipe.generation.num_generations} completions of {lengths.mean:,.4g} tokens in the "
        f"mean, in micro-batches of {micro_batch_tokens(job):,} tokens",
    ]
    if plan.seconds is not None and plan.step_seconds is not None:
        times = {**plan.seconds, "step": plan.step_seconds}
        known = measured.get("time", {}) | {"step": measured.get("step_seconds")}
        lines.append("time, from the device's peak and bandwidth:")
        lines += [f"  {s:16}  {beside(duration, t, known.get(s))}" for s, t in times.items()]
        steps = job.recipe.steps
        lines.append(f"the run: {steps:,} steps, {duration(steps * plan.step_seconds)}")
    lines.append(f"checkpoints on the disk: {gb(plan.disk)}")
    if changes:
        lines += ["", "to make it fit:"]
    for change in changes[:MOST_CHANGES]:
        fits = "fits" if change.plan.fits else "does not fit yet"
        lines.append(f"  {change.words}\n    {gb(change.plan.peak)}, {fits}")
    if changes and not changes[0].plan.fits:
        lines.append("  none of them makes it fit: use more or larger devices, or a smaller model")
    if measured:
        lines += ["", f"measured with completions of {measured['completion_tokens']:.4g} tokens"]
    lines += ["", *(f"note: {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def beside(shown: Callable[[float], str], planned: float, measured: float | None) -> str:
    """Returns a planned figure, with the measured one if there is one."""
    cell = f"{shown(planned):>8}"
    return cell if measured is None else f"{cell} (measured {shown(measured)})"


def gb(size: float) -> str:
    """Returns bytes in GB of 10^9, or in MB."""
    if size < 1e9:
        return f"{size / 1e6:,.0f} MB"
    return f"{size / 1e9:,.{1 if size < 99.95e9 else 0}f} GB"


def number(value: float) -> str:
    """Returns a number with a letter for its power of 10: "1.02 M"."""
    for power, letter in ((12, "T"), (9, "B"), (6, "M")):
        if value >= 10**power:
            return f"{value / 10**power:.3g} {letter}"
    return f"{value:,.0f}"


def duration(seconds: float) -> str:
    """Returns seconds in the unit that reads best."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h" if seconds < 200 * 3600 else f"{seconds / 86400:.3g} days"
