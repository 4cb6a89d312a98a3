r"""Distinguishes a wrong computation from rounding error, in every precision.

A forward mode or a decoder is correct if its log-probabilities match the model's. In float32, two
correct computations differ by about 1e-5 nats per token. In bfloat16, they differ by 0.03 nats for
a chat model with 135M parameters, which may exceed the effect of a layer with wrong weights. No
constant separates errors from rounding there, so the check has two parts:

1. In float32, does it equal the simplest computation (`difference`)?
2. In its own precision, is its error against float32 at most `TIMES` that of the simplest
   computation (`excess`)?

    float32, simplest -1.20, -0.30   bfloat16, simplest -1.23, -0.28   another mode -1.18, -0.34
    errors: 0.025 on average and 0.030, less than 3 · 0.025: rounding
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_cli.distributed import fsdp
from grpo_cli.records import Rollout, sampled_mask

# Tolerances for rounding: largest and mean difference of log-probabilities, in nats, and relative
# difference of a gradient.
TOLERANCE = {torch.float64: (1e-6, 1e-7, 1e-5), torch.float32: (2e-3, 2e-4, 1e-2)}
# In 16 bit: factor for the simplest mode's error, and errors (nats, relative) that always pass.
TIMES, FLOOR, GRADIENT_FLOOR = 3.0, 1e-3, 1e-2
ADVICE = (
    ": this is a bug, not rounding. grpo uses a slower computation that is correct; please report "
    "the model's name"
)
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Outcome:
    """The log-probabilities of a computation, and a gradient of them."""

    logprobs: Tensor  # [N], for sampled tokens
    gradient: Tensor | None = None  # for one weight; None if nothing is trained

    @classmethod
    def of(
        cls, rollouts: Sequence[Rollout], logprobs: Tensor, gradient: Tensor | None = None
    ) -> Outcome:
        """Selects the sampled tokens from log-probabilities [B, C]."""
        mask = sampled_mask(rollouts).to(logprobs.device)
        return cls(logprobs[mask].double().cpu(), gradient)

    def errors(self, right: Outcome) -> tuple[float, float, float]:
        """Returns (largest error, mean error) of log-probabilities and relative gradient error."""
        apart = (self.logprobs - right.logprobs).abs()
        of_gradient = 0.0
        if self.gradient is not None and right.gradient is not None:
            off = self.gradient.double() - right.gradient.double()
            of_gradient = (off.norm() / right.gradient.double().norm()).item()
        return apart.max().item(), apart.mean().item(), of_gradient


def difference(found: Outcome, right: Outcome, dtype: torch.dtype) -> str | None:
    """Describes how two float32 or float64 outcomes differ beyond rounding; None if they agree."""
    largest, mean, gradient = found.errors(right)
    highest, highest_mean, highest_gradient = TOLERANCE[dtype]
    if not (largest <= highest and mean <= highest_mean):
        return (
            f"log-probabilities differ by {mean:.1e} nats on average, {largest:.1e} at most, in "
            f"{str(dtype).removeprefix('torch.')}{ADVICE}"
        )
    if not gradient <= highest_gradient:
        name = str(dtype).removeprefix("torch.")
        return f"gradients differ by {gradient:.1e}, in {name}{ADVICE}"
    return None


def excess(found: Outcome, simplest: Outcome, right: Outcome) -> str | None:
    """Describes how a 16-bit outcome's error exceeds the rounding error; None if it does not.

    Args:
        simplest: the simplest computation's outcome in the same precision. right: in float32.
    """
    (_, mean, gradient), (_, own, own_gradient) = found.errors(right), simplest.errors(right)
    if not mean <= TIMES * own + FLOOR:
        return (
            f"log-probabilities are off by {mean:.1e} nats on average, of which rounding explains "
            f"{own:.1e}{ADVICE}"
        )
    if not gradient <= TIMES * own_gradient + GRADIENT_FLOOR:
        return (
            f"gradients are off by {gradient:.1e}, of which rounding explains {own_gradient:.1e}"
            f"{ADVICE}"
        )
    return None


def is_16_bit(model: PreTrainedModel) -> bool:
    """Returns whether a model computes in 16 bit, by autocast or by the dtype of its weights."""
    if torch.is_autocast_enabled(fsdp.device_of(model).type) and model.dtype != torch.float64:
        return True
    return any(_is_narrow(value) for _, _, value in _numbers_of(model))


def _is_narrow(value: Any) -> bool:
    return (value.dtype if isinstance(value, Tensor) else value) in HALVES


def _numbers_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yields (owner, name, value) for weights, and for compute dtypes of quantized layers."""
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None:
                yield part, name, p
        if isinstance(dtype := getattr(part, "compute_dtype", None), torch.dtype):
            yield part, "compute_dtype", dtype


