"""Names of metrics that several parts of the reporting use. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STAGES = (  # the stages of a step, in order
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
    """Returns the name of the evaluation metric to print: accuracy or reward.

    The accuracy is the share of completions whose reward is 1. It is not informative if the reward
    has values other than 0 and 1; the mean of the reward is printed then.
    """
    return "reward" if f"{prefix}graded" in metrics else "accuracy"
