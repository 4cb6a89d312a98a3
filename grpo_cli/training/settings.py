"""Declares the knobs of a run: its own, and those of updates, stop rules and callbacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from grpo_cli.config.knob import above_0, at_least_0, at_least_1, knob, text


@dataclass
class Callback:
    """A class of the user's own whose methods are called during the run."""

    path: str = knob("", "Class with methods such as on_step or on_end, as my_module:MyCallback.")
    args: dict[str, Any] = knob({}, "Keyword arguments of the callback's class.")


@dataclass
class Update:
    """The update on one step's batch of completions."""

    num_iterations: int = at_least_1(1, "Passes over the completions of one step.")
    minibatches: int = at_least_1(1, "Optimizer steps in one pass, each on complete groups.")
    tokens_per_micro_batch: int | None = at_least_1(
        None,
        "Tokens in one backward; null: by free memory. Halved when memory runs out; changes "
        "memory use, never the gradient.",
    )


@dataclass
class Stop:
    """Rules that end a run before its last step, as completely as that step would end it."""

    zero_gradient: int = at_least_0(
        0,
        "Steps in a row in which no completion has an advantage, after which the run ends; 0: "
        "never.",
    )
    hours: float | None = above_0(
        None,
        "Hours of training, evaluating and saving, over all starts of the run, after which it "
        "ends; null: no limit.",
    )
    max_kl: float | None = above_0(
        None, "Largest KL to the reference, in nats a token; null: no limit."
    )
    accuracy: float | None = knob(
        None,
        "Held-out accuracy, or value of the metric that eval.best names, at which the run ends; "
        "null: no limit.",
        read_if=("eval.every",),
    )


@dataclass
class RunSettings:
    """The recipe's own knobs, which belong to no section."""

    recipe: str = text("", "Name of the recipe; set by the command line.")
    description: str = text("", "One-line description, shown by `grpo recipes`.")
    output_dir: str = knob("outputs/${recipe}", "Folder that the run writes to.", of_start=True)
    overwrite: bool = knob(False, "Discard an earlier run in output_dir.", of_start=True)
    resume: str | None = knob(
        None,
        "Checkpoint to resume from: a path, or `auto` for the newest in output_dir, if any.",
        training=True,
        of_start=True,
    )
    resume_changed: bool = knob(
        False,
        "Resume although data or tokenizer have other contents than the checkpoint was trained "
        "with.",
        read_if=("resume",),
        training=True,
        of_start=True,
    )
    seed: int = at_least_0(0, "Seed of all random numbers.", lt=2**32, decides="completions")
    steps: int = at_least_1(
        100,
        "Number of training steps; each samples one batch of completions and trains on it.",
        training=True,
        without_effect=True,
    )
    epochs: float | None = above_0(
        None,
        "Length of the run in passes over the training prompts, which replaces `steps`; null: "
        "`steps` decides.",
        training=True,
        without_effect=True,
    )
    prompts_per_step: int = at_least_1(
        32, "Prompts in one step, over all processes.", training=True
    )
    device: str = knob(
        "auto",
        "Device to run on; auto: CUDA, else MPS, else CPU.",
        choices=("auto", "cpu", "cuda", "mps"),
        without_effect=True,
    )
    mixed_precision: str = knob(
        "no",
        "Data type of the forward and backward arithmetic; no: that of the weights. fp16 scales "
        "the loss, so that small gradients do not become 0, and skips an optimizer step whose "
        "gradients overflow.",
        choices=("no", "bf16", "fp16"),
    )

    def problems(self) -> Iterator[str]:
        """Yields messages about values that contradict one another."""
        if not self.output_dir:
            yield "output_dir: is empty; name a folder."
