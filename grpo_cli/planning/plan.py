"""Predicts the memory and the time of a run, and what to change where it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpo_cli.config.schema import Recipe
from grpo_cli.errors import UserError
from grpo_cli.models.flops import FORWARD_BACKWARD
from grpo_cli.models.memory import tokens_in
from grpo_cli.models.optimizers import EIGHT_BIT
from grpo_cli.planning.devices import Device
from grpo_cli.planning.memory import Memory, activation_bytes, base_bytes, checkpoint_bytes, memory
from grpo_cli.planning.seconds import Speeds, listed_speeds, rows_at_a_time, stage_seconds
from grpo_cli.planning.settings import Cluster, Settings
from grpo_cli.planning.shapes import Shape
from grpo_cli.planning.workload import Workload

SpeedsOf = Callable[[Shape, Settings, Device, int], Speeds]


@dataclass(frozen=True)
class Plan:
    """The prediction of one run on a number of devices."""

    shape: Shape
    settings: Settings
    device: Device
    gpus: int  # that train
    steps: int
    checkpoints: int  # kept on the disk at the end
    speeds: Speeds
    memory: Memory
    seconds: Mapping[str, float]  # by stage of a step
    work: Workload

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory."""
        return self.memory.peak <= self.device.memory

    @property
    def bytes_by_stage(self) -> dict[str, float]:
        """The peak of each stage."""
        return {stage: sum(parts.values()) for stage, parts in self.memory.by_stage.items()}

    @property
    def peak_stage(self) -> str:
        """The stage of the peak."""
        return max(self.bytes_by_stage, key=lambda stage: self.bytes_by_stage[stage])

    @property
    def step_seconds(self) -> float:
        """The seconds of a step, without rewards."""
        return sum(self.seconds.values())

    @property
    def run_seconds(self) -> float:
        """The seconds of all steps, without evaluations."""
        return self.steps * self.step_seconds

    @property
    def flops_per_step(self) -> float:
        """The model FLOPs of a step over all devices: sampling, reference, update."""
        s, work = self.settings, self.work
        forward, trained = (
            work.scale * sum(self.shape.forward_flops(m.tokens, m.attended, m.logits) for m in some)
            for some in (work.micro_batches, work.trained)
        )
        passes = FORWARD_BACKWARD - (1 if s.adapter_rank else 0)
        of_one = (1 + s.reference + s.old_logprobs) * forward + s.iterations * passes * trained
        return of_one * s.prompts / work.groups

    @property
    def disk(self) -> int:
        """The bytes of the checkpoints that the run keeps."""
        s = self.settings
        model = 0 if s.adapter_rank else self.shape.parameters * s.weight_bytes
        return self.checkpoints * (checkpoint_bytes(self.shape, s) + model)

    def as_json(self) -> dict[str, Any]:
        """Returns the prediction as plain values, for plan.json and --json."""
        s, parts = self.settings, self.memory.by_stage
        return {
            "memory": {stage: round(size) for stage, size in self.bytes_by_stage.items()},
            "parts": {
                stage: {part: round(size) for part, size in of.items() if size >= 1}
                for stage, of in parts.items()
            },
            "peak": round(self.memory.peak),
            "peak_stage": self.peak_stage,
            "fits": self.fits,
            "time": {stage: rounded(seconds) for stage, seconds in self.seconds.items()},
            "step_seconds": rounded(self.step_seconds),
            "run_seconds": rounded(self.run_seconds),
            "gpu_hours": rounded(self.run_seconds * self.gpus / 3600),
            "steps": self.steps,
            "tokens_per_step": round(self.work.tokens),
            "flops_per_step": rounded(self.flops_per_step),
            "tokens_per_micro_batch": s.micro_tokens,
            "micro_batches": round(self.work.scale * len(self.work.trained)),
            "parameters": self.shape.parameters,
            "checkpoint_bytes": self.disk,
            "prompt_tokens": s.prompt_tokens,
            "completion_tokens": rounded(sum(self.work.lengths) / len(self.work.lengths)),
            "device": self.device.name,
            "device_memory": round(self.device.memory),
            "gpus": self.gpus,
            "measured_speeds": self.speeds.is_measured,
        }


@dataclass(frozen=True)
class Extent:
    """The length of a run."""

    steps: int
    checkpoints: int = 1


def predict(
    shape: Shape,
    settings: Settings,
    device: Device,
    gpus: int,
    extent: Extent,
    speeds_of: SpeedsOf = listed_speeds,
    *,
    derive: bool = True,
) -> Plan:
    """Returns the prediction of a run.

    Args:
        speeds_of: gives the rates; `listed_speeds` assumes them.
        derive: whether the tokens of a micro-batch follow from the device's memory; otherwise
            `settings.micro_tokens` are given.

    Raises:
        UserError: adapters of models with experts, which are not described.
    """
    s = settings
    if derive:
        s = replace(s, micro_tokens=derived_micro_tokens(shape, s, device, gpus))
    if s.embedded and s.decoded_rows is None:
        wanted = s.prompts_of(gpus) * s.num_generations
        s = replace(s, decoded_rows=rows_at_a_time(shape, device, s, wanted))
    work = Workload(s, gpus)
    of_largest = replace(s, micro_tokens=work.largest.tokens)
    found = memory(shape, Cluster(gpus, device.memory), of_largest)
    speeds = speeds_of(shape, s, device, gpus)
    seconds = stage_seconds(shape, device, gpus, s, speeds)
    return Plan(
        shape, s, device, gpus, extent.steps, extent.checkpoints, speeds, found, seconds, work
    )  # fmt: skip