@contextlib.contextmanager
def in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Makes a model compute in float32, regardless of its weights' dtype and autocast.

    16-bit weights are cast, and quantized ones dequantized, layer by layer, only while the layer
    computes. No second copy of all weights exists, even for a backward pass.
    """
    cast = _Cast()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast(fsdp.device_of(model).type, enabled=False))
        stack.enter_context(fsdp.inputs_kept(model))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(cast.pack, cast.unpack))
        for part in _parts(model, set(fsdp.layers(model))):
            stack.callback(part.register_forward_pre_hook(cast.before).remove)
            # Before FSDP's own hook, which frees a layer.
            after = part.register_forward_hook(cast.after, prepend=True, always_call=True)
            stack.callback(after.remove)
        yield


def _parts(module: nn.Module, layers: set[nn.Module]) -> Iterator[nn.Module]:
    """Yields the layers, and the outermost other modules that contain no layer and are called."""
    is_list = isinstance(module, nn.ModuleList)  # Gemma 3n calls the members of its lists
    if module in layers or (layers.isdisjoint(module.modules()) and not is_list):
        yield module
        return
    for child in module.children():
        yield from _parts(child, layers)


class _Cast:
    """Casts the weights of a module while it computes."""

    def __init__(self) -> None:
        self.kept: dict[nn.Module, list[tuple[nn.Module, str, Any]]] = {}
        self.sources: dict[int, Tensor] = {}  # address of a float32 copy -> original weight

    def before(self, module: nn.Module, args: Any) -> Any:
        self.kept[module] = []
        # For embeddings the output is cast instead, since only some rows of the weight are read.
        numbers = [] if isinstance(module, nn.Embedding) else list(_numbers_of(module))
        for part, name, value in filter(lambda number: _is_narrow(number[2]), numbers):
            self.kept[module].append((part, name, value))
            if isinstance(value, Tensor):
                wide = value.float()
                self.sources[wide.untyped_storage().data_ptr()] = value
                part._parameters[name] = wide  # type: ignore[assignment]
            else:
                setattr(part, name, torch.float32)
        return tuple(map(_wide, args))

    def after(self, module: nn.Module, _: Any, out: Any) -> Any:
        for part, name, value in self.kept.pop(module, ()):
            if isinstance(value, Tensor):
                wide: Any = part._parameters[name]
                self.sources.pop(wide.untyped_storage().data_ptr(), None)
                part._parameters[name] = value  # type: ignore[assignment]
            else:
                setattr(part, name, value)
        return _wide(out) if isinstance(module, nn.Embedding) else out

    def pack(self, tensor: Tensor) -> Any:
        """Saves the 16-bit weight for backward instead of its float32 copy."""
        source = self.sources.get(tensor.untyped_storage().data_ptr())
        if source is None or tensor.dtype != torch.float32:
            return tensor
        return source.detach(), tensor.size(), tensor.stride(), tensor.storage_offset()

    @staticmethod
    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        source, *view = packed
        return torch.as_strided(source.float(), *view)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALVES else value


def with_gradient(
    model: PreTrainedModel, rollouts: Sequence[Rollout], compute: Callable[[], tuple[Tensor, Any]]
) -> Outcome:
    """Returns log-probabilities, and the gradient of a signed sum of them for one weight.

    Args:
        compute: returns (log-probabilities [B, C] of the rollouts, entropies).
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        return Outcome.of(rollouts, compute()[0])
    # The gradient of a norm in the first layer depends on all layers. So does that of an
    # adapter's matrix B; that of A is 0 as long as B is 0, and that of the keys' bias is always.
    of_adapter = (p for name, p in named if ".lora_B." in name)
    norms = (p for name, p in named if p.ndim == 1 and "bias" not in name)
    first = next(chain(of_adapter, norms, [named[0][1]]))
    with torch.enable_grad(), recomputing(model):
        logprobs, _ = compute()
        signs = torch.arange(logprobs.numel(), device=logprobs.device) % 3 - 1
        if not logprobs.requires_grad:  # of a reference
            return Outcome.of(rollouts, logprobs)
        mixed = (logprobs * signs.view_as(logprobs)).sum()
        if fsdp.is_sharded(model):  # the backward sums gradients over processes
            mixed.backward()  # type: ignore[no-untyped-call]
            gradient = None if first.grad is None else fsdp.full_tensor(first.grad)
            model.zero_grad()
        else:
            (gradient,) = torch.autograd.grad(mixed, first, allow_unused=True)
    gradient = None if gradient is None else gradient.double()
    return Outcome.of(rollouts, logprobs.detach(), gradient)


@contextlib.contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """Enables gradient checkpointing in evaluation mode, in which transformers skips it.

    A layer that applies dropout itself is skipped, since its dropout would become active.
    """
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, GradientCheckpointingLayer)
        and layer.gradient_checkpointing
        and not layer.training
        and not any(isinstance(v, float) and v for k, v in vars(layer).items() if "drop" in k)
    ]
    for layer in layers:
        layer.training = True  # not layer.train(), which would also set its children
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
