"""FSDP2: a model's weights, gradients and optimizer state, divided over the processes.

Each decoder layer is gathered for its forward and its backward, and given back in between. The
gradients come out summed over the processes. Passes are collective: every process makes the same
number of forwards and backwards (`Workers.in_step`), whatever it has to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from grpo_cli.weights import whole

T = TypeVar("T")

WITHIN = "_grpo_within"  # a method of sharded models


def is_sharded(model: nn.Module) -> bool:
    """Whether the model's parameters are divided over the processes."""
    return isinstance(model, FSDPModule)


def shard(
    model: PreTrainedModel, device: torch.device, *, half: bool, reshard_after_forward: bool
) -> PreTrainedModel:
    """Divides a model over all processes, with the weights that the main process has.

    Layer by layer, so that no process but the main one ever holds more than a layer and the
    embeddings; the others may pass a `policy.skeleton`.

    Args:
        half: gather and compute in bfloat16; what is kept stays in the model's own type.
        reshard_after_forward: ZeRO-3; else a layer stays gathered until its backward (ZeRO-2).
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    types = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if half else None,
        reduce_dtype=None if model.dtype == torch.float64 else torch.float32,
    )
    settable = model._can_set_attn_implementation()
    for layer in layers(model):
        materialize(layer, device)
        fully_shard(
            layer,
            mesh=mesh,
            mp_policy=types,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=placement,
        )
    materialize(model, device)
    # What is left, embeddings and head, is used first and last: it stays gathered in between.
    fully_shard(model, mesh=mesh, mp_policy=types, reshard_after_forward=False)
    # transformers reads it off the source of the model's class, which is another one by now.
    type(model)._can_set_attn_implementation_cached_value = settable
    for part in model.modules():
        if isinstance(part, FSDPModule):
            # Gradients are summed, for losses are divided by their count already.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    setattr(model, WITHIN, MethodType(_call, model))
    register_fsdp_forward_method(model, WITHIN)
    return model


def placement(parameter: nn.Parameter) -> Shard | None:
    """Which dimension of a parameter is divided; None: its rows.

    The experts of a layer are one tensor with a row an expert. On more processes than experts most
    would keep padding, and send it with each gather.
    """
    size = dist.get_world_size()
    uneven = parameter.ndim == 3 and parameter.shape[0] % size != 0
    return Shard(1) if uneven and parameter.shape[1] % size == 0 else None


def layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's decoder layers, each gathered by itself."""
    names = set(model._no_split_modules or ())
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()  # of those: Mamba names its mixers too
    for part in model.modules():
        if part not in inside and type(part).__name__.removeprefix("FSDP") in names:
            found.append(part)
            inside.update(part.modules())
    return found


def materialize(module: nn.Module, device: torch.device) -> None:
    """Puts a module's tensors on the device, but for sharded ones, as the main process has them."""
    placed: dict[nn.Parameter, nn.Parameter] = {}  # a tied weight once
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is None or isinstance(p, DTensor):
                continue
            if p not in placed:
                placed[p] = nn.Parameter(_broadcast(p, device), requires_grad=p.requires_grad)
            part._parameters[name] = placed[p]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = _broadcast(buffer, device)


def _broadcast(tensor: Tensor, device: torch.device) -> Tensor:
    """The main process's values; elsewhere only the shape and the type are looked at."""
    if tensor.is_meta:
        value = torch.empty_like(tensor, device=device)
    else:
        value = tensor.detach().to(device).contiguous()
    dist.broadcast(value, 0)
    return value


def within(model: nn.Module, compute: Callable[[], T]) -> T:
    """What `compute` returns, which uses the model's parts one by one.

    Of a sharded model these are there only inside a forward of its root.
    """
    if not is_sharded(model):
        return compute()
    found: T = getattr(model, WITHIN)(compute)
    return found


def _call(model: nn.Module, compute: Callable[[], T]) -> T:
    return compute()


def rest(model: nn.Module) -> None:
    """Gives back what a forward without a backward has left gathered."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def fill(skeleton: PreTrainedModel, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Gives a model without tensors the whole weights of a sharded one. Every process calls it.

    Args:
        dtype: of floating-point weights; they are cast before they travel.
    """
    filled: dict[nn.Parameter, nn.Parameter] = {}
    names = dict(skeleton.named_parameters(remove_duplicate=False))
    for name, p in model.named_parameters(remove_duplicate=False):
        assert name in names, f"{name} is in the model and not in its skeleton"
        if p not in filled:
            own = p.detach()
            own = own.to(dtype) if own.is_floating_point() else own
            filled[p] = nn.Parameter(whole(own), requires_grad=False)
        _set(skeleton, name, filled[p])
    for name, buffer in model.named_buffers(remove_duplicate=False):
        owner, _, last = name.rpartition(".")
        skeleton.get_submodule(owner)._buffers[last] = buffer


def empty(skeleton: PreTrainedModel) -> None:
    """Takes the weights away again."""
    gone: dict[nn.Parameter, nn.Parameter] = {}
    for name, p in list(skeleton.named_parameters(remove_duplicate=False)):
        if p not in gone:
            gone[p] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False)
        _set(skeleton, name, gone[p])


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, last = name.rpartition(".")
    model.get_submodule(owner)._parameters[last] = parameter


def norm_of(parameters: Iterable[nn.Parameter], largest: float) -> float:
    """Scales gradients down to a norm of `largest`; returns the norm that they had."""
    return float(whole(nn.utils.clip_grad_norm_(parameters, largest)).item())
