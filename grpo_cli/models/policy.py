"""The policy: the model that a run trains, with all that its numbers depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_cli.config.recipe import Recipe
from grpo_cli.distributed.fsdp import norm_of
from grpo_cli.distributed.stop_signal import Interrupts
from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import UserError
from grpo_cli.models import adapters, flops, loading, optimizers
from grpo_cli.models.loading import LoadedModel
from grpo_cli.models.micro_batches import MicroBatchBudget, MicroBatcher
from grpo_cli.models.policy_logprobs import PolicyLogprobs
from grpo_cli.models.reference import AdapterReference, Reference
from grpo_cli.models.routers import RouterRecorder, balancing_coefficient
from grpo_cli.records import Prompt, has_images

COMPILE_BACKEND = "inductor"  # torch.compile's backend; the others generate no code


class Policy:
    """The model that a run trains, with its reference and its optimizer.

    Attributes:
        logprobs: computes log-probabilities in the forward mode that has been checked.
        reference: the reference policy; None without a KL term.
        scaler: loss scale, with mixed_precision=fp16.
        router_coef: weight of the load-balancing loss of experts.
        peak_flops: peak FLOP/s of the device in the dtype of the computation; NaN if unknown.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        logprobs: PolicyLogprobs,
        optimizer: torch.optim.Optimizer,
        workers: Workers,
        interrupts: Interrupts,
        budget: MicroBatchBudget,
        *,
        reference: Reference | None = None,
        router_coef: float = 0.0,
        reads_images: bool = False,
    ) -> None:
        """Combines the parts of a policy; reads_images: whether the data has images."""
        self.model, self.tokenizer, vision, self.processor = loaded
        self.logprobs, self.reference = logprobs, reference
        self.optimizer, self.scaler = optimizer, workers.grad_scaler()
        self.workers, self.router_coef = workers, router_coef
        dtype = workers.half_type or self.model.dtype
        self.peak_flops = flops.peak_flops(workers.device, dtype)
        if router_coef:
            logprobs.routers = RouterRecorder(self.model)
        self.micro_batches = MicroBatcher(
            workers, interrupts, budget, optimizer, logprobs, reference,
            vision if reads_images else None,
        )  # fmt: skip

    @classmethod
    def make(
        cls,
        loaded: LoadedModel,
        recipe: Recipe,
        workers: Workers,
        interrupts: Interrupts,
        say: Callable[[str], None],
        prompts: Sequence[Prompt] = (),
    ) -> Policy:
        """Places a loaded model, and makes its reference and its optimizer. Collective.

        Args:
            prompts: all prompts of the run that are known.

        Raises:
            UserError: the load of the model's experts cannot be balanced with model.compile.
        """
        model = loaded.model
        router_coef = balancing_coefficient(model, recipe.loss.router_aux_loss_coef)
        if router_coef and recipe.model.compile:
            raise UserError(
                f"model.compile: the load-balancing loss of experts (weight {router_coef:g}) reads "
                "outputs inside the layers; set loss.router_aux_loss_coef=0 or model.compile=false."
            )
        is_adapted = adapters.attached_config(model) is not None
        is_copied = recipe.needs_reference and not is_adapted
        frozen = loading.frozen_copy(model) if is_copied else None
        logprobs = make_logprobs(workers.place(model), recipe, workers, say)
        reference: Reference | None = None
        if frozen is not None:
            reference = Reference(make_logprobs(workers.place(frozen), recipe, workers, say))
        elif recipe.needs_reference:
            reference = AdapterReference(make_logprobs(model, recipe, workers, say))
        budget = MicroBatchBudget(
            recipe.update.tokens_per_micro_batch,
            say if workers.is_main else partial(print, f"process {workers.rank}:"),
            runs_in_lockstep=workers.runs_in_lockstep,
        )
        optimizer = optimizers.make(recipe.optimizer, model, offload=recipe.distributed.offload)
        return cls(
            loaded, logprobs, optimizer, workers, interrupts, budget,
            reference=reference, router_coef=router_coef,
            reads_images=recipe.dataset.streaming or has_images(prompts),
        )  # fmt: skip

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of a micro-batch's loss."""
        self.workers.backward(self.scaler.scale(loss))

    def gradient_norm(self, largest: float | None) -> float:
        """Sums the gradient over processes and clips it; returns the norm before clipping.

        Args:
            largest: maximum norm after clipping; None: no clipping.
        """
        self.workers.sum_gradients(self.model.parameters())
        self.scaler.unscale_(self.optimizer)
        return norm_of(self.model.parameters(), largest)

    def step(self) -> None:
        """Takes an optimizer step, unless a scaled gradient has overflowed; drops the gradient."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drops the gradient."""
        self.optimizer.zero_grad(set_to_none=True)

    def checks(self) -> dict[str, dict[str, str]]:
        """Returns the results of the forward modes' self-checks, for a checkpoint."""
        found = {"policy": self.logprobs.checks()}
        if self.reference is not None:
            found["reference"] = self.reference.logprobs.checks()
        return found

    def restore_checks(self, stored: Mapping[str, Any]) -> None:
        """Restores the results that `checks` has returned."""
        self.logprobs.restore_checks(stored["policy"])
        if self.reference is not None and "reference" in stored:
            self.reference.logprobs.restore_checks(stored["reference"])


def make_logprobs(
    model: PreTrainedModel, recipe: Recipe, workers: Workers, say: Callable[[str], None]
) -> PolicyLogprobs:
    """Returns the `PolicyLogprobs` of a placed model."""
    return PolicyLogprobs(
        model,
        compile_backend=COMPILE_BACKEND if recipe.model.compile else None,
        autocast=workers.autocast,
        say=say,
        agree_on=workers.agree,
    )
