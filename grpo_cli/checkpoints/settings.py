"""Declares the knobs of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_cli.config.knob import at_least_0, at_least_1, knob


@dataclass
class Checkpoint:
    """Checkpoints: when they are written, and which of them are kept."""

    every: int = at_least_0(
        100,
        "Save a checkpoint every N steps; 0: only when the run ends, as a model folder from which "
        "it cannot be resumed.",
    )
    keep_last: int = at_least_1(
        2,
        "Number of newest checkpoints to keep; the best one is also kept, without the optimizer's "
        "state.",
    )
    model: str = knob(
        "auto",
        "Add a model folder to each checkpoint, as `grpo export` makes one; auto: up to 8 GB, and "
        "for each checkpoint that hub.repo gets; an adapter always has its folder.",
        choices=("auto", "always", "never"),
    )
    grace: float = at_least_0(
        30.0,
        "Seconds between a SIGTERM, SIGHUP or SIGUSR1 and the end: a longer step is interrupted "
        "between two micro-batches and continued by resume=auto.",
    )
