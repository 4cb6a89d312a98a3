"""Where a step's time goes: seconds by stage, tokens per second, model FLOP utilisation."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from grpo_cli import heartbeat
from grpo_cli.config import Recipe
from grpo_cli.outcomes import WholeStep

STAGES = (  # of a step, in their order
    "generate",
    "reward",
    "old_logprobs",
    "ref_logprobs",
    "forward_backward",
    "optimizer",
    "weights",
    "idle",  # this process waits for the others
)


def possible_stages(recipe: Recipe, reference: bool, processes: int) -> list[str]:
    """Stages that a step of this recipe can have: its metrics name each, 0 where it had none.

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
    """Seconds by stage of one step on this process, from the moment it is made."""

    def __init__(
        self,
        device: torch.device,
        stages: Iterable[str] = (),
        peak: float = math.nan,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Starts the step.

        Args:
            stages: those to be reported even if they take no time; others are once they happen.
            peak: what the device can do in FLOPs a second; without it there is no utilisation.
        """
        self.device, self.peak, self.timer = device, peak, timer
        self.seconds = dict.fromkeys(stages, 0.0)
        self.flops: dict[str, float] = {}
        self._inside: list[float] = []  # of each open stage, the seconds of stages within it
        self.start = timer()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to `time/name`, and takes it off the stage around it.

        Waits for the GPU at its end; within another stage also at its start, so that what was
        launched before is the outer one's.
        """
        if self._inside:
            self._synchronize()
        self._inside.append(0.0)
        start = self.timer()
        try:
            with heartbeat.inside(name):
                yield
            self._synchronize()
        finally:
            spent = self.timer() - start
            own = spent - self._inside.pop()
            self.seconds[name] = self.seconds.get(name, 0.0) + own
            if self._inside:
                self._inside[-1] += spent

    def count(self, stage: str, flops: float) -> None:
        """Adds model FLOPs of this process to a stage; NaN where nobody knows how many."""
        self.flops[stage] = self.flops.get(stage, 0.0) + flops

    def metrics(self, whole_step: WholeStep) -> dict[str, float]:
        """Seconds by stage, tokens per second and utilisation of the step that ends now.

        The utilisation of a stage is there if its FLOPs and the peak are known and it took time.
        """
        total = self.timer() - self.start
        tokens = sum(o.prompt_tokens + o.tokens for group in whole_step.values() for o in group)
        stages = {f"time/{name}": s for name, s in self.seconds.items()}
        attainable = {name: self.seconds.get(name, 0.0) * self.peak for name in self.flops}
        used = {f"mfu/{n}": f / attainable[n] for n, f in self.flops.items() if attainable[n]}
        known = {name: share for name, share in used.items() if math.isfinite(share)}
        return {**stages, "step_time": total, "tokens_per_second": tokens / total, **known}

    def _synchronize(self) -> None:
        if self.device.type == "cuda":  # kernels run on after their launch returns
            torch.cuda.synchronize(self.device)
