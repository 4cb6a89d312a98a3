"""Finds and makes the engine that `generation.engine` names.

A new engine needs no line here: `generation.engine`, as in a file of recipes/generation/, names a
subclass of `Generator` as `module:Class`, which reads what it needs from the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_cli.config.recipe import Recipe
from grpo_cli.config.user_code import import_module
from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import UserError, listed, nearest
from grpo_cli.generation.base import EngineSetup, Generator
from grpo_cli.models import loading
from grpo_cli.records import Prompt

ENGINES = {
    "transformers": "grpo_cli.generation.embedded.generator:TransformersGenerator",
    "vllm_colocate": "grpo_cli.generation.vllm.colocate:ColocatedGenerator",
    "vllm_server": "grpo_cli.generation.vllm.server:ServerGenerator",
}


def engine_class(name: str) -> type[Generator]:
    """Returns the engine class for a name in `ENGINES` or for `module:Class`.

    Raises:
        UserError: the name is unknown, or the module has no such engine.
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
        prompts: all prompts of the run; the longest sizes the caches.

    Raises:
        UserError: the engine cannot be started with this model and these settings.
    """
    eos_ids = {
        *loading.eos_ids(model.generation_config, tokenizer),
        *recipe.generation.stop_token_ids,
    }
    size = model.config.get_text_config().vocab_size
    for name in ("stop_token_ids", "logit_bias"):
        for token in getattr(recipe.generation, name):
            if not 0 <= token < size:
                raise UserError(f"generation.{name}: {token} must be from 0 to {size - 1}.")
    engine = engine_class(recipe.generation.engine)
    setup = EngineSetup(recipe, model, tokenizer, sorted(eos_ids), workers, prompts, say)
    return engine.make(setup)
