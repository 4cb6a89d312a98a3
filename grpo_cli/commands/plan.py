"""`grpo plan`: predicts the memory and the time of a recipe before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from grpo_cli.config.compose import compose_and_call, given_keys, split_options
from grpo_cli.config.knob import knob
from grpo_cli.config.words import check_recipe_words, described, parse, split
from grpo_cli.errors import UserError

if TYPE_CHECKING:
    from grpo_cli.training.plan.run_plan import Planned, Request

USAGE = """\
grpo plan [recipe=NAME] [gpus=8 gpu=h100-80gb nodes=1] [--json] [word=value ...] [key=value ...]

Predicts peak memory and time by stage of a step, the time of the run and the disk of its
checkpoints, from the config of the model: no weights are loaded. With gpu=NAME the figures follow
from the GPU's data sheet. Without it they are for this machine, where a model of the same shape
with random weights is timed for some seconds. Says what to change where a run does not fit.

"""


@dataclass
class Settings:
    """The words of `grpo plan`; all others compose the recipe."""

    gpu: str | None = knob(
        None, "GPU by its name, such as h100-80gb; null: this machine, measured for some seconds."
    )
    gpus: int = knob(1, "Number of GPUs that train, on all nodes together.", ge=1)
    nodes: int = knob(
        1, "Number of nodes; several: the link between nodes limits what is sent.", ge=1
    )
    mean_tokens: float | None = knob(
        None,
        "Mean length of a completion, in tokens; null: every completion is as long as "
        "generation.max_completion_tokens.",
        gt=0,
    )
    longest_tokens: int | None = knob(
        None,
        "Length of the longest completions, in tokens; null: generation.max_completion_tokens.",
        ge=1,
    )
    prompt_tokens: int | None = knob(
        None,
        "Length of a prompt, in tokens; null: the mean of the training rows if they are local, "
        "else dataset.max_prompt_tokens.",
        ge=1,
    )
    signal: float = knob(
        1.0, "Share of groups whose rewards differ, so that they have a gradient.", gt=0, le=1
    )
    utilisation: float | None = knob(
        None, "Share of a GPU's listed peak that training reaches; null: 0.4.", gt=0, le=1
    )


def main(argv: list[str]) -> None:
    """Composes the recipe and prints its plan.

    Raises:
        UserError: a mistake on the command line; the model's config cannot be read, or its shape
            is not described.
    """
    options, words = split_options(argv)
    if {"-h", "--help"} & {*options}:
        print(USAGE + described(Settings), end="")
        return
    as_json = "--json" in options
    options = [word for word in options if word != "--json"]
    settings, rest = split_words(words)

    def task(cfg: DictConfig) -> None:
        from grpo_cli.training import prepare
        from grpo_cli.training.plan import run_plan

        recipe = prepare.with_stored_dtype(prepare.parse(cfg, given_keys(cfg)))
        show(run_plan.plan_of(recipe, request(settings)), as_json)

    compose_and_call([*rest, *options], task)


def split_words(argv: Sequence[str]) -> tuple[Settings, list[str]]:
    """Returns (the settings of the plan, the words that compose the recipe)."""
    own, rest = split(Settings, argv)
    check_recipe_words(Settings, rest)
    settings = parse(Settings, own)
    if settings.gpus % settings.nodes:
        raise UserError(
            f"gpus = {settings.gpus}: must be a multiple of nodes = {settings.nodes}; gpus counts "
            "those of all nodes together."
        )
    return settings, rest


def request(settings: Settings) -> Request:
    """Returns what the plan is asked for."""
    from grpo_cli.training.plan.run_plan import Request

    return Request(**asdict(settings))


def show(planned: Planned, as_json: bool) -> None:
    """Prints a plan for people, or as JSON."""
    from grpo_cli.planning.plan import rounded

    if as_json:
        found = planned.plan.as_json() | {
            "recipe": planned.recipe.recipe,
            "changes": [
                {
                    "set": change.words,
                    "peak": round(change.plan.memory.peak),
                    "step_seconds": rounded(change.plan.step_seconds),
                    "fits": change.plan.fits,
                }
                for change in planned.changes
            ],
            "notes": list(planned.notes),
        }
        print(json.dumps(found, indent=2))
        return
    from grpo_cli.planning.text import text_of

    print(text_of(planned.recipe.recipe, planned.plan, planned.changes, planned.notes), end="")
