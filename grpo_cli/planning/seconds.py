"""Computes the seconds of a step by stage, from rates that are listed or measured.

Assumptions, of listed rates:

- Products of training reach 40 % of a GPU's listed peak (60 % of the peak measured on a CPU).
- A step of decoding reads all weights and the caches at 70 % of the listed bandwidth, and takes
  0.3 ms for each layer at least where every kernel is started by itself (the embedded engine).
- Gradients are summed, and weights of FSDP2 gathered, at the rate of the link. The gathering hides
  behind the products. Waiting of GPUs for one another is left out.
- Rewards, environments, evaluations and checkpoints take no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from grpo_cli.models.flops import FORWARD_BACKWARD
from grpo_cli.models.memory import MOST_ROWS, cache_tokens_in
from grpo_cli.planning.devices import LAYER_SECONDS_IN_GRAPHS, READ, Device
from grpo_cli.planning.memory import cache_bytes, trained_weights
from grpo_cli.planning.settings import Settings
from grpo_cli.planning.shapes import Shape
from grpo_cli.planning.workload import Workload

OPTIMIZER_BYTES = (
    28  # that AdamW reads and writes of a weight in float32: 4 tensors, 3 of them back
)


@dataclass(frozen=True)
class Speeds:
    """The rates of one device with one model."""

    train: float  # model FLOPs a second of a forward and backward pass
    forward: float  # of a pass without gradient
    micro_batch: float  # seconds of a micro-batch besides
    prefill: float  # FLOPs a second of prompts before decoding
    steps: Sequence[tuple[float, float]]  # (rows, seconds of a step of decoding), rising
    key: float  # seconds that a row takes for each token in its cache, in a step
    optimizer: float  # seconds of an optimizer step
    weights: float  # seconds to hand the weights to the engine
    is_measured: bool = False  # with the recipe's own modules on this machine
    recomputed: bool = False  # whether `train` counts the second forward of checkpointing

    def step(self, rows: float) -> float:
        """Returns the seconds of a step of decoding, between and beyond the measured points."""
        points = list(self.steps)
        if len(points) == 1 or rows <= points[0][0]:
            return points[0][1]
        for (fewer, less), (more, longer) in pairwise(points):
            if rows <= more or (more, longer) == points[-1]:
                return max(less + (longer - less) * (rows - fewer) / (more - fewer), less)
        raise AssertionError("the last interval has no end")


def listed_speeds(shape: Shape, settings: Settings, device: Device, gpus: int) -> Speeds:
    """Returns the rates of a device by its peak, its bandwidth and the assumed shares of them."""
    s, rate = settings, device.flops * device.utilisation
    read = READ * device.bandwidth
    weights = shape.parameters * s.compute_bytes
    if shape.experts:  # those that are not chosen are not read, unless there are many rows
        weights = shape.active * s.compute_bytes
    layer = device.layer_seconds if s.embedded else LAYER_SECONDS_IN_GRAPHS
    least = max(weights / read, shape.layers * layer)
    row = 2 * shape.active / rate
    moved = OPTIMIZER_BYTES * trained_weights(shape, s, gpus) * s.trained_bytes / 4
    return Speeds(
        train=rate,
        forward=rate,
        micro_batch=3 * shape.layers * device.layer_seconds,
        prefill=rate,
        steps=((0.0, least), (1024.0, least + 1024 * row)),
        key=cache_bytes(shape, s) / read,
        optimizer=moved / read + 3 * shape.layers * device.layer_seconds,
        weights=0.0 if s.embedded else shape.parameters * s.compute_bytes / device.link,
    )


def stage_seconds(
    shape: Shape, device: Device, gpus: int, settings: Settings, speeds: Speeds
) -> dict[str, float]:
    """Returns the seconds of the busiest process by stage; stages that take none are left out."""
    s, work = settings, Workload(settings, gpus)
    forward, trained = (
        work.scale * sum(shape.forward_flops(m.tokens, m.attended, m.logits) for m in some)
        for some in (work.micro_batches, work.trained)
    )
    batches = work.scale * len(work.micro_batches)
    without_gradient = forward / speeds.forward + batches * speeds.micro_batch / 3
    passes = FORWARD_BACKWARD - (1 if s.adapter_rank else 0)
    if s.gradient_checkpointing and not speeds.recomputed:
        passes += 1
    batches = work.scale * len(work.trained)
    with_gradient = passes * trained / speeds.train + batches * speeds.micro_batch
    updates = s.iterations * s.minibatches
    optimizer = updates * speeds.optimizer
    if gpus > 1 and not s.sharded:  # a ring sends and receives each gradient nearly once
        sent = 2 * (gpus - 1) / gpus * trained_weights(shape, s, gpus) * s.sum_bytes
        optimizer += updates * sent / device.link
    if s.sharded:  # two gatherings and a sum for each micro-batch
        gathered = shape.parameters * (2 * s.compute_bytes + s.sum_bytes) * batches
        with_gradient = max(with_gradient, gathered * (gpus - 1) / gpus / device.link)
    stages = {"generate": _generate(shape, device, s, speeds, work, gpus)}
    if s.old_logprobs:
        stages["old_logprobs"] = without_gradient
    if s.reference:
        stages["ref_logprobs"] = without_gradient
    stages |= {"forward_backward": s.iterations * with_gradient, "optimizer": optimizer}
    if speeds.weights:
        stages["weights"] = speeds.weights * max(s.servers, 1)
    return stages


def _generate(
    shape: Shape, device: Device, s: Settings, speeds: Speeds, work: Workload, gpus: int
) -> float:
    """Returns the seconds of sampling: prompts, steps of decoding, keys that they read."""
    if s.servers:  # which share the prompts of all processes
        work = Workload(s, s.servers)
    own = s.prompt_tokens
    prefill = work.groups * shape.forward_flops(own, own * (own + 1) // 2, 1) / speeds.prefill
    rows = rows_at_a_time(shape, device, s, work.groups * s.num_generations)
    prompts = own * work.groups / max(work.groups * s.num_generations / rows, 1)
    decoding = work.decoding_seconds(rows, speeds.step)
    # Rows of a prompt read its keys together.
    of_prompts = prompts * mean_steps(work, rows)
    return prefill + decoding + speeds.key * (work.own_keys + of_prompts)


def mean_steps(work: Workload, rows: int) -> float:
    """Returns the number of steps of decoding in which the mean number of rows takes part."""
    return work.sampled_tokens / max(min(rows, work.groups * work.settings.num_generations), 1)


def rows_at_a_time(shape: Shape, device: Device, settings: Settings, wanted: int) -> int:
    """Returns how many completions are decoded at the same time on one device."""
    s = settings
    if s.decoded_rows is not None:
        return max(min(wanted, s.decoded_rows), 1)
    if not s.embedded:
        share = s.vllm_share or 0.9
        room = share * device.memory - shape.parameters * s.compute_bytes
        longest = s.prompt_tokens + s.max_completion_tokens
        fitting = int(max(room, 0) / (cache_bytes(shape, s) * longest))
        return max(min(wanted, fitting), s.num_generations)
    free = device.memory - shape.parameters * s.weight_bytes * (2 if s.reference else 1)
    tokens = cache_tokens_in(max(free, 0), cache_bytes(shape, s))
    fitting = tokens // (s.prompt_tokens + s.max_completion_tokens)
    most = MOST_ROWS.get(device.kind, MOST_ROWS["cpu"])
    # A group is never split.
    return max(min(wanted, fitting, most), min(wanted, s.num_generations))
