"""Stage adapters: measures an update of all weights, and one of a LoRA adapter."""

from __future__ import annotations

from functools import partial

import speed
import workloads
from cases import Case, Figures, Setting

from grpo_cli.config.schema import Adapter
from grpo_cli.models import adapters


def cases(setting: Setting) -> list[Case]:
    name, length = workloads.names(setting)[-1], workloads.lengths(setting)[1]
    ranks = {"all weights": 0, "LoRA of rank 16": 16}
    return [
        Case("adapters", f"{name}, {length}, {what}", partial(update, setting, name, length, rank))
        for what, rank in ranks.items()
    ]


def update(setting: Setting, name: str, length: int, rank: int) -> Figures:
    """Measures one optimizer step over random rollouts.

    Args:
        rank: of the adapter on all linear layers; 0: all weights are trained.
    """
    if not rank:
        return speed.update(setting, name, length, "packed")
    workloads.drop_model()
    model = workloads.make_model(name, setting.device)
    adapter = Adapter(method="lora", rank=rank)
    adapters.attach(model, adapters.config_of(adapter, "random", None), seed=0)
    groups = workloads.GROUPS.get(length, 2)
    rollouts = workloads.rollouts(model.config.vocab_size, length, groups)
    return speed.measured_update(setting, model, rollouts, "packed")
