"""Keeps steps for `grpo replay`, and restores them.

Each is an interrupted checkpoint of the step's beginning.

    replay/step-7/training/shards/     the weights before step 7's first update, a moved reference,
                                       and, with several updates, the optimizer's state
    replay/step-7/training/state.pt    the state of the run, with the rollouts of all processes
    replay/step-7/training/...         recipe.yaml, config and tokenizer, manifest.json

It has the format of `resume.save_interrupted` for a run that is stopped mid-step, and also holds
the prompts: replaying a step needs neither data, rewards, environments, engine nor trackers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import transformers

from grpo_cli.checkpoints import checkpointer, manifest, paths, provenance
from grpo_cli.checkpoints.checkpointer import Checkpointer
from grpo_cli.config import saved_recipe
from grpo_cli.config.recipe import Recipe
from grpo_cli.config.renamed import drop_schedules
from grpo_cli.data.prompts import PromptStream
from grpo_cli.distributed.stop_signal import Interrupts
from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.files import read_yaml
from grpo_cli.generation.base import Generator
from grpo_cli.models.loading import load_model
from grpo_cli.models.policy import Policy
from grpo_cli.models.vision import VisionProcessor, as_entry, of_entry
from grpo_cli.random_streams import derive_seed
from grpo_cli.records import Prompt
from grpo_cli.reporting.hub import Pusher
from grpo_cli.reporting.reporter import Reporter
from grpo_cli.scoring.scorer import Scorer
from grpo_cli.training import loop, prepare, resume
from grpo_cli.training.callbacks import Event
from grpo_cli.training.rollouts.queue import RolloutQueue
from grpo_cli.training.run import Run
from grpo_cli.training.step import begin

ENTRY = "replay"  # entry of the state that only kept steps have


class KeptSteps:
    """Starts to write each step that `log.keep_steps` names, before its first update.

    A full disk or a missing file only prints a note (see `Checkpointer.save`).
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_rollouts(self, event: Event) -> None:
        run, number, progress = self.run, event.step + 1, self.run.recovery.progress
        assert progress is not None, "the rollouts are there"
        if number not in run.recipe.log.keep_steps or progress.updates:  # kept before a resume
            return
        own_prompts: dict[int, dict[str, Any]] | str
        try:
            own_prompts = {g.prompt_index: as_entry(g.prompt) for g in event.groups}
        except TrainingError as error:  # an unreadable file of a prompt
            own_prompts = str(error)
        prompts = run.workers.gather(own_prompts)
        if failed := next((found for found in prompts if isinstance(found, str)), None):
            run.reporter.say(f"note: step {number} is not kept for grpo replay: {failed}")
            return
        own: dict[str, Any] = {
            "carried": [[] for _ in range(run.workers.size)],  # groups for later steps
            "stream": None,
            "lengths": {},
            "log_history": "[]",
            ENTRY: {
                "prompts": prompts,
                "model": run.policy.model.name_or_path,  # the run's initial model
                "samples_from_policy": run.generator.samples_from_policy,
                "prefetch_steps": run.generator.prefetch_steps,
            },
        }
        update = run.recipe.update
        run.checkpointer.save(
            paths.kept_path(run.folder, number),
            resume.parts_of(run, keeps_optimizer=update.num_iterations * update.minibatches > 1),
            resume.state_of(run, []) | own,
            saved_recipe.as_yaml(run.recipe),
            run.policy.processor,
            with_model=False,
        )


class KeptPrompts(PromptStream):
    """The prompts of a kept step, by their index in the run."""

    def __init__(self, saved: Mapping[str, Any], vision: VisionProcessor | None) -> None:
        """Reads the prompts from a state of `checkpointer.load_state`."""
        rows = {n: row for part in saved[ENTRY]["prompts"] for n, row in part.items()}
        self.found = {
            entry["position"]: of_entry(rows[entry["position"]], list(entry["prompt_ids"]), vision)
            for part in saved["work"]["own"]
            for entry in part
        }
        super().__init__([*self.found.values()], 0, False)

    def prompt_at(self, position: int) -> Prompt:
        return self.found[position]


class StoredCompletions(Generator):
    """Replaces the engine that sampled the stored completions; it samples nothing."""

    def __init__(self, saved: dict[str, Any]) -> None:
        self.samples_from_policy = saved["samples_from_policy"]
        self.prefetch_steps = saved["prefetch_steps"]


class NoInterrupts(Interrupts):
    """Never interrupts the current work: there is nothing to save."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers

    def begin_step(self) -> None:
        pass

    def is_due(self) -> bool:
        return False


class Recomputed(NamedTuple):
    """The recomputed update of a kept step."""

    metrics: dict[str, float]
    device: str
    processes: int  # that took the step in the run


def recompute(folder: Path, path: Path, device: str | None, trust: bool = True) -> Recomputed:
    """Recomputes the update of a kept step; see `restore` for the arguments and errors."""
    run, processes = restore(folder, path, device, trust)
    step = begin(run)
    assert step.batch is not None, "a kept step has its rollouts"
    samples = loop.make_samples(run, step, step.batch)
    return Recomputed(loop.update_policy(run, step, samples), str(run.workers.device), processes)


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
    stored = read_yaml(path / provenance.RECIPE)
    drop_schedules(stored)
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
        recipe=recipe,
        folder=folder,
        lock=None,
        workers=workers,
        interrupts=interrupts,
        policy=Policy.make(loaded, recipe, workers, interrupts, reporter.say),
        generator=generator,
        queue=RolloutQueue(recipe, prompts, workers, generator, loaded.tokenizer),
        scorer=Scorer({}, [], ""),
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
