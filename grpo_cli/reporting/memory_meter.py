"""Measures the peak memory of this process by stage of a step.

On a GPU it is torch's own count, in every step. On the CPU it is the peak resident memory, which
Linux keeps for each process and resets on request (VmHWM, /proc/self/clear_refs, proc(5)). Where
resetting is not allowed, it is the resident memory at the end of each stage. Resident memory also
holds Python, libraries, data and freed memory. Therefore it is measured only in the second to
fourth step, and freed memory is returned to the system before each stage. It is counted above the
memory at the start of the second step, less weights and optimizer state.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import torch

CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
CPU_STEPS = range(1, 4)  # steps that are measured on a CPU, counted from 0


class MemoryMeter:
    """Keeps the peak number of bytes of each stage."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peaks: dict[str, int] = {}
        self.base: int | None = None  # resident bytes that do not count
        self.steps = 0  # number of steps begun

    def of_next_step(self, resident: Callable[[], int]) -> MemoryMeter | None:
        """Returns this meter if the step that begins is measured, else None.

        Args:
            resident: returns the bytes of weights and optimizer state of this process.
        """
        step, self.steps = self.steps, self.steps + 1
        if self.device.type == "cuda":
            self.base = 0  # only tensors are counted, all of them
        elif step not in CPU_STEPS:
            return None
        elif self.base is None:
            give_back()
            self.base = int(psutil.Process().memory_info().rss) - resident()
        return self

    def note(self, stage: str) -> None:
        """Counts the peak since the last call for a stage, and resets it."""
        assert self.base is not None, "a step that is measured has begun"
        highest = int(psutil.Process().memory_info().rss)
        if self.device.type == "cuda":
            highest = int(torch.cuda.max_memory_allocated(self.device))
        else:
            with suppress(OSError):
                if found := re.search(r"^VmHWM:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE):
                    highest = int(found[1]) * 1024
        self.peaks[stage] = max(self.peaks.get(stage, 0), highest - self.base)
        self.skip()

    def skip(self) -> None:
        """Resets the peak without counting it for a stage."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        give_back()
        with suppress(OSError):
            CLEAR.write_text("5")  # resets the peak resident memory


def give_back() -> None:
    """Returns freed memory to the system, if the C library can (glibc)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
