"""The devices that a plan can be made for: GPUs by name or by memory, or this machine's own."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from grpo_cli.errors import UserError, listed, nearest
from grpo_cli.models.flops import listed_peak, peak_flops
from grpo_cli.models.memory import free_memory

GB = 1e9
# Name of a GPU in plans: (CUDA's name, memory in GB of 10^9 bytes, memory bandwidth in GB/s, rate
# to another GPU of the node in GB/s), from NVIDIA's data sheets.
GPUS: dict[str, tuple[str, float, float, float]] = {
    "a10g": ("NVIDIA A10G", 24, 600, 32),
    "a40": ("NVIDIA A40", 48, 696, 56),
    "a100-40gb": ("NVIDIA A100-SXM4-40GB", 40, 1555, 300),
    "a100-80gb": ("NVIDIA A100-SXM4-80GB", 80, 2039, 300),
    "b200": ("NVIDIA B200", 180, 8000, 900),
    "gh200": ("NVIDIA GH200", 96, 4000, 450),
    "h100-80gb": ("NVIDIA H100 80GB HBM3", 80, 3350, 450),
    "h100-nvl": ("NVIDIA H100 NVL", 94, 3900, 300),
    "h100-pcie": ("NVIDIA H100 PCIe", 80, 2000, 64),
    "h200": ("NVIDIA H200", 141, 4800, 450),
    "l4": ("NVIDIA L4", 24, 300, 32),
    "l40s": ("NVIDIA L40S", 48, 864, 32),
    "rtx3090": ("NVIDIA GeForce RTX 3090", 24, 936, 32),
    "rtx4090": ("NVIDIA GeForce RTX 4090", 24, 1008, 32),
    "rtx5090": ("NVIDIA GeForce RTX 5090", 32, 1792, 64),
    "rtx6000-ada": ("NVIDIA RTX 6000 Ada Generation", 48, 960, 32),
    "t4": ("Tesla T4", 16, 320, 16),
    "v100-32gb": ("Tesla V100-SXM2-32GB", 32, 900, 150),
}
COUNTED = 0.94  # share of a GPU's memory; the rest is CUDA's context and fragmentation
GPUS_PER_NODE = 8
BETWEEN_NODES = 50.0  # GB/s: one link of 400 Gb/s a GPU
CPU_BANDWIDTH = 8.0  # GB/s of one core, assumed


@dataclass(frozen=True)
class Device:
    """One device: the memory that a run may use, and its rates if they are known."""

    name: str
    memory: float  # bytes
    kind: str = "cuda"  # or cpu, mps
    flops: float | None = None  # peak FLOPs a second of matrix products, in the arithmetic's type
    bandwidth: float = 0.0  # bytes a second, to its own memory
    link: float = 0.0  # bytes a second, to another device


def named(name: str, dtype: torch.dtype, gpus: int = 1) -> Device:
    """Returns a GPU by its name, or by its memory in GB, whose rates are unknown.

    Args:
        dtype: the type of the arithmetic.
        gpus: number of GPUs; beyond one node, the link between nodes limits the rate.

    Raises:
        UserError: the GPU is not listed, or does not multiply in this type.
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
    card, memory, bandwidth, link = GPUS[name]
    peak = listed_peak(card, dtype, tf32=False)
    if peak is None:
        raise UserError(
            f"gpu = {name}: has no {str(dtype).removeprefix('torch.')}; use mixed_precision=fp16 "
            "with model.dtype=float32."
        )
    rate = link if gpus <= GPUS_PER_NODE else min(link, BETWEEN_NODES)
    return Device(name, COUNTED * memory * GB, "cuda", peak, bandwidth * GB, rate * GB)


def of_machine(device: torch.device, dtype: torch.dtype) -> Device:
    """Returns a device of this machine."""
    peak = peak_flops(device, dtype)
    if device.type != "cuda":
        memory = float(min(free_memory(device), psutil.virtual_memory().total))
        bandwidth = CPU_BANDWIDTH * torch.get_num_threads() * GB
        return Device(str(device), memory, device.type, peak, bandwidth, BETWEEN_NODES * GB)
    properties = torch.cuda.get_device_properties(device)
    similar = [gpu for gpu in GPUS.values() if gpu[0] == properties.name]
    _, _, bandwidth, link = similar[0] if similar else GPUS["a100-40gb"]
    memory = COUNTED * properties.total_memory
    return Device(properties.name, memory, "cuda", peak, bandwidth * GB, link * GB)
