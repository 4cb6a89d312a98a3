"""Reads the router logits of a mixture of experts while the model computes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_cli.errors import UserError
from grpo_cli.models.families import num_experts


class RouterRecorder:
    """Keeps the outputs of a model's routers, one of each layer, during a forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        k = experts_per_token(model)
        assert k is not None, "the model has a load-balancing loss"
        self.experts_per_token = k
        self.kept: list[Tensor] | None = None  # a list only while a forward pass is recorded
        recorder = recorder_of(model)
        for name, module in model.named_modules():
            named = recorder.layer_name is None or name.endswith(f".{recorder.layer_name}")
            if named and isinstance(module, recorder.target_class):
                module.register_forward_hook(self._keep(recorder.index))

    def _keep(self, index: int) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if self.kept is not None:  # gradient checkpointing computes a layer again later
                self.kept.append(output[index] if isinstance(output, tuple) else output)

        return keep

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Yields the list that the router logits of a forward pass are put into."""
        kept: list[Tensor] = []
        self.kept = kept
        try:
            yield kept
        finally:
            self.kept = None


def recorder_of(model: PreTrainedModel) -> Any:
    """Returns transformers' description of the routers' outputs; None if there is none."""
    outputs = getattr(model, "_can_record_outputs", None)
    recorder = outputs.get("router_logits") if isinstance(outputs, dict) else None
    return recorder if hasattr(recorder, "target_class") else None


def experts_per_token(model: PreTrainedModel) -> int | None:
    """Returns the number of experts that a token is routed to, if the config says it."""
    config = model.config.get_text_config(decoder=True)
    names = ("num_experts_per_tok", "moe_k")
    return next((k for name in names if (k := getattr(config, name, None))), None)


def balancing_coefficient(model: PreTrainedModel, wanted: float | None) -> float:
    """Returns the weight of the load-balancing loss.

    Args:
        wanted: loss.router_aux_loss_coef; None: `router_aux_loss_coef` of the model's config, as in
            TRL.

    Raises:
        UserError: a weight for a model that has no such loss in transformers.
    """
    config = model.config.get_text_config(decoder=True)
    if wanted is None:
        own = getattr(config, "router_aux_loss_coef", None) or 0.0
        return float(own) if has_balancing_loss(model) else 0.0
    if wanted and not has_balancing_loss(model):
        kind = "has no experts" if num_experts(config) is None else "balances its experts otherwise"
        raise UserError(
            f"loss.router_aux_loss_coef = {wanted:g}: a {config.model_type} model {kind}, and "
            "transformers has no load-balancing loss for it; leave loss.router_aux_loss_coef out."
        )
    return wanted


def has_balancing_loss(model: PreTrainedModel) -> bool:
    """Whether transformers has a load-balancing loss for the model, and its routers can be read."""
    config = model.config.get_text_config(decoder=True)
    modules = (sys.modules.get(kind.__module__) for kind in type(model).__mro__)
    return (
        any(hasattr(module, "load_balancing_loss_func") for module in modules)
        and bool(num_experts(config) and experts_per_token(model))
        and recorder_of(model) is not None
    )
