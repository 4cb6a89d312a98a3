"""`grpo plan`: predicts the memory of a recipe without loading weights."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from omegaconf import DictConfig

from grpo_cli.config.command_line import split_options
from grpo_cli.config.compose import compose_and_call, given_keys
from grpo_cli.config.knob import knob
from grpo_cli.config.words import check_recipe_words, described, parse, split
from grpo_cli.errors import UserError

USAGE = """\
grpo plan [FILE | recipe=NAME] [gpu=h100-80gb gpus=8] [--json] [key=value ...]

Predicts the peak memory by stage of a step from the config of the model: no
weights are loaded. Says what to change where a run does not fit. Where the
recipe's folder holds a run, such as a trial of three steps (`grpo train
steps=3`), what it measured stands beside the plan.

"""


@dataclass
class PlanOptions:
    """The arguments of `grpo plan`; all others compose the recipe."""

    gpu: str | None = knob(
        None, "GPU by its name, such as h100-80gb, or by its memory in GB; null: this machine."
    )
    gpus: int = knob(1, "Number of GPUs that train, on all nodes together.", ge=1)
    prompt_tokens: int | None = knob(
        None,
        "Length of a prompt, in tokens; null: the mean of the training rows if they are local, "
        "else dataset.max_prompt_tokens.",
        ge=1,
    )


HELP = USAGE + described(PlanOptions)


def main(argv: list[str]) -> None:
    """Composes the recipe and prints its plan."""
    options, words = split_options(argv)
    as_json = "--json" in options
    own, rest = split(PlanOptions, words)
    check_recipe_words(PlanOptions, rest)
    settings = parse(PlanOptions, own)

    def task(cfg: DictConfig) -> None:
        from grpo_cli.planning import plan as planning
        from grpo_cli.reporting.run_folder import RunFolder
        from grpo_cli.training import prepare
        from grpo_cli.training.plan import plan_of

        recipe = prepare.parse(cfg, given_keys(cfg))
        try:
            recipe = prepare.resolved(recipe)
        except UserError:  # without a tokenizer the model's config is enough
            recipe.dataset.chat = False
            recipe = prepare.resolved(recipe)
        plan, notes = plan_of(recipe, **asdict(settings))
        changes = {} if plan.fits else planning.changes(plan)
        measured = (RunFolder(Path(recipe.output_dir)).plan() or {}).get("measured")
        if as_json:
            also = {"recipe": recipe.recipe, "notes": notes, "measured": measured}
            less = [{"set": w, "peak": round(c.peak), "fits": c.fits} for w, c in changes.items()]
            print(json.dumps(plan.as_json() | also | {"changes": less}, indent=2))
        else:
            print(planning.text_of(plan, changes, notes, measured), end="")

    compose_and_call([*rest, *(word for word in options if word != "--json")], task)
