"""`grpo probe`: the command line of a probe. probe_run.py runs it.

They are separate so that a mistake on the command line is found before torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig

from grpo_cli.config.command_line import split_options
from grpo_cli.config.compose import compose_and_call, given_keys
from grpo_cli.config.knob import knob
from grpo_cli.config.words import check_recipe_words, described, parse, recipe_key, split
from grpo_cli.errors import UserError
from grpo_cli.reporting.settings import Hub, Tracking

USAGE = """\
grpo probe [FILE | recipe=NAME] [key=value ...]

Samples from the untrained policy and says whether the run can learn. Takes what
`grpo train` takes, and samples and scores as it does, without training: pass
rates, the share of groups whose rewards differ by group size, endings, lengths,
rewards, and a verdict with settings to change. Writes
probe.json and completions.parquet (for `grpo show` and `grpo score`) to
outputs/probe/NAME, or to output_dir. Exit code 3: the run cannot learn as it
stands.

"""
WITHOUT: dict[str, Any] = {"resume": None, "resume_changed": False, "overwrite": False}


@dataclass
class ProbeOptions:
    """The arguments of `grpo probe`; all others compose the recipe."""

    prompts: int = knob(32, "Prompts to sample completions of, chosen at random.", ge=1)
    samples: int | None = knob(
        None,
        "Completions of each prompt; null: 16, or generation.num_generations if that is larger, "
        "and at most 64.",
        ge=2,
    )


HELP = USAGE + described(ProbeOptions)


def main(argv: list[str]) -> None:
    """Runs `grpo probe` with the words after it.

    Raises:
        UserError: a mistake on the command line, or in the recipe as `grpo train` would find it.
        TrainingError: the engine failed.
        CannotLearn: the run cannot learn as it stands.
    """
    options, words = split_options(argv, "grpo probe: probes one recipe")
    own, rest = split(ProbeOptions, words)
    settings = parse(ProbeOptions, own)
    check_recipe_words(ProbeOptions, rest)
    for word in rest:
        if recipe_key(word) in WITHOUT:
            raise UserError(f"{word}: is only read by grpo train; a probe replaces its files.")

    def task(cfg: DictConfig) -> None:
        from grpo_cli.training import prepare

        recipe = prepare.resolved(prepare.parse(cfg, given_keys(cfg)))
        if not any(word.startswith("output_dir=") for word in rest):
            recipe = replace(recipe, output_dir=f"outputs/probe/{recipe.recipe}")
        recipe = replace(recipe, **WITHOUT, tracking=Tracking(), hub=Hub())
        prepared = prepare.for_training(recipe)
        from grpo_cli.commands import probe_run

        try:
            probe_run.probe(prepared, settings.prompts, settings.samples)
        finally:
            prepared.close()

    compose_and_call([*rest, *options], task)
