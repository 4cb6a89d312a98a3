"""Predicts the bytes that one process holds in each stage of a step, by part.

    memory(job, micro_tokens)     {"forward_backward": {"weights": 3.05e10, "gradients": ...}, ...}

A sharded model keeps its share of each tensor; embedding, head and three layers are gathered while
it computes. In the embedded engine all completions count as long as the longest. Their cache is a
quarter larger while it grows. An adapter's reference is a copy of the initial adapter. Left out:
work space of matrix products, vision towers, and the memory of Python and libraries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from grpo_cli.config.recipe import Recipe
from grpo_cli.generation.factory import engine_class
from grpo_cli.models.memory import MOST_ROWS, cache_tokens_in, tokens_in
from grpo_cli.models.optimizers import EIGHT_BIT, state_bytes
from grpo_cli.models.token_logprobs import CHUNK_BYTES
from grpo_cli.planning.devices import Device
from grpo_cli.planning.sizes import Sizes

FUSED = ("adamw", *EIGHT_BIT)  # a step makes no tensors of its own
# Bytes of a quantized weight: 4 bits, 1 byte per block of 64, and 4 bytes per 64 * 256 weights.
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
GROWTH = 1.25  # a full cache of keys doubles while the values still have the old size
BUCKET_BYTES = 256 * 2**20  # bytes of weights that are sent to vLLM at a time

Stages = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Lengths:
    """The tokens of prompts and completions."""

    prompt: float  # mean length of prompts
    mean: float  # mean length of completions
    longest: int  # length of the longest completion
    signal: float = 1.0  # share of groups that have a gradient


@dataclass(frozen=True)
class Job:
    """A recipe, and the sizes, devices and lengths that its memory depends on."""

    recipe: Recipe
    sizes: Sizes
    device: Device
    gpus: int
    lengths: Lengths

    @property
    def sharded(self) -> bool:
        return self.recipe.distributed.strategy == "fsdp2"

    @property
    def embedded(self) -> bool:
        return engine_class(self.recipe.generation.engine).samples_from_policy

    @property
    def weight_bytes(self) -> int:
        """The bytes of a weight, a gradient and a moment, except for an adapter's."""
        dtype: torch.dtype = getattr(torch, self.recipe.model.dtype)
        return dtype.itemsize

    @property
    def compute_bytes(self) -> int:
        """The bytes of a number in matrix products."""
        return 2 if self.recipe.mixed_precision != "no" else self.weight_bytes

    @property
    def trained_bytes(self) -> int:
        return 4 if self.sizes.adapter else self.weight_bytes

    @property
    def trained(self) -> float:
        """The number of weights that each process trains."""
        return self.sizes.trained / (self.gpus if self.sharded else 1)

    @property
    def groups(self) -> int:
        """The number of prompts of the busiest process; a group is never split."""
        return -(-self.recipe.prompts_per_step // self.gpus)

    @property
    def rollouts(self) -> int:
        return self.groups * self.recipe.generation.num_generations

    @property
    def row(self) -> int:
        """The tokens of the longest rollout."""
        return round(self.lengths.prompt) + self.lengths.longest


def memory(job: Job, micro_tokens: int) -> Stages:
    """Returns the bytes of one process by stage and part."""
    recipe, sizes = job.recipe, job.sizes
    engine, vllm = recipe.generation.engine, recipe.generation.vllm
    in_vllm = {"vLLM": vllm.memory * job.device.memory} if engine == "vllm_colocate" else {}
    asleep = {} if vllm.sleep else in_vllm
    gradients = {"gradients": job.trained * job.trained_bytes} | asleep
    kept = resting(job)
    stages = {}
    if job.embedded:
        copy = {"whole copy": sizes.parameters * job.compute_bytes} if job.sharded else copies(job)
        stages["generate"] = kept | copy | decoding(job)
    elif in_vllm:
        stages["generate"] = kept | in_vllm
    stages["forward_backward"] = kept | gradients | computing(job, micro_tokens)
    in_place = recipe.optimizer.algorithm in FUSED or recipe.distributed.offload != "none"
    temporary = {} if in_place else {"temporaries": job.trained * job.trained_bytes}
    stages["optimizer"] = kept | gradients | temporary
    if not job.embedded:
        largest = max(sizes.largest_matrix, sizes.vocab * sizes.hidden) * job.weight_bytes
        bucket = max(BUCKET_BYTES, largest) * (2 if job.sharded else 1)
        stages["weights"] = kept | asleep | {"bucket": bucket}
    return stages


def resting(job: Job) -> dict[str, float]:
    """Returns the bytes that are held in all stages: weights, optimizer state and reference."""
    recipe, sizes = job.recipe, job.sizes
    quantized = recipe.model.quantization != "none"
    in_bits = sizes.matrices * NF4 if quantized else 0.0
    plain = sizes.parameters - (sizes.matrices if quantized else 0)
    weights = (in_bits + plain * job.weight_bytes) / (job.gpus if job.sharded else 1)
    parts = {"weights": weights}
    if sizes.adapter:
        parts["adapter"] = job.trained * job.trained_bytes
    if recipe.distributed.offload == "none":
        state = state_bytes(recipe.optimizer, job.trained_bytes)
        if recipe.optimizer.algorithm == "muon":  # one moment of a matrix in the layers
            by_muon = 1.0 if sizes.adapter else sizes.matrices / sizes.parameters
            one = state_bytes(recipe.optimizer, job.trained_bytes, is_muon=True)
            state += by_muon * (one - state)
        parts["optimizer state"] = job.trained * state
        if recipe.optimizer.algorithm in EIGHT_BIT and not sizes.adapter:  # embeddings in float32
            parts["optimizer state"] += sizes.vocab * sizes.hidden * (8 - state)
    elif recipe.distributed.offload == "all":
        parts = dict.fromkeys(parts, 0.0)
    if recipe.needs_reference:
        parts["reference"] = parts["adapter"] if sizes.adapter else weights
    return parts


def computing(job: Job, micro_tokens: int) -> dict[str, float]:
    """Returns the bytes that forward and backward hold besides the training state."""
    sizes, half = job.sizes, job.compute_bytes == 2
    parts = {"activations": micro_tokens * (sizes.activations or 0.0)}
    # A chunk of scores, and in 16 bit also its gradient.
    parts["logits"] = min(CHUNK_BYTES, 4 * micro_tokens * sizes.vocab) * (2 if half else 1)
    of_gradient = 4 + (2 if half else 0)
    head = 0 if sizes.adapter else sizes.vocab * sizes.hidden
    if job.sharded:
        root = sizes.vocab * sizes.hidden
        layers = 3 if job.recipe.distributed.reshard_after_forward else sizes.layers + 2
        parts["gathered weights"] = (root + layers * sizes.layer) * job.compute_bytes
        layer = (sizes.adapter // sizes.layers) if sizes.adapter else sizes.layer
        parts["gathered gradients"] = max(head, layer) * of_gradient
        return parts
    extra: dict[str, float] = {"head's gradient": head * of_gradient}
    if not job.recipe.model.gradient_checkpointing:
        extra |= copies(job)
    elif sum(copies(job).values()) > sum(extra.values()):  # only the forward holds them
        extra = copies(job)
    if job.recipe.model.quantization != "none":
        extra["dequantized matrix"] = sizes.largest_matrix * job.compute_bytes
    return parts | extra


def copies(job: Job) -> dict[str, float]:
    """Returns the bytes of autocast's copies of float32 matrices; experts have no copies."""
    if job.compute_bytes == job.weight_bytes:
        return {}
    return {"16-bit copies": 2.0 * (job.sizes.matrices + job.sizes.vocab * job.sizes.hidden)}


def decoding(job: Job) -> dict[str, float]:
    """Returns the bytes that the embedded engine holds besides the weights."""
    generation, token = job.recipe.generation, job.sizes.cache * job.compute_bytes
    if generation.max_num_seqs is not None:
        rows = min(job.rollouts, generation.max_num_seqs)
    else:
        weights = sum(size for part, size in resting(job).items() if part != "optimizer state")
        fitting = cache_tokens_in(max(job.device.memory - weights, 0), token) // job.row
        most = min(fitting, MOST_ROWS.get(job.device.kind, MOST_ROWS["cpu"]))
        rows = min(max(most, generation.num_generations), job.rollouts)  # a group is never split
    prompts = rows / generation.num_generations * job.lengths.prompt
    return {
        "keys and values": (prompts + GROWTH * rows * job.lengths.longest) * token,
        "logits": 2.0 * rows * job.sizes.vocab * job.compute_bytes,
    }


def micro_batch_tokens(job: Job) -> int:
    """Returns the tokens of a micro-batch: the recipe's number, or the one that the run derives."""
    tokens = job.recipe.update.tokens_per_micro_batch
    if tokens is None:
        gradients = job.trained * job.trained_bytes
        free = job.device.memory - sum(resting(job).values()) - gradients
        if job.sharded and job.embedded:
            free -= job.sizes.parameters * job.compute_bytes
        tokens = tokens_in(free, job.device.kind, job.sizes.activations or 1e5)
    return tokens


def largest_micro_batch(job: Job) -> int:
    """Returns the tokens of the largest micro-batch; it holds at least one rollout."""
    n = job.recipe.generation.num_generations
    every = job.lengths.signal * job.groups * (job.lengths.prompt + n * job.lengths.mean)
    return max(min(micro_batch_tokens(job), round(every)), job.row)
