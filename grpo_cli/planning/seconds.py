"""Predicts the seconds of a step by stage from the peak and the bandwidth of a device.

Assumptions, none of which was measured on a GPU:

- Products of training reach 40 % of a GPU's listed peak (60 % of the peak measured on a CPU).
- A step of decoding reads all weights and the caches at 70 % of the bandwidth. In the embedded
  engine, which launches each kernel separately, it takes at least 0.3 ms for each layer.
- Gradients are summed, and sharded weights gathered in parallel to products, at the link's rate.
- Rewards, environments, evaluations, checkpoints and waiting for one another take no time.
"""

from __future__ import annotations

import math

from grpo_cli.models.flops import FORWARD_BACKWARD, forward_flops
from grpo_cli.planning.memory import Job, micro_batch_tokens, rows_at_a_time

UTILISATION = {"cuda": 0.4}
UTILISATION_OF_CPU = 0.6
READ = 0.7
LAYER_SECONDS = {"transformers": 0.3e-3}
LAYER_SECONDS_IN_GRAPHS = 0.02e-3  # vLLM
OPTIMIZER_BYTES = 28  # AdamW's traffic per float32 weight: 4 tensors read, 3 written


def step_seconds(job: Job) -> dict[str, float] | None:
    """Returns the seconds of the busiest process by stage; None where rates are unknown."""
    recipe, sizes, device = job.recipe, job.sizes, job.device
    if device.flops is None:
        return None
    rate = UTILISATION.get(device.kind, UTILISATION_OF_CPU) * device.flops
    forward = forward_flops_of(job) / rate
    if math.isnan(forward):
        return None
    update = recipe.update
    passes = FORWARD_BACKWARD - (1 if sizes.adapter else 0) + recipe.model.gradient_checkpointing
    backward = update.num_iterations * passes * job.lengths.signal * forward
    if job.sharded:  # each micro-batch gathers the weights twice and sums gradients once
        batches = max(job.rollouts * job.row / micro_batch_tokens(job), 1.0)
        sent = batches * sizes.parameters * (2 * job.compute_bytes + 4)
        backward = max(backward, update.num_iterations * sent / device.link)
    moved = OPTIMIZER_BYTES * job.trained * job.trained_bytes / 4
    optimizer = moved / (READ * device.bandwidth)
    if job.gpus > 1 and not job.sharded:  # a ring sends and receives each gradient nearly once
        optimizer += 2 * job.trained * 4 / device.link
    updates = update.num_iterations * update.minibatches
    stages = {"generate": generation_seconds(job, rate)}
    if updates > 1:
        stages["old_logprobs"] = forward
    if recipe.needs_reference:
        stages["ref_logprobs"] = forward
    stages |= {"forward_backward": backward, "optimizer": updates * optimizer}
    if not job.embedded:
        servers = max(len(recipe.generation.vllm.servers), 1)
        stages["weights"] = servers * sizes.parameters * job.compute_bytes / device.link
    return stages


def forward_flops_of(job: Job) -> float:
    """Returns the model FLOPs of a pass over the rollouts of a process; prompts count once."""
    n, prompt, mean = job.recipe.generation.num_generations, job.lengths.prompt, job.lengths.mean
    tokens = job.groups * (prompt + n * mean)
    pairs = job.groups * (prompt**2 / 2 + n * mean * (prompt + mean / 2))
    logits = job.rollouts * mean
    return forward_flops(
        job.sizes.config, job.sizes.active, round(tokens), round(pairs), round(logits)
    )


def generation_seconds(job: Job, rate: float) -> float:
    """Returns the seconds of sampling: prompts, then steps of decoding many completions at once."""
    sizes, lengths = job.sizes, job.lengths
    read = READ * job.device.bandwidth
    engine = job.recipe.generation.engine
    servers = len(job.recipe.generation.vllm.servers) if engine == "vllm_server" else 0
    # Servers share the prompts of all processes.
    rollouts = job.rollouts * job.gpus / servers if servers else job.rollouts
    rows = min(rows_at_a_time(job), rollouts)
    layer = LAYER_SECONDS.get(engine, LAYER_SECONDS_IN_GRAPHS)
    active = sizes.active or sizes.parameters
    reading = max(active * job.compute_bytes / read, sizes.layers * layer)
    keys = (lengths.prompt + lengths.mean / 2) * sizes.cache * job.compute_bytes
    step = reading + rows * (2 * active / rate + keys / read)
    steps = max(rollouts * lengths.mean / rows, float(lengths.longest))
    prompts = rollouts / job.recipe.generation.num_generations * lengths.prompt
    return 2 * active * prompts / rate + steps * step
