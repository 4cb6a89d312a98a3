"""Measures the peak memory of this process by stage of a step.

On a GPU it is torch's own count, in every step. On the CPU it is the largest resident memory, which
Linux keeps for each process and starts anew when it is told to (VmHWM, /proc/self/clear_refs,
proc(5)); where that is not allowed, the resident memory at the end of each stage. Resident memory
also holds Python, libraries, data, and memory that was freed and is kept for later. Therefore it is
measured in the second to fourth step only, in which what is free is given back before each stage,
above what was resident when the second step began, except for weights and optimizer state.
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
HIGHEST = "5"  # what resets the largest resident memory
CPU_STEPS = range(1, 4)  # in which a CPU is measured, counted from 0


class MemoryMeter:
    """Keeps the most bytes that each stage has held."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peaks: dict[str, int] = {}
        self.base: int | None = None  # bytes that are resident and do not count
        self.steps = 0  # that have begun

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
        """Counts the peak since the last call for a stage, and begins anew."""
        assert self.base is not None, "a step that is measured has begun"
        self.peaks[stage] = max(self.peaks.get(stage, 0), self._highest() - self.base)
        self.skip()

    def skip(self) -> None:
        """Begins anew: the peak since the last call is of no stage."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        give_back()
        with suppress(OSError):
            CLEAR.write_text(HIGHEST)

    def _highest(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        with suppress(OSError):
            found = re.search(r"^VmHWM:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
            if found is not None:
                return int(found[1]) * 1024
        return int(psutil.Process().memory_info().rss)


def give_back() -> None:
    """Gives memory that was freed back to the system, where the C library can (glibc)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
