"""Measures a side, the same on both: seconds by stage, peak memory, tokens of each step."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from torch import nn

POLL = 1e-3  # seconds between two looks at the resident memory
KNOWN = 2**28  # bytes of the allocation that the meter is checked against


@dataclass
class Step:
    """Holds the measurements of one step."""

    prompts: str = ""  # digest of the token ids of its prompts, in order
    lengths: list[tuple[int, list[int]]] = field(default_factory=list)
    # ^ tokens of each prompt, and of each of its completions
    seconds: dict[str, float] = field(default_factory=dict)  # step, generate, update
    memory: int | None = None  # bytes, above weights, gradients and optimizer state


class Probe:
    """Collects the steps of one process."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.base: dict[int, int] = {}  # by number of steps: bytes that do not count
        self.is_looking = False
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to the newest step. Waits for the GPU at both ends."""
        synchronize(self.device)
        start = time.perf_counter()
        yield
        synchronize(self.device)
        seconds = self.steps[-1].seconds
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start

    @contextlib.contextmanager
    def peak(self, model: nn.Module) -> Iterator[None]:
        """Notes the most memory that is in use inside, above weights, gradients and optimizer.

        What is in use when a step first comes here does not count: weights and, after the warm-up,
        the optimizer's state. Nor do the gradients, which come into being inside (both sides set
        them to None after a step): their bytes are taken off by formula.
        """
        if self.is_looking:  # a stage within a stage
            yield
            return
        self.is_looking = True
        missing = sum(p.nbytes for p in model.parameters() if p.requires_grad and p.grad is None)
        with peak_memory(self.device) as seen:
            yield
        self.is_looking = False
        before, highest = seen
        base = self.base.setdefault(len(self.steps), before + missing)
        step = self.steps[-1]
        step.memory = max(step.memory or 0, highest - base)

    def sampled(self, prompts: Sequence[Sequence[int]], completions: Sequence[list[int]]) -> None:
        """Notes a step's prompts, and the lengths of each one's completions."""
        step, ids = self.steps[-1], json.dumps([list(p) for p in prompts])
        step.prompts = hashlib.sha256(ids.encode()).hexdigest()[:16]
        step.lengths = [(len(p), list(c)) for p, c in zip(prompts, completions, strict=True)]

    def followed(self, lengths: Sequence[int]) -> None:
        """Notes the lengths of completions that go on from earlier ones of the step."""
        self.steps[-1].lengths.append((0, list(lengths)))

    def write(self, output: str, **more: Any) -> None:
        """Writes what was collected to `result.json`."""
        found = {"steps": [asdict(step) for step in self.steps], **more}
        (Path(output) / "result.json").write_text(json.dumps(found), encoding="utf-8")


def synchronize(device: torch.device) -> None:
    """Waits for kernels that run on after their launch has returned."""
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[list[int]]:
    """Gives a list that holds, afterwards, the bytes in use at the start and the most inside.

    On a GPU by torch's own count; else a thread looks at the process's resident memory. That falls
    when memory is freed only if malloc is told to give it back: `bench.py` does so.
    """
    seen: list[int] = []
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield seen
        torch.cuda.synchronize()
        seen += [before, torch.cuda.max_memory_allocated()]
        return
    process, done = psutil.Process(), threading.Event()
    before = highest = process.memory_info().rss

    def look() -> None:
        nonlocal highest
        while not done.wait(POLL):
            highest = max(highest, process.memory_info().rss)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()
    seen += [before, max(highest, process.memory_info().rss)]


def check_meter(device: torch.device) -> float:
    """Returns the meter's reading of a known allocation that is freed again, as a share of it.

    Raises:
        RuntimeError: it is off by more than a twentieth.
    """
    with peak_memory(device) as seen:
        known = torch.ones(KNOWN // 4, device=device)
        time.sleep(0.02)
        del known
    share = (seen[1] - seen[0]) / KNOWN
    if abs(share - 1) > 0.05:
        raise RuntimeError(f"the meter sees {share:.2f} of an allocation of {KNOWN:,} bytes")
    return share
