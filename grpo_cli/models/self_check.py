r"""Distinguishes a wrong computation from rounding error, in every precision.

A forward mode or a decoder is right if its log-probabilities are the model's. In float32, two right
computations differ by about 1e-5 nats a token. In bfloat16, they differ by 0.03 nats for a chat
model with 135M parameters, which is more than a layer with wrong weights may change. No constant
separates an error from rounding there, so two questions are asked:

1. Computed in float32, does it equal the simplest computation (`difference`)?
2. In its own precision, is its error against float32 at most `TIMES` that of the simplest
   computation (`excess`)?

    float32, simplest -1.20, -0.30   bfloat16, simplest -1.23, -0.28   another mode -1.18, -0.34
    errors: 0.025 on average and 0.030, less than 3 · 0.025: rounding
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_cli.distributed import fsdp
from grpo_cli.records import Rollout, sampled_mask

# Largest and mean difference of log-probabilities, in nats, and relative difference of a gradient
# that count as rounding.
TOLERANCE = {torch.float64: (1e-6, 1e-7, 1e-5), torch.float32: (2e-3, 2e-4, 1e-2)}
# In 16 bit: times the error of the simplest mode, and errors that are none.
TIMES, FLOOR, GRADIENT_FLOOR = 3.0, 1e-3, 1e-2
ADVICE = ": a fault, not rounding; the run is right and slower; please report the model's name"
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Outcome:
    """Log-probabilities that a computation has given, and a gradient of them."""

    logprobs: Tensor  # [N], of sampled tokens
    gradient: Tensor | None = None  # of one weight, None where nothing is trained

    @classmethod
    def of(
        cls, rollouts: Sequence[Rollout], logprobs: Tensor, gradient: Tensor | None = None
    ) -> Outcome:
        """Takes the sampled tokens out of log-probabilities [B, C]."""
        mask = sampled_mask(rollouts).to(logprobs.device)
        return cls(logprobs[mask].double().cpu(), gradient)

    def errors(self, right: Outcome) -> tuple[float, float, float]:
        """Returns largest and mean error of log-probabilities, and relative error of a gradient."""
        apart = (self.logprobs - right.logprobs).abs()
        of_gradient = 0.0
        if self.gradient is not None and right.gradient is not None:
            off = self.gradient.double() - right.gradient.double()
            of_gradient = (off.norm() / right.gradient.double().norm()).item()
        return apart.max().item(), apart.mean().item(), of_gradient


def difference(found: Outcome, right: Outcome, dtype: torch.dtype) -> str | None:
    """Returns how an outcome in float32 or float64 differs beyond rounding from another."""
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
    """Returns how the error of an outcome in 16 bit exceeds what rounding explains, or None.

    Args:
        simplest: of the simplest computation in the same precision. right: in float32.
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
    """Whether a model computes with fewer bits than float32 here: by autocast, or its weights."""
    if torch.is_autocast_enabled(fsdp.device_of(model).type) and model.dtype != torch.float64:
        return True
    return any(_is_narrow(value) for _, _, value in _numbers_of(model))


def _is_narrow(value: Any) -> bool:
    return (value.dtype if isinstance(value, Tensor) else value) in HALVES


def _numbers_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yields weights, and dtypes that quantized layers compute in: (owner, name, value)."""
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None:
                yield part, name, p
        if isinstance(dtype := getattr(part, "compute_dtype", None), torch.dtype):
            yield part, "compute_dtype", dtype


@contextlib.contextmanager
def in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Makes a model compute in float32, whatever its weights and autocast.

    Weights of 16 bit are cast, and quantized ones dequantized, layer by layer, each for as long as
    it computes: no second copy of the weights is made, also not for a backward pass.
    """
    cast = _Cast()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast(fsdp.device_of(model).type, enabled=False))
        stack.enter_context(fsdp.inputs_kept(model))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(cast.pack, cast.unpack))
        for part in _parts(model, set(fsdp.layers(model))):
            stack.callback(part.register_forward_pre_hook(cast.before).remove)
            # Before FSDP's own, which frees a layer.
            after = part.register_forward_hook(cast.after, prepend=True, always_call=True)
            stack.callback(after.remove)
        yield


def _parts(module: nn.Module, layers: set[nn.Module]) -> Iterator[nn.Module]:
    """Yields the layers, and the modules around them that hold none."""
    if module in layers or layers.isdisjoint(module.modules()):
        yield module
        return
    for child in module.children():
        yield from _parts(child, layers)


class _Cast:
    """Casts the weights of a part of a model while it computes."""

    def __init__(self) -> None:
        self.kept: dict[nn.Module, list[tuple[nn.Module, str, Any]]] = {}
        self.sources: dict[int, Tensor] = {}  # by the address of the float32 copy

    def before(self, module: nn.Module, args: Any) -> Any:
        self.kept[module] = []
        # Of embeddings the output is cast: only some rows of the weight are read.
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
        """Keeps the weight of 16 bit in place of its copy for a backward pass."""
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
