"""Rebuilds the parts of a run that the update of a kept step needs, in one process.

It needs no data, rewards, environments, engine or trackers, since the rollouts are stored.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import transformers

from grpo_cli.checkpoints import checkpointer, manifest, provenance
from grpo_cli.checkpoints.checkpointer import Checkpointer
from grpo_cli.config.recipe import Recipe
from grpo_cli.distributed.interrupts import Interrupts
from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import UserError
from grpo_cli.generation.base import Generator
from grpo_cli.models.loading import load_model
from grpo_cli.models.policy import Policy
from grpo_cli.random_streams import derive_seed
from grpo_cli.reporting.hub import Pusher
from grpo_cli.reporting.reporter import Reporter
from grpo_cli.scoring.scorer import Scorer
from grpo_cli.training import prepare, resume
from grpo_cli.training.kept_steps import ENTRY, KeptPrompts
from grpo_cli.training.rollouts.queue import RolloutQueue
from grpo_cli.training.run import Run
from grpo_cli.training.stop_rules import StopRules


class StoredCompletions(Generator):
    """Replaces the engine that sampled the stored completions; it samples nothing."""

    def __init__(self, saved: dict[str, Any]) -> None:
        self.samples_from_policy = saved["samples_from_policy"]
        self.prefetch_steps = saved["prefetch_steps"]


class NoInterrupts(Interrupts):
    """Never interrupts the present work: there is nothing to save."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers

    def begin_step(self) -> None:
        pass

    def is_due(self) -> bool:
        return False


def restore(folder: Path, path: Path, device: str | None, trust: bool = True) -> tuple[Run, int]:
    """Returns the run before the step's first update, and how many processes took the step.

    Args:
        folder: the run's folder.
        path: the kept step's folder.
        device: device to compute on; None: the run's.
        trust: whether any model that the step names is loaded.

    Raises:
        UserError: the step is damaged or of another version, or the model is gone; its recipe
            cannot be read, or this version does not take it.
    """
    if wrong := manifest.verify(path):
        raise UserError(f"{path}: {wrong}; resume the run before this step to keep it again.")
    saved = checkpointer.load_state(path)
    own = saved[ENTRY]
    if not trust:
        provenance.check(path, provenance.refused_model("model", own["model"], folder), "--trust")
    stored = provenance.read(path)
    recipe = prepare.parse({key: value for key, value in stored.items() if key != "defaults"})
    # One process shards nothing; FSDP2's offload changes no number.
    distributed = dataclasses.replace(recipe.distributed, strategy="ddp", offload="none")
    device = device or recipe.device
    recipe = dataclasses.replace(recipe, distributed=distributed, device=device)
    workers = Workers(recipe.device, recipe.mixed_precision, recipe.distributed)
    reporter = Reporter(recipe, folder, main=False)  # it writes and prints nothing
    transformers.set_seed(derive_seed(recipe.seed, 0) % 2**32)
    if Path(own["model"]).is_absolute() and not Path(own["model"]).is_dir():
        raise UserError(
            f"{path}: the model that its run began with, {own['model']}, is gone; a kept step "
            "holds the trained weights, and the rest is read from there."
        )
    loaded = load_model(own["model"], recipe, workers, reporter.say, trains=True)
    generator, interrupts = StoredCompletions(own), NoInterrupts(workers)
    prompts = KeptPrompts(saved, loaded.vision)
    run = Run(
        stop_rules=StopRules(recipe.stop),
        recipe=recipe,
        folder=folder,
        lock=None,
        workers=workers,
        interrupts=interrupts,
        policy=Policy.make(loaded, recipe, workers, interrupts, reporter.say),
        generator=generator,
        queue=RolloutQueue(recipe, prompts, workers, generator, loaded.tokenizer),
        scorer=Scorer({}, [], ""),
        evaluator=None,
        reporter=reporter,
        checkpointer=Checkpointer(workers, reporter.say),
        pusher=Pusher(Recipe(), reporter.say, main=False),
    )
    resume.restore_state(run, path)
    if run.recovery.progress is None:
        raise UserError(
            f"{path}: was kept by another version of grpo, whose knobs of loss, sampling or "
            "rewards are others; replay it with that version."
        )
    return run, len(saved["rng"])
