"""Describes the machine of a process, for files that are read on another machine."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Any

import psutil
import torch

from grpo_cli.distributed import heartbeat


def machine(device: torch.device) -> dict[str, Any]:
    """Returns name, system, processor, cores, memory in bytes, and the GPUs if one is used."""
    found: dict[str, Any] = {
        "node": heartbeat.node(),
        "system": platform.platform(terse=True),
        "processor": processor(),
        "cores": psutil.cpu_count(),
        "memory": psutil.virtual_memory().total,
    }
    if device.type == "cuda":
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["gpus"] = ", ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names))
    return found


def processor() -> str:
    """Returns the name of the processor."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.is_file() else ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine()
