"""Names of metrics that several parts of the reporting use. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
SHORT = {"old_logprobs": "old", "ref_logprobs": "ref", "forward_backward": "fwd/bwd"}


def measure_of(metrics: Mapping[str, Any], prefix: str = "eval/") -> str:
    """Returns which number of an evaluation to print: accuracy or reward.

    The accuracy is the share of completions whose reward is 1. It says nothing where the reward has
    values other than 0 and 1; then it is the mean of the reward.
    """
    return "reward" if f"{prefix}graded" in metrics else "accuracy"
