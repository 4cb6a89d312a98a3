"""Declares the knobs of the processes of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_cli.config.knob import at_least_0, knob

HALF_TYPES = {"bf16": "bfloat16", "fp16": "float16"}  # mixed_precision to torch's names


@dataclass
class Distributed:
    """Division of the work over the processes that torchrun starts."""

    strategy: str = knob(
        "ddp",
        "One process (single); the complete model in each process (ddp); weights, gradients "
        "and optimizer state sharded over all processes by PyTorch's FSDP2 (fsdp2).",
        choices=("single", "ddp", "fsdp2"),
    )
    reshard_after_forward: bool = knob(
        True,
        "Free a layer's gathered weights after its forward and gather them again in the "
        "backward; false: keep them, which is faster where memory allows.",
        read_if=("distributed.strategy", "fsdp2"),
    )
    offload: str = knob(
        "none",
        "Tensors that are kept in host memory. all: weights, gradients and optimizer state, by "
        "FSDP2's CPU offload (distributed=fsdp2).",
        choices=("none", "all"),
        training=True,
    )
    stall_minutes: float = at_least_0(
        30.0,
        "Minutes without progress of any process after which a run names the process at fault "
        "and ends; 0: it waits for ever.",
    )

    def problems(self) -> Iterator[str]:
        """Yields messages about values that contradict one another."""
        if self.offload == "all" and self.strategy != "fsdp2":
            yield (
                "distributed.offload = all: is FSDP2's offload of sharded weights, and "
                f"distributed.strategy = {self.strategy}; use distributed=fsdp2, or "
                "distributed.offload=none."
            )
