"""Records the router logits of a mixture of experts during a forward pass."""

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
    """Records the outputs of a model's routers, one per layer, during a forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        k = experts_per_token(model)
        assert k is not None, "the model has a load-balancing loss"
        self.experts_per_token = k
        self.kept: list[Tensor] | None = None  # None: not recording
        recorder = recorder_of(model)
        index = recorder.index

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if self.kept is not None:  # None when gradient checkpointing recomputes a layer
                self.kept.append(output[index] if isinstance(output, tuple) else output)

        for name, module in model.named_modules():
            named = recorder.layer_name is None or name.endswith(f".{recorder.layer_name}")
            if named and isinstance(module, recorder.target_class):
                module.register_forward_hook(keep)

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Yields the list to which a forward pass appends its router logits."""
        kept: list[Tensor] = []
        self.kept = kept
        try:
            yield kept
        finally:
            self.kept = None


def recorder_of(model: PreTrainedModel) -> Any:
    """Returns transformers' recorder spec for router outputs, or None."""
    outputs = getattr(model, "_can_record_outputs", None)
    recorder = outputs.get("router_logits") if isinstance(outputs, dict) else None
    return recorder if hasattr(recorder, "target_class") else None


def experts_per_token(model: PreTrainedModel) -> int | None:
    """Returns the number of experts per token, or None if the config has none."""
    config = model.config.get_text_config(decoder=True)
    names = ("num_experts_per_tok", "moe_k")
    return next((k for name in names if (k := getattr(config, name, None))), None)


def balancing_coefficient(model: PreTrainedModel, wanted: float | None) -> float:
    """Returns the weight of the load-balancing loss.

    Args:
        wanted: loss.router_aux_loss_coef; None: use the model config's `router_aux_loss_coef`, as
            TRL does.

    Raises:
        UserError: a nonzero weight for a model without such a loss in transformers.
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
    """Returns whether a model has a load-balancing loss in transformers and readable routers."""
    config = model.config.get_text_config(decoder=True)
    modules = (sys.modules.get(kind.__module__) for kind in type(model).__mro__)
    return (
        any(hasattr(module, "load_balancing_loss_func") for module in modules)
        and bool(num_experts(config) and experts_per_token(model))
        and recorder_of(model) is not None
    )
