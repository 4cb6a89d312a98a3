"""Finds how many tokens of a micro-batch, or of a KV cache, fit into free memory."""

from __future__ import annotations

import gc
import math
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

SMALLEST = 256  # minimum of a measured micro-batch in tokens, and the value before that
# Larger micro-batches do not make a step faster once all cores or multiprocessors are busy.
LARGEST = {"cpu": 2048, "mps": 4096, "cuda": 32768}
LARGEST_BYTES = {"cpu": 1.5 * 2**30}  # of their activations, since a laptop has little memory
# Batch sizes beyond which decoding gets no faster.
MOST_ROWS = {"cpu": 256, "mps": 256, "cuda": 512}
CGROUP = Path("/sys/fs/cgroup")  # the container's limits
SHARE = 0.4  # share of free memory for saved activations; backward needs more on top
OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",  # C++, inside torch
    "alloc_failed",  # cuBLAS
)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error is a failed allocation, on any device."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        words in text for words in OUT_OF_MEMORY
    )


def release() -> None:
    """Returns unused memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def bytes_to_come(optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    """Returns the bytes of future gradients and optimizer state on a device."""
    total = 0.0
    for group in optimizer.param_groups:
        on_device = (p for p in group["params"] if p.device.type == device.type)
        for p in (own_part(p) for p in on_device if p.requires_grad):
            state = group.get("state_bytes", 2 * p.element_size())  # per weight; default 2 moments
            total += p.nbytes + p.numel() * state
    return total


def tokens_that_fit(device: torch.device, bytes_per_token: float, *, state_to_come: float) -> int:
    """Returns the micro-batch tokens that fit into free memory: a power of two, against noise.

    Args:
        bytes_per_token: bytes per token that a forward pass keeps for its backward.
        state_to_come: bytes of gradients and optimizer state that are not allocated yet.
    """
    return tokens_in(free_memory(device) - state_to_come, device.type, bytes_per_token)


def tokens_in(free: float, device_type: str, bytes_per_token: float) -> int:
    """Returns the micro-batch tokens whose activations take at most `SHARE` of `free` bytes."""
    most = min(SHARE * max(free, 0), LARGEST_BYTES.get(device_type, math.inf))
    fitting = most / max(bytes_per_token, 1.0)
    largest = LARGEST.get(device_type, LARGEST["cpu"])
    return min(max(1 << max(int(fitting), 1).bit_length() - 1, SMALLEST), largest)


def cache_tokens_in(free: float, bytes_per_token: float) -> int:
    """Returns the tokens whose keys and values take `SHARE` of `free` bytes: a power of two."""
    return 1 << max(int(SHARE * free / bytes_per_token), 1).bit_length() - 1


def cache_tokens_that_fit(model: PreTrainedModel) -> int:
    """Returns the KV-cache tokens of all rows that fit into free memory: a power of two."""
    numbers = cache_numbers(model.config.get_text_config(decoder=True))
    return cache_tokens_in(free_memory(model.device), numbers * model.dtype.itemsize)


def cache_numbers(config: PretrainedConfig) -> int:
    """Returns the number of elements in a token's keys and values over all layers."""
    total = 0
    for layer in getattr(config, "per_layer_config", [config] * config.num_hidden_layers):
        all_heads = getattr(layer, "num_attention_heads", None) or 1
        heads = getattr(layer, "num_key_value_heads", None) or all_heads
        dim = getattr(layer, "head_dim", None) or layer.hidden_size // all_heads
        total += 2 * heads * dim
    return total


def free_memory(device: torch.device) -> int:
    """Returns the bytes that this process may still allocate."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    free = min(psutil.virtual_memory().available, _free_in_cgroup())
    return int(free // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@cache
def total_memory() -> int:
    """Returns this process's share of the machine's memory, or of the container's limit."""
    total = min(psutil.virtual_memory().total, _limit_of_cgroup())
    return int(total // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _limit_of_cgroup() -> float:
    """Returns the container's memory limit in bytes; infinity without a limit."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        return math.inf if limit == "max" else int(limit)
    except (OSError, ValueError):
        return math.inf


def _free_in_cgroup() -> float:
    """Returns the bytes under the container's limit that are free or reclaimable page cache.

    Infinity without a limit.
    """
    try:
        used = int((CGROUP / "memory.current").read_text())
        lines = (CGROUP / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return math.inf
    stat = dict(line.split() for line in lines)
    return _limit_of_cgroup() - used + int(stat.get("inactive_file", 0))


def own_part(weight: Tensor) -> Tensor:
    """Returns this process's shard of a weight, or the weight itself if it is not sharded."""
    part = getattr(weight.detach(), "to_local", None)  # a DTensor
    own: Tensor = weight if part is None else part()
    return own
