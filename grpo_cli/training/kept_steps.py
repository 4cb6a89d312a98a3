"""Keeps steps for `grpo replay`, each as an interrupted checkpoint of the step's beginning.

    replay/step-7/training/shards/     the weights before step 7's first update, a moved reference,
                                       and, with several updates, the optimizer's state
    replay/step-7/training/state.pt    the state of the run, with the rollouts of all processes
    replay/step-7/training/...         recipe.yaml, config and tokenizer, manifest.json

It has the format of `resume.save_interrupted` for a run that is stopped mid-step, and also holds
the prompts: replaying a step needs neither the data nor the rewards of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from grpo_cli.checkpoints import paths
from grpo_cli.checkpoints.shards import Parts
from grpo_cli.config import saved_recipe
from grpo_cli.data import PromptStream
from grpo_cli.images import ImageError, StoredImage
from grpo_cli.models.vision import VisionProcessor
from grpo_cli.records import Group, Prompt
from grpo_cli.training import resume
from grpo_cli.training.run import Run
from grpo_cli.training.step import Step

ENTRY = "replay"  # entry of the state that only kept steps have


def keep(run: Run, step: Step) -> None:
    """Starts to write a step that log.keep_steps names, before its first update. Collective.

    A full disk or a missing image only prints a note (see `Checkpointer.save`).
    """
    number = step.number + 1
    if number not in run.recipe.log.keep_steps or step.progress.updates:  # kept before a resume
        return
    own_prompts: dict[int, dict[str, Any]] | str
    try:
        own_prompts = prompts_of(step.progress.collected.groups)
    except ImageError as error:
        own_prompts = str(error)
    prompts = run.workers.gather(own_prompts)
    if failed := next((found for found in prompts if isinstance(found, str)), None):
        run.reporter.say(f"note: step {number} is not kept for grpo replay: {failed}")
        return
    moved = run.policy.reference.weights_to_save if run.policy.reference is not None else None
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
    run.checkpointer.save(
        paths.kept_path(run.folder, number),
        Parts(run.policy.model, run.policy.optimizer, moved, keeps_optimizer=step.num_updates > 1),
        resume.state_of(run, []) | own,
        saved_recipe.as_yaml(run.recipe),
        run.policy.processor,
        with_model=False,
    )


def prompts_of(groups: Sequence[Group]) -> dict[int, dict[str, Any]]:
    """Returns the row and the images of each prompt, which stored groups lack, by prompt index."""
    return {
        g.prompt_index: {
            "row": g.prompt.row,
            "images": [  # tensors of bytes load without pickle
                torch.frombuffer(bytearray(image.encoded()["bytes"]), dtype=torch.uint8)
                for image in g.prompt.images
            ],
        }
        for g in groups
    }


class KeptPrompts(PromptStream):
    """The prompts of a kept step, by their index in the run."""

    def __init__(self, saved: Mapping[str, Any], vision: VisionProcessor | None) -> None:
        """Reads the prompts from a state of `checkpointer.load_state`.

        Args:
            vision: the model's image processor.
        """
        rows = {n: row for part in saved[ENTRY]["prompts"] for n, row in part.items()}
        self.found = {}
        for entry in (entry for part in saved["work"]["own"] for entry in part):
            row = rows[entry["position"]]
            images = tuple(
                StoredImage(image.numpy().tobytes(), f"row {row['row']}") for image in row["images"]
            )
            self.found[entry["position"]] = Prompt(
                row["row"],
                list(entry["prompt_ids"]),
                "",
                {},
                images,
                vision if images else None,
            )
        super().__init__([*self.found.values()], 0, False)

    def prompt_at(self, position: int) -> Prompt:
        return self.found[position]
