"""Writes plan.json into a run's folder: what was predicted of memory and time, and measured.

{"predicted": ..., "measured": ..., "predicted_at_mean": ...}

The prediction is made when the run starts, for completions as long as they may be. What is measured
is added with each checkpoint and at the end, with the prediction for the mean length measured. The
times predicted here are assumed from the device's peak; `grpo plan` times the model.
"""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo_cli.errors import UserError
from grpo_cli.generation.embedded.products import is_faster_here
from grpo_cli.models.flops import peak_flops
from grpo_cli.models.memory import free_memory
from grpo_cli.planning import devices
from grpo_cli.planning.plan import Extent, Plan, kept_checkpoints, predict, rounded
from grpo_cli.planning.settings import Settings
from grpo_cli.planning.shapes import Shape
from grpo_cli.records import Prompt
from grpo_cli.reporting.memory_meter import MemoryMeter
from grpo_cli.reporting.reporter import write_text
from grpo_cli.reporting.run_folder import read_json
from grpo_cli.reporting.stage_clock import STAGES

if TYPE_CHECKING:
    from grpo_cli.training.run import Run

NAME = "plan.json"
STEPS = 200  # the last of a run, whose times count
# Of (mean length, longest; None: the limit), and the share of groups with a gradient.
Predict = Callable[[float | None, int | None, float], Plan]


@dataclass
class PlanRecord:
    """The prediction of a run, and what this process has measured of its steps."""

    path: Path
    device: str
    steps: int
    meter: MemoryMeter
    predict: Predict | None  # None: the model is not described
    predicted: dict[str, Any] | None
    why: str | None  # there is no prediction
    measured: dict[str, Any] | None = None
    at_mean: dict[str, Any] | None = None
    metrics: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=STEPS))

    def add(self, metrics: Mapping[str, float]) -> None:
        """Keeps the metrics of a step."""
        self.metrics.append(metrics)

    def write(self, micro_tokens: int | None) -> None:
        """Writes the file, with what is measured if a step is complete.

        A disk that is full ends no run for it.

        Args:
            micro_tokens: tokens of a micro-batch, as derived.
        """
        if self.metrics:
            self.measured = self._measured(micro_tokens)
            if self.predict is not None:
                names = ("completion_tokens", "longest_tokens", "signal")
                mean, longest, signal = (self.measured[name] for name in names)
                try:
                    self.at_mean = self.predict(mean, longest, signal).as_json()
                except Exception as error:  # no run ends for its prediction
                    self.why = reason(error)
        found = {
            "predicted": self.predicted,
            "why_not_predicted": self.why,
            "measured": self.measured,
            "predicted_at_mean": self.at_mean,
        }
        with suppress(OSError):
            write_text(self.path, json.dumps(found, indent=2) + "\n")

    def short(self) -> dict[str, Any]:
        """Returns prediction and measurement in short, for summary.json."""
        names = ("peak", "peak_stage", "step_seconds", "run_seconds")
        pairs = (
            ("predicted", self.predicted),
            ("predicted_at_mean", self.at_mean),
            ("measured", self.measured),
        )
        return {
            name: None if found is None else {n: found[n] for n in names} for name, found in pairs
        }

    def _measured(self, micro_tokens: int | None) -> dict[str, Any]:
        steps = list(self.metrics)
        steps = steps[1:] if len(steps) > 1 else steps  # the first one also makes and checks things

        def median(name: str) -> float:
            return rounded(statistics.median(m.get(name, 0.0) for m in steps))

        memory = {stage: self.meter.peaks[stage] for stage in STAGES if stage in self.meter.peaks}
        peak_stage = max(memory, key=lambda stage: memory[stage]) if memory else None
        flat = statistics.fmean(m.get("frac_reward_zero_std", 0.0) for m in steps)
        time = {s: median(f"time/{s}") for s in STAGES if f"time/{s}" in steps[0]}
        return {
            "memory": memory,
            "peak": memory[peak_stage] if peak_stage else None,
            "peak_stage": peak_stage,
            "time": {stage: seconds for stage, seconds in time.items() if seconds},
            "step_seconds": median("step_time"),
            "run_seconds": rounded(self.steps * median("step_time")),
            "tokens_per_step": rounded(
                statistics.median(m["step_time"] * m["tokens_per_second"] for m in steps)
            ),
            "flops_per_step": None,
            "tokens_per_micro_batch": micro_tokens,
            "completion_tokens": rounded(
                statistics.fmean(m.get("completions/mean_length", 0.0) for m in steps)
            ),
            "longest_tokens": round(max(m.get("completions/max_length", 0.0) for m in steps)),
            "signal": rounded(max(1 - flat, 0.01)),
            "steps_measured": len(steps),
            "device": self.device,
        }


def begin(run: Run, prompts: Sequence[Prompt]) -> PlanRecord:
    """Predicts the memory and the time of a run, and writes the file.

    Args:
        prompts: all that the run trains on.
    """
    device, path = run.workers.device, run.folder / NAME
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    predict_at, predicted, why = None, None, None
    try:
        predict_at = prediction(run, prompts)
        predicted = predict_at(None, None, 1.0).as_json()
    except Exception as error:  # no run ends for its prediction
        predict_at, why = None, reason(error)
    before = read_json(path) or {}  # of a run that is resumed
    record = PlanRecord(
        path,
        name,
        run.recipe.steps,
        MemoryMeter(device),
        predict_at,
        predicted,
        why,
        before.get("measured"),
        before.get("predicted_at_mean"),
    )
    record.write(None)
    return record


def reason(error: Exception) -> str:
    """Returns why there is no prediction; with its type, an error that is a fault of this code."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def prediction(run: Run, prompts: Sequence[Prompt]) -> Predict:
    """Returns what predicts the run for a mean length of completions.

    Raises:
        UserError: the model's shape is not described.
    """
    recipe, workers = run.recipe, run.workers
    shape = Shape.of(run.policy.config)
    dtype = workers.half_type or run.policy.dtype
    memory = float(free_memory(workers.device) + run.resident_bytes())
    device = devices.of_machine(workers.device, peak_flops(workers.device, dtype), memory)
    limit = recipe.generation.max_completion_tokens
    extent = Extent(recipe.steps, kept_checkpoints(recipe))
    derive = recipe.update.tokens_per_micro_batch is None
    mean_prompt = sum(len(p.ids) for p in prompts) / len(prompts)

    def predict_at(mean: float | None, longest: int | None, signal: float) -> Plan:
        most = min(longest or limit, limit)
        known: dict[str, Any] = {
            "prompt_tokens": max(round(mean_prompt), 1),
            "completion_tokens": min(mean or most, most),
            "max_completion_tokens": most,
            "decoded_rows": recipe.generation.max_num_seqs,
            "signal_share": signal,
            "prepacks": device.kind == "cpu" and is_faster_here(),
        }
        known |= {"micro_tokens": 1} if derive else {}
        settings = Settings.of(recipe, **known)
        return predict(shape, settings, device, workers.size, extent, derive=derive)

    return predict_at
