"""From a recipe's `generation.engine` to the generator, and the canary of those that need one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_cli import policy, sharding
from grpo_cli.canary import Canary, fixed_rows
from grpo_cli.config import Recipe
from grpo_cli.distributed import Workers
from grpo_cli.gathering import GatheringGenerator
from grpo_cli.generation import Generator, TransformersGenerator
from grpo_cli.likelihood import Likelihood
from grpo_cli.rollouts import Completion, Prompt, Rollout
from grpo_cli.vllm_settings import dtype_of


def make_generator(
    recipe: Recipe,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    workers: Workers,
    prompts: Sequence[Prompt],
    say: Callable[[str], None],
) -> Generator:
    """The generator that the recipe names, sampling from `model`.

    Args:
        prompts: all that it will be given; the longest sets how much room is needed.

    Raises:
        UserError: vLLM is not there or refuses the model; a server is not there or serves another.
    """
    eos_ids = policy.eos_ids(model, tokenizer)
    if recipe.generation.engine == "transformers":
        rows = recipe.generation.max_rows
        how: dict[str, Any] = {"tokenizer": tokenizer, "autocast": workers.autocast, "say": say}
        if sharding.is_sharded(model):
            dtype = torch.bfloat16 if workers.half else model.dtype
            return GatheringGenerator(model, eos_ids, rows, dtype, **how)
        return TransformersGenerator(model, eos_ids, rows, **how)
    canary = make_canary(recipe, model, workers, prompts) if recipe.generation.vllm.canary else None
    longest = max(len(p.ids) for p in prompts)
    if recipe.generation.engine == "vllm_colocate":
        from grpo_cli.vllm_colocate import ColocatedGenerator

        return ColocatedGenerator(
            recipe, model, str(model.name_or_path), longest, eos_ids, workers, canary
        )
    from grpo_cli.vllm_server import ServerGenerator

    return ServerGenerator(recipe, model, longest, eos_ids, workers, canary, say)


def make_canary(
    recipe: Recipe, model: PreTrainedModel, workers: Workers, prompts: Sequence[Prompt]
) -> Canary:
    """The canary of a run: the ends of its first prompts."""
    rows = fixed_rows([p.ids for p in prompts])
    rollouts = [
        Rollout(Prompt(0, row[:1], "", {}), Completion(row[1:], [0.0] * len(row[1:]), "stop"), "")
        for row in rows
    ]
    # The plainest way there is, whichever way the run has found for its own rollouts.
    likelihood = Likelihood(model, packed=False, chunked=False, autocast=workers.autocast)

    def of_trainer() -> list[list[float]]:
        with policy.inference(model):
            logprobs, _ = likelihood(rollouts, 1.0)
        both = zip(logprobs.tolist(), rollouts, strict=True)
        return [row[: len(r.completion.ids)] for row, r in both]

    return Canary(rows, of_trainer, dtype_of(recipe), recipe.generation.vllm.canary_tolerance)
