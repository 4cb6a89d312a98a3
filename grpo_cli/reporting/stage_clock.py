"""Measures a step: seconds and peak memory by stage, tokens per second, model FLOP utilisation."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from grpo_cli.config.recipe import Recipe
from grpo_cli.distributed import heartbeat
from grpo_cli.records import StepStats
from grpo_cli.reporting.progress import STAGES


class MemoryMeter:
    """Keeps the peak number of bytes that torch allocated on this process's GPU in each stage."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peaks: dict[str, int] = {}

    def note(self, stage: str) -> None:
        """Counts the peak since the last call for a stage, and resets it."""
        highest = int(torch.cuda.max_memory_allocated(self.device))
        self.peaks[stage] = max(self.peaks.get(stage, 0), highest)
        self.skip()

    def skip(self) -> None:
        """Resets the peak without counting it for a stage."""
        torch.cuda.reset_peak_memory_stats(self.device)


def possible_stages(recipe: Recipe, reference: bool, processes: int) -> list[str]:
    """Returns the stages that a step of this recipe can have; each is a metric, 0 if skipped.

    Args:
        reference: whether there is a reference policy.
    """
    several_updates = recipe.update.num_iterations * recipe.update.minibatches > 1
    kl_in_reward = reference and recipe.loss.kl_in == "reward"
    can_be = {
        "old_logprobs": several_updates or kl_in_reward or recipe.generation.dynamic_sampling,
        "ref_logprobs": reference,
        "idle": processes > 1,
    }
    return [stage for stage in STAGES if can_be.get(stage, True)]


class Clock:
    """Measures the seconds of each stage of one step on this process."""

    def __init__(
        self,
        device: torch.device,
        stages: Iterable[str] = (),
        peak: float = math.nan,
        timer: Callable[[], float] = time.perf_counter,
        meter: MemoryMeter | None = None,
    ) -> None:
        """Starts the step.

        Args:
            device: the device whose kernels are waited for.
            stages: the stages that are reported even if they take no time.
            peak: the device's peak in FLOPs a second; NaN: no utilisation is reported.
            timer: returns seconds.
            meter: measures the peak memory of each stage; None: it is not measured.
        """
        self.device, self.peak, self.timer, self.meter = device, peak, timer, meter
        self.seconds = dict.fromkeys(stages, 0.0)
        self.flops: dict[str, float] = {}
        self._inside: list[float] = []  # for each open stage, the seconds of stages within it
        self._names: list[str] = []  # names of the open stages
        self.start = timer()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to `time/name`, and subtracts it from the outer stage.

        Waits for the GPU at its end; within another stage also at its start, so that kernels
        launched before count for the outer stage.
        """
        if self._inside:
            self._synchronize()
        if self.meter is not None:
            self.meter.note(self._names[-1]) if self._names else self.meter.skip()
        self._inside.append(0.0)
        self._names.append(name)
        start = self.timer()
        try:
            with heartbeat.inside(name):
                yield
            self._synchronize()
        finally:
            spent = self.timer() - start
            self._names.pop()
            if self.meter is not None:
                self.meter.note(name)
            self.seconds[name] = self.seconds.get(name, 0.0) + (spent - self._inside.pop())
            if self._inside:
                self._inside[-1] += spent

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Returns the stage of waiting for other processes; a single process has none."""
        return self.stage("idle") if "idle" in self.seconds else contextlib.nullcontext()

    def count(self, stage: str, flops: Callable[[], float]) -> None:
        """Adds model FLOPs of this process to a stage; calls `flops` only if the peak is known."""
        if not math.isnan(self.peak):
            self.flops[stage] = self.flops.get(stage, 0.0) + flops()

    def metrics(self, step_stats: StepStats) -> dict[str, float]:
        """Returns seconds by stage, tokens per second and utilisation of the step that ends now.

        The utilisation of a stage is reported if its FLOPs and the peak are known.
        """
        total = self.timer() - self.start
        tokens = sum(o.prompt_tokens + o.tokens for group in step_stats.values() for o in group)
        stages = {f"time/{name}": s for name, s in self.seconds.items()}
        at_peak = {name: f / self.peak for name, f in self.flops.items() if math.isfinite(f)}
        mfu = {f"mfu/{n}": s / self.seconds[n] for n, s in at_peak.items() if self.seconds.get(n)}
        return {**stages, "step_time": total, "tokens_per_second": tokens / total, **mfu}

    def _synchronize(self) -> None:
        if self.device.type == "cuda":  # a launch returns before its kernel ends
            torch.cuda.synchronize(self.device)
