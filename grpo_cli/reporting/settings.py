"""Declares the knobs of logs, trackers and the hub."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_cli.config.knob import at_least_0, at_least_1, knob


@dataclass
class Log:
    """Files and lines that a run writes in addition to metrics.jsonl."""

    completions_every: int = at_least_0(
        20,
        "Write the completions of a step every N steps, with the images of their prompts, and "
        "print the first; 0: never.",
    )
    report: bool = knob(
        True, "Write report.html when the run ends, as `grpo report RUN` does at any time."
    )
    keep_steps: list[int] = at_least_1(
        [],
        "Steps, counted from 1, of which the run keeps rollouts and weights in replay/step-N, so "
        "that grpo replay can recompute their loss and gradient.",
    )


@dataclass
class Tracking:
    """Trackers that receive the metrics in addition to metrics.jsonl."""

    backend: list[str] = knob(
        ["none"],
        "Experiment trackers that also receive the metrics; trackio and wandb also receive a table "
        "of the written completions.",
        choices=(
            "none", "aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard",
            "trackio", "wandb",
        ),
        trusted="never",
    )  # fmt: skip
    project: str = knob(
        "grpo",
        "Project name in the trackers; experiment name in MLflow.",
        read_if=(
            "tracking.backend", "clearml", "comet_ml", "mlflow", "swanlab", "trackio", "wandb",
        ),
    )  # fmt: skip
    name: str | None = knob(
        None,
        "Run name in the trackers; null: the name of the output folder.",
        read_if=(
            "tracking.backend", "aim", "clearml", "mlflow", "swanlab", "trackio", "wandb",
        ),
    )  # fmt: skip

    def problems(self) -> Iterator[str]:
        """Yields a message if a tracker is named twice, or none with others."""
        names = self.backend
        if not names or ("none" in names and len(names) > 1) or len({*names}) < len(names):
            yield f"tracking.backend = {names}: name each tracker once, or none."


@dataclass
class Hub:
    """Pushes to the Hugging Face Hub, with the token of HF_TOKEN or of `hf auth login`."""

    repo: str | None = knob(
        None,
        "Model repository on the hub, as owner/name or name, that checkpoints are pushed to in the "
        "background; a new one is private; null: none.",
    )
    strategy: str = knob(
        "every_save",
        "Pushes of the model: the last checkpoint when the run ends (end); every checkpoint, over "
        "the one before (every_save); and also the complete checkpoint, to the folder "
        "last-checkpoint of the repository, from which a run can resume (checkpoint).",
        choices=("end", "every_save", "checkpoint"),
        read_if=("hub.repo",),
    )
