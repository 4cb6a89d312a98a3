"""A run that computes log-probabilities and updates, and has nothing else."""

from types import SimpleNamespace
from typing import Any, cast

import torch

from grpo_cli.config.recipe import Recipe
from grpo_cli.distributed.stop_signal import Interrupts
from grpo_cli.distributed.workers import Workers
from grpo_cli.models.loading import LoadedModel
from grpo_cli.models.micro_batches import MicroBatchBudget
from grpo_cli.models.policy import Policy
from grpo_cli.models.policy_logprobs import PolicyLogprobs
from grpo_cli.models.reference import Reference
from grpo_cli.training.run import Run


def partial_run(
    workers: Workers,
    policy_logprobs: PolicyLogprobs,
    budget: MicroBatchBudget,
    optimizer: torch.optim.Optimizer,
    *,
    recipe: Recipe | None = None,
    reference: Reference | None = None,
) -> Run:
    never = cast(Any, SimpleNamespace(is_requested=False))
    interrupts = Interrupts(workers, never, lambda usual: 0.0, save_seconds=0.0)
    absent = cast(Any, dict.fromkeys(
        ("folder", "lock", "generator", "scorer", "reporter", "checkpointer", "pusher")
    ))  # fmt: skip
    return Run(
        recipe=recipe or Recipe(),
        workers=workers,
        interrupts=interrupts,
        policy=Policy(
            LoadedModel(policy_logprobs.model, cast(Any, None), None, None),
            policy_logprobs,
            optimizer,
            workers,
            interrupts,
            budget,
            reference=reference,
        ),
        queue=cast(Any, SimpleNamespace(prefetch_steps=0)),
        **absent,
    )