def derived_micro_tokens(shape: Shape, settings: Settings, device: Device, gpus: int) -> int:
    """Returns the tokens of a micro-batch as a run derives them from free memory."""
    s = settings
    of_state = memory(shape, Cluster(gpus, device.memory), replace(s, micro_tokens=1))
    parts = of_state.moments["forward"]
    kept = ("weights", "adapter", "gradients", "moments", "reference", "vLLM")
    free = device.memory - sum(parts.get(part, 0) for part in kept)
    if s.sharded and s.embedded:
        free -= base_bytes(shape, 1, replace(s, strategy="ddp")) * s.compute_bytes / s.weight_bytes
    return tokens_in(free, device.kind, activation_bytes(shape, s))


def kept_checkpoints(recipe: Recipe) -> int:
    """Returns how many checkpoints lie on the disk in the end."""
    every = recipe.checkpoint.every
    written = 1 + (recipe.steps - 1) // every if every else 1
    has_best = bool(recipe.dataset.eval or recipe.dataset.held_out or recipe.benchmark)
    return min(written, recipe.checkpoint.keep_last + (has_best and recipe.eval.every > 0))


def rounded(value: float) -> float:
    """Returns a number with 4 digits that count."""
    return float(f"{value:.4g}")


MOST_TOGETHER = 4  # changes that are tried together


@dataclass(frozen=True)
class Change:
    """One change of the recipe and what it does to the plan."""

    words: str  # for the command line
    what: str
    plan: Plan


def changes(plan: Plan, predict_with: Callable[[Settings], Plan]) -> list[Change]:
    """Returns changes that lower the peak, each alone.

    Those that fit come first, in the order of the seconds of their steps. If none does, several
    together come first, if they fit.

    Args:
        predict_with: makes the same plan with other settings.
    """
    found = single_changes(plan, predict_with)
    fitting = sorted((c for c in found if c.plan.fits), key=lambda c: c.plan.step_seconds)
    others = sorted((c for c in found if not c.plan.fits), key=lambda c: c.plan.memory.peak)
    if fitting or not others:
        return fitting + others
    together = others[0]
    for _ in range(MOST_TOGETHER - 1):
        more = single_changes(together.plan, predict_with)
        if not more:
            break
        best = min(more, key=lambda c: c.plan.memory.peak)
        together = Change(f"{together.words} {best.words}", "these together", best.plan)
        if best.plan.fits:
            return [together, *others]
    return others


def single_changes(plan: Plan, predict_with: Callable[[Settings], Plan]) -> list[Change]:
    """Returns changes that lower the peak by more than a hundredth, each alone."""
    found = []
    for words, what, settings in candidates(plan):
        try:
            changed = predict_with(settings)
        except UserError:  # not with this model, or not with these settings
            continue
        if changed.memory.peak < 0.99 * plan.memory.peak:
            found.append(Change(words, what, changed))
    return found


def candidates(plan: Plan) -> list[tuple[str, str, Settings]]:
    """Returns (words, sentence, settings) of each change that the settings leave room for."""
    s = plan.settings
    found: list[tuple[str, dict[str, Any], str]] = []
    if s.micro_tokens > 1024:
        fewer = max(s.micro_tokens // 4, 512)
        found.append(
            (f"update.tokens_per_micro_batch={fewer}", {"micro_tokens": fewer}, "fewer activations")
        )
    if not s.gradient_checkpointing:
        found.append(
            (
                "model.gradient_checkpointing=true",
                {"gradient_checkpointing": True},
                "computes activations again in the backward",
            )
        )
    if not s.bf16 and s.weight_bytes == 4:
        found.append(("mixed_precision=bf16", {"bf16": True}, "products in 16 bits"))
    half = {"weight_bytes": 2, "bf16": True}
    if not s.adapter_rank:
        if s.weight_bytes == 4 and s.optimizer == "adamw" and not s.sharded:
            found.append(
                (
                    "model.dtype=bfloat16 mixed_precision=bf16 optimizer=adamw_8bit",
                    half | {"optimizer": EIGHT_BIT[0]},
                    "weights in 16 bits, moments in 8",
                )
            )
        lora = half | {"adapter_rank": 16, "offload": "none"}
        found.append(
            (
                "adapter=lora model.dtype=bfloat16 mixed_precision=bf16",
                lora | {"optimizer": "adamw"},
                "trains an adapter of rank 16",
            )
        )
    if s.quantization == "none" and not s.sharded:
        found.append(
            (
                "adapter=qlora model.dtype=bfloat16 mixed_precision=bf16",
                half
                | {
                    "adapter_rank": s.adapter_rank or 16,
                    "quantization": "nf4",
                    "optimizer": "adamw",
                    "offload": "none",
                },
                "an adapter on weights in 4 bits",
            )
        )
    if plan.gpus > 1 and not s.sharded and s.quantization == "none":
        found.append(("distributed=fsdp2", {"strategy": "fsdp2"}, "shards weights and state"))
    if s.sharded and not s.reshard_after_forward:
        found.append(
            (
                "distributed.reshard_after_forward=true",
                {"reshard_after_forward": True},
                "frees a layer after its forward",
            )
        )
    if s.embedded or s.vllm_share:
        found.append(
            (
                "generation=vllm_server",
                {"embedded": False, "vllm_share": 0.0, "servers": 1},
                "one server on another device samples",
            )
        )
    if s.reference and not s.adapter_rank:
        found.append(("loss.beta=0", {"reference": False}, "no reference"))
    shorter = s.max_completion_tokens // 2
    if shorter >= 64:
        found.append(
            (
                f"generation.max_completion_tokens={shorter}",
                {
                    "max_completion_tokens": shorter,
                    "completion_tokens": min(s.completion_tokens, shorter),
                },
                "shorter completions",
            )
        )
    made = []
    for words, fields, what in found:
        try:
            made.append((words, what, replace(s, **fields)))
        except UserError:
            continue
    return made
