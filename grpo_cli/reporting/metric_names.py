"""Names of metrics that several parts of the reporting use. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STAGES = (  # the stages of a step, in order; in the last one a process waits for the others
    "generate", "reward", "old_logprobs", "ref_logprobs", "forward_backward", "optimizer",
    "weights", "idle",
)  # fmt: skip
LONGEST = 5  # stages in a line of times
SHORT = {"old_logprobs": "old", "ref_logprobs": "ref", "forward_backward": "fwd/bwd"}


def measure_of(metrics: Mapping[str, Any], prefix: str = "eval/") -> str:
    """Returns the name of the evaluation metric to print: accuracy or reward.

    The accuracy is the share of completions whose reward is 1. It is not informative if the reward
    has values other than 0 and 1; the mean of the reward is printed then.
    """
    return "reward" if f"{prefix}graded" in metrics else "accuracy"


def times(metrics: Mapping[str, Any]) -> str:
    """Formats a step's times as a line: stages, tokens a second, and MFU of the training.

    Stages below 1 % of the step are left out, and all but the longest LONGEST.
    """
    if not (total := metrics.get("step_time")):
        return ""
    stages = {
        SHORT.get(name, name): seconds
        for key, seconds in metrics.items()
        if key.startswith("time/") and "/" not in (name := key[5:]) and seconds >= 0.01 * total
    }
    longest = sorted(stages, key=stages.__getitem__)[-LONGEST:]
    parts = [
        f"{name} {s:.{2 if s < 1 else 1 if s < 100 else 0}f}"
        for name, s in stages.items()
        if name in longest
    ]
    line = [" · ".join([f"{part} s" for part in parts[:1]] + parts[1:])]
    if (rate := metrics.get("tokens_per_second")) is not None:
        line.append(f"{rate:,.0f} tok/s")
    if (used := metrics.get("mfu/forward_backward")) is not None:
        line.append(f"MFU {100 * used:.{0 if used >= 0.0995 else 1}f} %")
    return " | ".join(filter(None, line))
