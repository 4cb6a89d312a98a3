"""Shards a model's weights, gradients and optimizer state over the processes with FSDP2.

Each decoder layer is gathered for its forward and its backward, and freed in between. Gradients are
summed over the processes. Passes are collective: processes run in lockstep, each the same number
of forwards and backwards, even if it has less to compute.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

T = TypeVar("T")

WITHIN = "_grpo_within"  # name of a method that sharded models get


def is_sharded(model: nn.Module) -> bool:
    """Returns whether the model's parameters are sharded over the processes."""
    return isinstance(model, FSDPModule)


def shard(
    model: PreTrainedModel,
    device: torch.device,
    *,
    half_type: torch.dtype | None = None,
    reshard_after_forward: bool,
    on_host: bool = False,
) -> PreTrainedModel:
    """Shards a model with the main process's weights over all processes. Collective.

    Works layer by layer: only the main process ever holds more than a layer and the embeddings. The
    others may pass a `loading.skeleton`.

    Args:
        half_type: dtype to gather and compute in; None: the model's dtype, which shards keep.
        reshard_after_forward: free a layer after its forward (ZeRO-3); otherwise keep it gathered
            until its backward (ZeRO-2).
        on_host: keep shards and their gradients in the host's memory; a layer is copied to the
            device before it is gathered.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    types = MixedPrecisionPolicy(
        param_dtype=half_type, reduce_dtype=None if model.dtype == torch.float64 else torch.float32
    )
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if on_host else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": types, "offload_policy": policy}
    options["reshard_after_forward"] = reshard_after_forward
    settable = model._can_set_attn_implementation()
    for layer in layers(model):
        materialize(layer, device)
        fully_shard(layer, shard_placement_fn=placement, **options)
    materialize(model, device)
    # Embeddings and head are used first and last, so they stay gathered in between.
    fully_shard(model, **{**options, "reshard_after_forward": False})
    # transformers reads it from the source of the model's class, which FSDP has replaced.
    type(model)._can_set_attn_implementation_cached_value = settable
    for part in model.modules():
        if isinstance(part, FSDPModule):
            # Sum gradients: losses are already divided by the global count.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    setattr(model, WITHIN, MethodType(lambda model, compute: compute(), model))
    register_fsdp_forward_method(model, WITHIN)
    return model


def placement(parameter: nn.Parameter) -> Shard | None:
    """Returns the placement of a parameter's shards; None for the default, its rows.

    The experts of a layer are one tensor with a row per expert. With more processes than experts,
    most processes would hold padding and send it in each gather.
    """
    size = dist.get_world_size()
    uneven = parameter.ndim == 3 and parameter.shape[0] % size != 0
    return Shard(1) if uneven and parameter.shape[1] % size == 0 else None


def layers(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the model's decoder layers, which are gathered one at a time."""
    names = set(model._no_split_modules or ())
    decoder_layers: list[nn.Module] = []
    inside: set[nn.Module] = set()  # submodules of these layers, since Mamba also lists its mixers
    for part in model.modules():
        if part not in inside and type(part).__name__.removeprefix("FSDP") in names:
            decoder_layers.append(part)
            inside.update(part.modules())
    return decoder_layers


def materialize(module: nn.Module, device: torch.device) -> None:
    """Moves a module's unsharded tensors to the device, with the main process's values."""
    placed: dict[nn.Parameter, nn.Parameter] = {}  # maps a tied weight only once
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
    """Returns the main process's values; other processes supply only shape and dtype."""
    if tensor.is_meta:
        value = torch.empty_like(tensor, device=device)
    else:
        value = tensor.detach().to(device).contiguous()
    dist.broadcast(value, 0)
    return value


def within(model: nn.Module, compute: Callable[[], T]) -> T:
    """Calls `compute`, which uses submodules of the model directly, and returns its result.

    Submodules of a sharded model can only be used inside a forward of its root.
    """
    if not is_sharded(model):
        return compute()
    result: T = getattr(model, WITHIN)(compute)
    return result


@contextlib.contextmanager
def inputs_kept(model: nn.Module) -> Iterator[None]:
    """Keeps FSDP from casting the inputs of sharded layers to its own dtype."""
    states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
    policies = [state._mp_policy for state in states]
    for state in states:
        state._mp_policy = dataclasses.replace(state._mp_policy, cast_forward_inputs=False)
    try:
        yield
    finally:
        for state, policy in zip(states, policies, strict=True):
            state._mp_policy = policy


def reshard(model: nn.Module) -> None:
    """Frees the layers that a forward without a backward left gathered."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def fill(skeleton: PreTrainedModel, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Fills a skeleton with the full weights of a sharded model. Collective.

    Args:
        skeleton: the result of `loading.skeleton`.
        dtype: floating-point weights are cast to it before they are gathered.
    """
    filled: dict[nn.Parameter, nn.Parameter] = {}
    names = dict(skeleton.named_parameters(remove_duplicate=False))
    for name, p in model.named_parameters(remove_duplicate=False):
        assert name in names, f"{name} is in the model and not in its skeleton"
        if p not in filled:
            shard_of_p = p.detach()
            if shard_of_p.is_floating_point():
                shard_of_p = shard_of_p.to(dtype)
            filled[p] = nn.Parameter(full_tensor(shard_of_p), requires_grad=False)
        _set(skeleton, name, filled[p])
    for name, buffer in model.named_buffers(remove_duplicate=False):
        owner, _, last = name.rpartition(".")
        skeleton.get_submodule(owner)._buffers[last] = buffer


def empty(skeleton: PreTrainedModel) -> None:
    """Moves a filled skeleton's weights back to the meta device, which frees them."""
    on_meta: dict[nn.Parameter, nn.Parameter] = {}
    for name, p in list(skeleton.named_parameters(remove_duplicate=False)):
        if p not in on_meta:
            on_meta[p] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False)
        _set(skeleton, name, on_meta[p])


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, last = name.rpartition(".")
    model.get_submodule(owner)._parameters[last] = parameter


def full_tensor(tensor: Tensor) -> Tensor:
    """Gathers a DTensor's elements like DTensor.full_tensor; returns other tensors unchanged.

    Collective for a sharded tensor. Shards on the host are gathered on the device.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    device = tensor.device_mesh.device_type
    if tensor.device.type != device:
        tensor = cast(DTensor, tensor.to(device))
    return tensor.full_tensor()


def device_of(model: PreTrainedModel) -> torch.device:
    """Returns the device that a model computes on, even if its shards are kept on the host."""
    first: Tensor = next(model.parameters())
    if isinstance(first, DTensor) and first.device_mesh.device_type != first.device.type:
        return torch.device(first.device_mesh.device_type, torch.cuda.current_device())
    return first.device


def zero_gradients(model: nn.Module) -> None:
    """Sets the gradient of every trained weight without one to 0."""
    for p in model.parameters():
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)


def norm_of(parameters: Iterable[nn.Parameter], largest: float | None) -> float:
    """Clips the gradients to a norm of at most `largest`; returns the norm before clipping."""
    parameters = list(parameters)
    if largest is None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        return float(full_tensor(nn.utils.get_total_norm(gradients)).item())
    return float(full_tensor(nn.utils.clip_grad_norm_(parameters, largest)).item())
