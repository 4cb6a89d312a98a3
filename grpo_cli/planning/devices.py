"""The devices that a plan can be made for: listed GPUs by name, or this machine's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from grpo_cli.errors import UserError, listed, nearest
from grpo_cli.models.flops import listed_peak

GB = 1e9
# A plan's name for a GPU: (its name by CUDA, memory in GB of 10^9 bytes, memory bandwidth in GB/s,
# rate to another GPU of its node in GB/s), from NVIDIA's data sheets.
GPUS: dict[str, tuple[str, float, float, float]] = {
    "a10": ("NVIDIA A10", 24, 600, 32),
    "a10g": ("NVIDIA A10G", 24, 600, 32),
    "a30": ("NVIDIA A30", 24, 933, 100),
    "a40": ("NVIDIA A40", 48, 696, 56),
    "a100-40gb": ("NVIDIA A100-SXM4-40GB", 40, 1555, 300),
    "a100-80gb": ("NVIDIA A100-SXM4-80GB", 80, 2039, 300),
    "b200": ("NVIDIA B200", 180, 8000, 900),
    "gb200": ("NVIDIA GB200", 186, 8000, 900),
    "gh200": ("NVIDIA GH200", 96, 4000, 450),
    "h100-80gb": ("NVIDIA H100 80GB HBM3", 80, 3350, 450),
    "h100-nvl": ("NVIDIA H100 NVL", 94, 3900, 300),
    "h100-pcie": ("NVIDIA H100 PCIe", 80, 2000, 64),
    "h200": ("NVIDIA H200", 141, 4800, 450),
    "l4": ("NVIDIA L4", 24, 300, 32),
    "l40": ("NVIDIA L40", 48, 864, 32),
    "l40s": ("NVIDIA L40S", 48, 864, 32),
    "rtx3090": ("NVIDIA GeForce RTX 3090", 24, 936, 32),
    "rtx4090": ("NVIDIA GeForce RTX 4090", 24, 1008, 32),
    "rtx5090": ("NVIDIA GeForce RTX 5090", 32, 1792, 64),
    "rtx6000-ada": ("NVIDIA RTX 6000 Ada Generation", 48, 960, 32),
    "rtx-a6000": ("NVIDIA RTX A6000", 48, 768, 56),
    "t4": ("Tesla T4", 16, 320, 16),
    "v100-16gb": ("Tesla V100-SXM2-16GB", 16, 900, 150),
    "v100-32gb": ("Tesla V100-SXM2-32GB", 32, 900, 150),
}
COUNTED = 0.94  # share of a GPU's memory; the rest is CUDA's context and fragmentation
BETWEEN_NODES = 50.0  # GB/s: one link of 400 Gb/s a GPU
# Shares of the peak that the products of training reach, and seconds that starting the kernels of
# a layer takes while it decodes one token of each row. Both are assumed.
UTILISATION = {"cuda": 0.4, "cpu": 0.6}
LAYER_SECONDS = {"cuda": 0.3e-3, "cpu": 0.3e-3}
LAYER_SECONDS_IN_GRAPHS = 0.02e-3  # vLLM, with CUDA graphs
CPU_BANDWIDTH = 8.0  # GB/s of one core, assumed
READ = 0.7  # share of the listed bandwidth that reading weights and caches reaches, assumed


@dataclass(frozen=True)
class Device:
    """One device: what fits into it, and how fast it multiplies and reads."""

    name: str
    kind: str  # cuda, cpu or mps
    memory: float  # bytes that a run may use
    flops: float  # peak of matrix products a second, in the type of the arithmetic
    bandwidth: float  # bytes a second, of its memory
    link: float = BETWEEN_NODES * GB  # bytes a second, to another device
    utilisation: float = UTILISATION["cuda"]  # share of the peak that training reaches

    @property
    def layer_seconds(self) -> float:
        """The seconds of a layer's kernels in a step of decoding, at least."""
        return LAYER_SECONDS.get(self.kind, LAYER_SECONDS["cuda"])


def named(name: str, dtype: torch.dtype, nodes: int = 1) -> Device:
    """Returns a listed GPU.

    Args:
        name: one of `GPUS`.
        dtype: of the arithmetic.
        nodes: several: the link between nodes limits what is sent.

    Raises:
        UserError: it is not listed, or does not multiply in this type.
    """
    if name.lower() not in GPUS:
        sizes = [known for known in GPUS if known.startswith(f"{name.lower()}-")]
        meant = f" Did you mean {' or '.join(sizes)}?" if sizes else nearest(name.lower(), GPUS)
        raise UserError(f"gpu = {name}: is not listed; there are {listed(GPUS)}.{meant}")
    card, memory, bandwidth, link = GPUS[name.lower()]
    peak = listed_peak(card, dtype, tf32=False)
    if peak is None:
        raise UserError(
            f"gpu = {name}: has no {str(dtype).removeprefix('torch.')}; use mixed_precision=fp16 "
            "with model.dtype=float32."
        )
    rate = link if nodes == 1 else min(link, BETWEEN_NODES)
    return Device(name.lower(), "cuda", COUNTED * memory * GB, peak, bandwidth * GB, rate * GB)


def of_machine(device: torch.device, peak: float, memory: float) -> Device:
    """Returns a device of this machine.

    Args:
        peak: FLOPs a second, by the data sheet or measured (`flops.peak_flops`).
        memory: bytes that are free before the model is loaded.
    """
    if device.type != "cuda":
        bandwidth = CPU_BANDWIDTH * torch.get_num_threads() * GB
        shares = UTILISATION.get(device.type, UTILISATION["cpu"])
        return Device(str(device), device.type, memory, peak, bandwidth, utilisation=shares)
    card = torch.cuda.get_device_name(device)
    similar = [g for g in GPUS.values() if g[0] == card]
    _, _, bandwidth, link = similar[0] if similar else GPUS["a100-40gb"]
    return Device(card, "cuda", COUNTED * memory, peak, bandwidth * GB, link * GB)
