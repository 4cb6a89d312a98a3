"""Predicts the memory of a run, and suggests changes if it does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpo_cli.config.recipe import Recipe
from grpo_cli.errors import UserError
from grpo_cli.planning.memory import Job, Stages, largest_micro_batch, memory, micro_batch_tokens
from grpo_cli.planning.sizes import sizes_of

TOKENS, LENGTH = "update.tokens_per_micro_batch", "generation.max_completion_tokens"
FITS = {True: "fits", False: "DOES NOT FIT"}


@dataclass(frozen=True)
class Plan:
    """The prediction of one run."""

    job: Job
    memory: Stages  # bytes of one process by stage and part

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
        return self.peak <= self.job.device.memory

    @property
    def disk(self) -> float:
        """The bytes of the checkpoints that the run keeps: trained weights, moments, model.

        The best one may be older than the newest ones; only its model is kept then.
        """
        job, recipe = self.job, self.job.recipe
        every = recipe.checkpoint.every
        written = 1 + (recipe.steps - 1) // every if every else 1
        trained = 3 * job.sizes.trained * job.trained_bytes
        model = 0 if job.sizes.adapter else job.sizes.parameters * job.weight_bytes
        if not every and model:  # leaves the model alone
            return model
        newest = min(written, recipe.checkpoint.keep_last)
        best = model if newest < written and recipe.eval.every else 0
        return newest * (trained + model) + best

    def as_json(self) -> dict[str, Any]:
        """Returns the prediction as plain values, for plan.json and --json."""
        job, lengths = self.job, self.job.lengths
        rollouts = job.recipe.prompts_per_step * job.recipe.generation.num_generations
        return {
            "memory": {stage: round(size) for stage, size in self.by_stage.items()},
            "parts": {
                stage: {part: round(size) for part, size in parts.items() if size >= 1}
                for stage, parts in self.memory.items()
            },
            "peak": round(self.peak),
            "peak_stage": self.peak_stage,
            "fits": self.fits,
            "tokens_per_step": round(rollouts * (lengths.prompt + lengths.mean)),
            "tokens_per_micro_batch": micro_batch_tokens(job),
            "parameters": job.sizes.parameters,
            "checkpoint_bytes": round(self.disk),
            "prompt_tokens": round(lengths.prompt, 2),
            "completion_tokens": round(lengths.mean, 2),
            "device": job.device.name,
            "gpus": job.gpus,
        }


def predict(job: Job) -> Plan:
    """Returns the prediction of a run."""
    return Plan(job, memory(job, largest_micro_batch(job)))


def changes(plan: Plan) -> dict[str, Plan]:
    """Returns words that lower the peak, each with the plan under it, the lowest peak first.

    If no single change fits, a combination that fits comes first.
    """
    found = single_changes(plan)
    if not found or any(changed.fits for changed in found.values()):
        return found
    words, together = next(iter(found.items()))
    while not together.fits and (more := single_changes(together)):
        best, together = next(iter(more.items()))
        words = f"{words} {best}"
    return {words: together, **found} if together.fits else found


def single_changes(plan: Plan) -> dict[str, Plan]:
    """Returns the single changes that lower the peak by more than 1 %."""
    job, found = plan.job, {}
    for words, values in candidates(job).items():
        recipe = with_values(job.recipe, values)
        most, old = recipe.generation.max_completion_tokens, job.lengths
        lengths = replace(old, longest=min(old.longest, most), mean=min(old.mean, most))
        try:
            sizes = sizes_of(job.sizes.config, recipe)
        except UserError:  # such as an adapter without peft
            continue
        changed = predict(replace(job, recipe=recipe, sizes=sizes, lengths=lengths))
        if changed.peak < 0.99 * plan.peak:
            found[words] = changed
    return dict(sorted(found.items(), key=lambda item: item[1].peak))


def candidates(job: Job) -> dict[str, dict[str, Any]]:
    """Returns the changes that the recipe allows: words, and the knobs that they set."""
    fewer, shorter = micro_batch_tokens(job) // 4, job.lengths.longest // 2
    is_quantized = job.recipe.model.quantization != "none"
    half = "model.dtype=bfloat16 mixed_precision=bf16"
    lora = {"adapter.method": "lora", "model.dtype": "bfloat16", "mixed_precision": "bf16"}
    found: dict[str, dict[str, Any]] = {
        "model.gradient_checkpointing=true": {"model.gradient_checkpointing": True},
        "mixed_precision=bf16": {"mixed_precision": "bf16"},
        "loss.beta=0.0": {"loss.beta": 0.0},
        "optimizer=adamw_8bit": {"optimizer.algorithm": "bitsandbytes.optim:AdamW8bit"},
        "generation=vllm_server": {"generation.engine": "vllm_server"},
    }
    if not is_quantized:
        found[f"adapter=lora {half}"] = lora
    if not job.sharded:
        found[f"adapter=qlora {half}"] = {**lora, "model.quantization": "nf4"}
        if job.gpus > 1 and not is_quantized:
            found["distributed=fsdp2"] = {"distributed.strategy": "fsdp2"}
    if fewer >= 256:
        found[f"{TOKENS}={fewer}"] = {TOKENS: fewer}
    if shorter >= 64:
        found[f"{LENGTH}={shorter}"] = {LENGTH: shorter}
    return found


def with_values(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Returns the recipe with other values of its knobs, by their full keys."""
    for key, value in values.items():
        section, dot, field = key.partition(".")
        inner = replace(getattr(recipe, section), **{field: value}) if dot else value
        recipe = replace(recipe, **{section: inner})
    return recipe


