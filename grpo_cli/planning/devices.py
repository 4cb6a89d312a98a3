"""The devices that a plan can be made for: GPUs by name or by memory, or this machine's own."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from grpo_cli.errors import UserError, listed, nearest
from grpo_cli.models.memory import free_memory

GB = 1e9
# Memory of a GPU in GB of 10^9 bytes, from NVIDIA's data sheets.
GPUS = {
    "a10g": 24, "a40": 48, "a100-40gb": 40, "a100-80gb": 80, "b200": 180, "gh200": 96,
    "h100-80gb": 80, "h100-nvl": 94, "h100-pcie": 80, "h200": 141, "l4": 24, "l40s": 48,
    "rtx3090": 24, "rtx4090": 24, "rtx5090": 32, "rtx6000-ada": 48, "t4": 16, "v100-32gb": 32,
}  # fmt: skip
WITHOUT_BF16 = ("t4", "v100-32gb")
COUNTED = 0.94  # share of a GPU's memory; the rest is CUDA's context and fragmentation


@dataclass(frozen=True)
class Device:
    """One device, and the memory that a run may use."""

    name: str
    memory: float  # bytes
    kind: str = "cuda"  # or cpu, mps


def named(name: str, dtype: torch.dtype) -> Device:
    """Returns a GPU by its name, or by its memory in GB.

    Args:
        dtype: the type of the arithmetic.

    Raises:
        UserError: the GPU is not listed, or has no such type.
    """
    name = name.lower()
    size = name.removesuffix("gb")
    if size.isdecimal() and int(size):
        return Device(f"a GPU of {size} GB", COUNTED * int(size) * GB)
    if name not in GPUS:
        sizes = [known for known in GPUS if known.startswith(f"{name}-")]
        meant = f" Did you mean {' or '.join(sizes)}?" if sizes else nearest(name, GPUS)
        raise UserError(
            f"gpu = {name}: is not listed; there are {listed(GPUS)}, and a number of GB.{meant}"
        )
    if name in WITHOUT_BF16 and dtype == torch.bfloat16:
        raise UserError(
            f"gpu = {name}: has no bfloat16; use mixed_precision=fp16 with model.dtype=float32."
        )
    return Device(name, COUNTED * GPUS[name] * GB)


def of_machine(device: torch.device) -> Device:
    """Returns a device of this machine."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Device(properties.name, COUNTED * properties.total_memory)
    memory = min(free_memory(device), psutil.virtual_memory().total)
    return Device(str(device), float(memory), device.type)
