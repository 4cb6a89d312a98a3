"""The engines by name, and the way from a recipe's `generation.engine` to one of them.

An engine of your own needs no line here: `generation.engine=my_module:MyEngine` names a subclass of
`Generator`, which reads what it needs from the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_cli.config.schema import Generation, Recipe
from grpo_cli.config.user_code import import_module
from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import UserError, listed, nearest
from grpo_cli.generation.base import EngineSetup, Generator
from grpo_cli.models import loading
from grpo_cli.records import Prompt

ENGINES = {
    "transformers": "grpo_cli.generation.transformers:TransformersGenerator",
    "vllm_colocate": "grpo_cli.generation.vllm.colocate:ColocatedGenerator",
    "vllm_server": "grpo_cli.generation.vllm.server:ServerGenerator",
}


def engine_class(name: str) -> type[Generator]:
    """Returns the engine of a name in `ENGINES`, or of `module:Class`.

    Raises:
        UserError: no such name, or no such engine in the module.
    """
    path = ENGINES.get(name, name)
    module_name, _, attribute = path.partition(":")
    if not attribute:
        raise UserError(
            f"generation.engine = {name}: there is no such engine; there are {listed(ENGINES)}, or "
            f"write your own as my_module:MyEngine.{nearest(name, ENGINES)}"
        )
    module = import_module(module_name, f"generation.engine = {name}")
    found = getattr(module, attribute, None)
    if not (isinstance(found, type) and issubclass(found, Generator)):
        raise UserError(
            f"generation.engine = {name}: {module_name} has no subclass {attribute!r} of "
            "grpo_cli.generation.base.Generator."
        )
    return found


def check_settings(recipe: Recipe) -> None:
    """Raises a UserError with a line for each setting that the recipe's engine refuses."""
    problems = list(engine_class(recipe.generation.engine).contradictions(recipe))
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))


def check_tokens(generation: Generation, size: int) -> None:
    """Raises a UserError if a setting names a token that a vocabulary of `size` tokens lacks."""
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        for token in getattr(generation, name):
            if not 0 <= token < size:
                raise UserError(
                    f"generation.{name}: {token} is no token of the model, whose ids are 0 to "
                    f"{size - 1}."
                )


def make_generator(
    recipe: Recipe,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    workers: Workers,
    prompts: Sequence[Prompt],
    say: Callable[[str], None],
) -> Generator:
    """Returns the engine that the recipe names, sampling from `model`.

    Args:
        prompts: all that it will be given; the longest sets how much room it needs.

    Raises:
        UserError: the engine cannot be started with this model and these settings.
    """
    check_tokens(recipe.generation, model.config.get_text_config().vocab_size)
    eos_ids = {*loading.eos_ids(model, tokenizer), *recipe.generation.stop_token_ids}
    sampled = recipe.generation.allowed_token_ids
    if sampled and not eos_ids.intersection(sampled):
        say("note: no token of generation.allowed_token_ids ends a completion")
    setup = EngineSetup(recipe, model, tokenizer, sorted(eos_ids), workers, prompts, say)
    return engine_class(recipe.generation.engine).make(setup)