def text_of(
    plan: Plan, changes: Mapping[str, Plan], notes: list[str], measured: Mapping[str, Any] | None
) -> str:
    """Returns a plan as text for a terminal, with the measurements of a run beside it."""
    job, lengths, measured = plan.job, plan.job.lengths, measured or {}
    several = f"{job.gpus} x {job.device.name}" if job.gpus > 1 else job.device.name
    without = "" if job.sizes.activations is not None else ", activations not counted"
    lines = [
        f"{job.recipe.recipe}: {number(job.sizes.parameters)} parameters on {several} "
        f"(assuming {gb(job.device.memory)} usable on each)",
        "",
        f"memory of one process: {gb(plan.peak)}{without}, in {plan.peak_stage}: {FITS[plan.fits]}",
    ]
    for stage, parts in plan.memory.items():
        ordered = sorted(parts.items(), key=lambda part: -part[1])
        shown = ", ".join(f"{name} {gb(size)}" for name, size in ordered if size >= 1e6)
        known = measured.get("memory", {}).get(stage)
        beside = "" if known is None else f" (measured {gb(known)})"
        lines.append(f"  {stage:16}  {gb(plan.by_stage[stage]):>8}{beside}  {shown}")
    lines += [
        "",
        f"a step: {job.recipe.prompts_per_step:,} prompts of {lengths.prompt:,.4g} tokens x "
        f"{job.recipe.generation.num_generations} completions of up to {lengths.longest:,} tokens, "
        f"in micro-batches of {micro_batch_tokens(job):,} tokens",
        f"checkpoints on the disk: {gb(plan.disk)}",
    ]
    if changes:
        lines += ["", "to make it fit:"]
    lines += [f"  {w}\n    {gb(c.peak)}, {FITS[c.fits]}" for w, c in changes.items()]
    if changes and not any(changed.fits for changed in changes.values()):
        lines.append("  none of them makes it fit: use more or larger devices, or a smaller model")
    if measured:
        lines += ["", f"measured with completions of {measured['completion_tokens']:.4g} tokens"]
    return "\n".join([*lines, "", *(f"note: {note}" for note in notes)]) + "\n"


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
