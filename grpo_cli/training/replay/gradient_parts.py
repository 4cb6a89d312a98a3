"""Splits a gradient into the parts of its completions: g = Σ g_i.

The share of a part is <g_i, g> / ‖g‖²: how much of a small step along −g is due to it. The shares
add up to 1; one is negative if its completion pulls against the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

CHUNK = 2**22  # weights that are multiplied in float64 at a time


class Part(NamedTuple):
    """A part of a gradient, compared with all of it."""

    share: float  # NaN if the gradient is 0
    norm: float


class GradientParts:
    """Takes the gradient of a model away, and compares parts of it that are computed later.

    Each weight's part is compared and freed as soon as a backward has computed it, so that the
    parts take no memory beyond the gradient and their sum.
    """

    def __init__(self, model: nn.Module) -> None:
        """Takes the gradients of all weights; `restore` puts the same tensors back."""
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.whole = {p: p.grad for p in self.weights if p.grad is not None}
        self.sum = {p: torch.zeros_like(g) for p, g in self.whole.items()}
        self.strays: float | Tensor = 0.0  # squared norm of parts of weights without a gradient
        self.square = float(sum(_dot(g, g) for g in self.whole.values()))
        self._dot: float | Tensor = 0.0
        self._square: float | Tensor = 0.0
        for p in self.weights:
            p.grad = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Compares what each backward inside computes, instead of adding it up in the model."""
        handles = [
            p.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]
            for p in self.weights
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _take(self, p: Tensor) -> None:
        assert p.grad is not None, "it was just computed"
        square = _dot(p.grad, p.grad)
        self._square = self._square + square
        if p in self.whole:
            self._dot = self._dot + _dot(p.grad, self.whole[p])  # type: ignore[index]
            self.sum[p] += p.grad  # type: ignore[index]
        else:
            self.strays = self.strays + square
        p.grad = None

    def take_part(self) -> Part:
        """Returns what was computed since the last call, as one part."""
        share = float(self._dot) / self.square if self.square else math.nan
        part = Part(share, math.sqrt(float(self._square)))
        self._dot = self._square = 0.0
        return part

    @property
    def difference(self) -> float:
        """‖Σ g_i − g‖ / ‖g‖ over all parts, which is rounding; NaN if the gradient is 0."""
        left = float(self.strays)
        for p, whole in self.whole.items():
            rest = self.sum[p] - whole
            left += float(_dot(rest, rest))
        return math.sqrt(left / self.square) if self.square else math.nan

    def restore(self) -> None:
        """Puts the gradient back."""
        for p in self.weights:
            p.grad = self.whole.get(p)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Returns the scalar product of two tensors of one shape, [] on their device."""
    wide = torch.float32 if a.device.type == "mps" else torch.float64
    parts = zip(torch.split(a.flatten(), CHUNK), torch.split(b.flatten(), CHUNK), strict=True)
    return torch.stack([(x.to(wide) * y.to(wide)).sum() for x, y in parts]).sum()
