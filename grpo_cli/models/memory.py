"""Finds how many tokens fit into a micro-batch, and halves them when memory runs out."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import torch
from torch import Tensor

from grpo_cli.errors import TrainingError, first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

T = TypeVar("T")

SMALLEST = 256  # minimum of a measured micro-batch in tokens, and the value before that
# Larger micro-batches do not make a step faster once all cores or multiprocessors are busy.
LARGEST = {"cpu": 2048, "mps": 4096, "cuda": 32768}
LARGEST_BYTES = {"cpu": 1.5 * 2**30}  # of their activations, since a laptop has little memory
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


class MicroBatchBudget:
    """The number of tokens per micro-batch, including padding, on this process."""

    def __init__(
        self, tokens: int | None, say: Callable[[str], None], *, runs_in_lockstep: bool = False
    ) -> None:
        """Starts with a known or unknown number of tokens.

        Args:
            tokens: None if it must be measured.
            say: prints a line when memory runs out.
            runs_in_lockstep: passes are collective, so that no process can repeat one alone.
        """
        self.tokens = tokens
        self.counts_images = tokens is not None  # True: a given number is not measured again
        self.say = say
        self.runs_in_lockstep = runs_in_lockstep

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"micro_batch_tokens": self.tokens, "counts_images": self.counts_images}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state`."""
        self.tokens, self.counts_images = state["micro_batch_tokens"], state["counts_images"]

    def take_measured(self, tokens: int, *, with_images: bool) -> None:
        """Sets the measured number of tokens, or lowers it if images need more memory."""
        before, self.counts_images = self.tokens, with_images
        self.tokens = tokens if before is None else min(before, tokens)
        if before is not None and self.tokens < before:
            self.say(
                f"note: micro-batches of {self.tokens:,} tokens from now on, not {before:,}: the "
                "first images take more memory than texts"
            )

    def with_oom_retry(
        self,
        work: Callable[[int], T],
        lengths: Sequence[int],
        undo: Callable[[], None],
        total: int | None = None,
    ) -> T:
        """Returns `work(tokens)`; retries with half the tokens when memory runs out.

        Args:
            lengths: tokens of each row; a micro-batch has at least one row.
            undo: reverts the effects of a failed attempt.
            total: tokens of all rows together, if rows share some.

        Raises:
            TrainingError: a single row does not fit.
        """
        while True:
            tokens = SMALLEST if self.tokens is None else self.tokens
            try:
                return work(tokens)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = first_line(error)
            # After the except block: the traceback, whose frames held memory, has been freed.
            undo()
            release()
            if tokens <= max(lengths, default=0):  # without rows only dummies are computed
                raise TrainingError(
                    f"out of memory with a completion of {max(lengths):,} tokens, prompt included: "
                    "use model.gradient_checkpointing=true, mixed_precision=bf16 or a smaller "
                    f"generation.max_completion_tokens. ({reason})",
                    alone=True,
                )
            if self.runs_in_lockstep:
                raise TrainingError(
                    f"out of memory with micro-batches of {tokens:,} tokens; processes that share "
                    "a model cannot repeat one by themselves: resume with resume=auto "
                    f"update.tokens_per_micro_batch={tokens // 2}. ({reason})",
                    alone=True,
                )
            # At most half of all tokens; half of a larger budget would fail again.
            self.tokens = max(min(tokens, sum(lengths) if total is None else total) // 2, 1)
            self.say(
                f"note: out of memory: micro-batches of {self.tokens:,} tokens from now on; the "
                "batch is done again, and comes out the same"
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


def most_rows(model: PreTrainedModel) -> int:
    """Returns the batch size beyond which decoding gets no faster."""
    return MOST_ROWS.get(model.device.type, MOST_ROWS["cpu"])


def free_memory(device: torch.device) -> int:
    """Returns the bytes that this process may still allocate."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    free = min(psutil.virtual_memory().available, _free_in_cgroup())
    return int(free // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


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
