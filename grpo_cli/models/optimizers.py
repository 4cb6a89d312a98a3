"""Makes a recipe's optimizer and its parameter groups.

`optimizer.algorithm` is one of `CLASSES`, or a class of PyTorch, bitsandbytes or the user's own,
such as `torch.optim:SGD`. A class is called with the parameter groups, `lr` and `optimizer.args`;
`check` does that with a small parameter before a model is loaded. An optimizer must keep all its
state per parameter, as tensors or numbers, since that is what a checkpoint stores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from grpo_cli.config.recipe import Recipe
from grpo_cli.config.user_code import import_function
from grpo_cli.errors import UserError, nearest
from grpo_cli.models.settings import ADAM, Optimizer

if TYPE_CHECKING:  # errors in a recipe are reported before transformers is imported
    from transformers import PreTrainedModel

# Both have 8-bit moments; the second moves them to the host if GPU memory is short.
EIGHT_BIT = ("bitsandbytes.optim:AdamW8bit", "bitsandbytes.optim:PagedAdamW8bit")
SET_BY = {
    "lr": "optimizer.learning_rate",
    "weight_decay": "optimizer.weight_decay",
    "betas": "optimizer.betas",
}
NORMS = (r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")  # transformers' own


class MuonWithAdamW(torch.optim.Optimizer):
    """Applies Muon to the groups whose `muon` is true, and AdamW to the others.

    Both optimizers keep their state in `state` and read their settings from the same groups.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
    ) -> None:
        """Makes both optimizers.

        Args:
            momentum: Muon's momentum; the arguments after it are Muon's too.
            adjust_lr_fn: `match_rms_adamw` scales Muon's updates to the size of AdamW's, so that
                both use the same learning rate (arXiv 2502.16982, eq. 4).
        """
        super().__init__(params, {"lr": lr})
        matrices = [group for group in self.param_groups if group.get("muon")]
        others = [group for group in self.param_groups if not group.get("muon")]
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            muon = torch.optim.Muon(
                matrices,
                lr=lr,
                momentum=momentum,
                nesterov=nesterov,
                ns_steps=ns_steps,
                adjust_lr_fn=adjust_lr_fn,
            )
            self.parts.append(muon)
        if others:
            self.parts.append(torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps))
        for part in self.parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Takes a step with both optimizers."""
        assert closure is None, "gradients are computed before"
        for part in self.parts:
            part.step()


CLASSES = {"adamw": torch.optim.AdamW, "muon": MuonWithAdamW}


def optimizer_class(config: Optimizer) -> type[torch.optim.Optimizer]:
    """Returns the class that `optimizer.algorithm` names.

    Raises:
        UserError: the optimizer, module or class does not exist.
    """
    name, where = config.algorithm, f"optimizer.algorithm = {config.algorithm}"
    if name in CLASSES:
        return CLASSES[name]
    if ":" not in name:
        raise UserError(
            f"{where}: must be one of {', '.join(CLASSES)}, or a class such as torch.optim:SGD or "
            f"my_module:MyOptimizer.{nearest(name, CLASSES)}"
        )
    found = import_function(name, where)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise UserError(f"{where}: is not a torch.optim.Optimizer.")
    return found


def check(recipe: Recipe) -> None:
    """Checks a recipe's optimizer before a model is loaded, by constructing it.

    Raises:
        UserError: as `optimizer_class`, or it does not support sharding or its arguments.
    """
    config = recipe.optimizer
    found = optimizer_class(config)
    where = f"optimizer.algorithm = {config.algorithm}"
    # These need complete matrices or addresses of tensors, but a process holds only shards.
    whole = issubclass(found, (MuonWithAdamW, torch.optim.Adafactor)) or _is_bitsandbytes(found)
    if whole and recipe.distributed.strategy == "fsdp2":
        raise UserError(
            f"{where}: does not work on sharded weights (distributed = fsdp2); use "
            "distributed=ddp, or optimizer=adamw."
        )
    of_adam = ("betas",) if config.algorithm in ADAM else ()
    for name in config.args:
        if name in ("lr", "weight_decay", *of_adam):
            raise UserError(f"optimizer.args.{name}: is set by {SET_BY[name]}.")
    try:
        found([{"params": [nn.Parameter(torch.zeros(2, 2))]}], **_arguments(config))
    except Exception as error:  # a user's class may raise anything
        raise UserError(
            f"{where}: cannot be made with lr and optimizer.args: {type(error).__name__}: {error}"
        ) from error


def _arguments(config: Optimizer) -> dict[str, Any]:
    values: dict[str, Any] = {"lr": config.learning_rate}
    if config.algorithm in ADAM:
        values["betas"] = (config.betas[0], config.betas[1])
    return values | config.args


def _is_bitsandbytes(found: type) -> bool:
    return found.__module__.startswith("bitsandbytes.")


def make(
    config: Optimizer, model: PreTrainedModel, *, offload: str = "none"
) -> torch.optim.Optimizer:
    """Returns a recipe's optimizer for the trained parameters of a model.

    Args:
        offload: value of `distributed.offload`; the model is already on its device.
    """
    arguments = _arguments(config)
    trained = [p for p in model.parameters() if p.requires_grad]
    if config.algorithm == "adamw" and (offload != "none" or all(p.is_cuda for p in trained)):
        arguments.setdefault("fused", not {"foreach", "capturable"} & {*config.args})
    found: Any = optimizer_class(config)
    optimizer: torch.optim.Optimizer = found(parameter_groups(config, model), **arguments)
    if _is_bitsandbytes(found):  # 8 bits are too few for embeddings, which are read by row
        for part in model.modules():
            if isinstance(part, nn.Embedding):
                optimizer.mng.register_module_override(  # type: ignore[attr-defined]
                    part, "weight", {"optim_bits": 32}
                )
    return optimizer


def parameter_groups(config: Optimizer, model: PreTrainedModel) -> list[dict[str, Any]]:
    """Returns the trained parameters, grouped by weight decay and by their optimizer state.

    Each group has `state_bytes`, the bytes of optimizer state per weight.
    """
    without_decay = set(undecayed(model, config.no_decay)) if config.weight_decay else set()
    # Muon takes the matrices except embeddings and the output head.
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = model.get_output_embeddings()
    outer = embeddings | ({id(head.weight)} if head is not None else set())
    hidden = {id(p) for p in model.parameters() if p.ndim == 2} - outer
    groups: dict[tuple[bool, bool, bool], list[nn.Parameter]] = {}
    for p in model.parameters():
        if p.requires_grad:
            is_muon = config.algorithm == "muon" and id(p) in hidden
            is_wide = config.algorithm in EIGHT_BIT and id(p) in embeddings
            groups.setdefault((is_muon, is_wide, id(p) in without_decay), []).append(p)
    return [
        {
            "params": parameters,
            "weight_decay": 0.0 if is_undecayed else config.weight_decay,
            "state_bytes": 8.0  # moments in float32
            if is_wide
            else state_bytes(config, parameters[0].element_size(), is_muon=is_muon),
            **({"muon": True} if is_muon else {}),
        }
        for (is_muon, is_wide, is_undecayed), parameters in groups.items()
    ]


def state_bytes(config: Optimizer, weight_bytes: int, *, is_muon: bool = False) -> float:
    """Returns the bytes of optimizer state per weight of a matrix; most classes have 2 moments."""
    if config.algorithm in EIGHT_BIT:
        return 2 + 2 * 4 / 256  # each moment has a float32 scale per 256 weights
    return float(weight_bytes) if is_muon else 2.0 * weight_bytes


def undecayed(model: nn.Module, kinds: list[str]) -> Iterator[int]:
    """Yields the ids of the parameters of these kinds: norms, biases, embeddings."""
    from transformers.trainer_pt_utils import get_parameter_names

    types: list[type[nn.Module]] = []
    patterns: list[str] = []
    if "norms" in kinds:
        types.append(nn.LayerNorm)
        patterns += NORMS
    if "biases" in kinds:
        patterns.append("bias")
    if "embeddings" in kinds:
        types.append(nn.Embedding)
    decayed = set(get_parameter_names(model, types, patterns))
    for name, p in model.named_parameters(remove_duplicate=False):
        if name not in decayed:
            yield id(p)
