"""Compares a kernel's output and gradients with a masked softmax in float64, on one small row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_cli.models.attention import Layout, Prefix, UnsupportedModelError
from grpo_cli.models.kernels.base import Kernel
from grpo_cli.models.kernels.table import Needs

# Tolerance for the relative error ‖value − expected‖ / ‖expected‖, by dtype.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-2}
# Segments of unequal length, one of a single token, and two prompts that others attend to.
SEGMENTS = [(0, 70), (70, 75), (75, 203), (203, 220), (220, 221), (221, 300)]
PREFIXES = [Prefix(0, 70, 70, 203), Prefix(203, 220, 220, 300)]


def compare(kernel: Kernel, needs: Needs) -> None:
    """Compares a kernel with the exact attention, for these heads and this dtype.

    Raises:
        UnsupportedModelError: its output or a gradient is wrong.
        Exception: any exception of the kernel.
    """
    errors = errors_of(kernel, needs)
    name, error = max(errors.items(), key=lambda item: (item[1] != item[1], item[1]))
    limit = TOLERANCE[needs.dtype]
    if not error <= limit:
        raise UnsupportedModelError(
            f"its {name} differs by {error:.1e} from float64, more than {limit:.0e}"
        )


def errors_of(kernel: Kernel, needs: Needs) -> dict[str, float]:
    """Returns the relative errors of the output and of each gradient, by name."""
    device, head_dim = needs.device, needs.head_dim
    heads, key_heads = needs.heads, needs.key_heads
    draws = torch.Generator().manual_seed(0)
    count = SEGMENTS[-1][1]
    shapes = [(count, n, head_dim) for n in (heads, key_heads, key_heads, heads)]
    tensors = [torch.randn(shape, generator=draws).to(device, needs.dtype) for shape in shapes]
    grad, scale = tensors.pop(), head_dim**-0.5
    layout = Layout(SEGMENTS, PREFIXES, device, kernel)
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        query, key, value = given = [t.clone().requires_grad_() for t in tensors]
        out = layout.attend(0, query, key, value, scale)
        found = [out, *torch.autograd.grad(out, given, grad)]
        query, key, value = exact = [t.double().requires_grad_() for t in tensors]
        right = dense(query, key, value, scale, SEGMENTS, PREFIXES)
        expected = [right, *torch.autograd.grad(right, exact, grad.double())]
    found = [t.detach() for t in found]
    names = ("output", "gradient of queries", "gradient of keys", "gradient of values")
    return {n: relative(a, b.detach()) for n, a, b in zip(names, found, expected, strict=True)}


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    segments: Sequence[tuple[int, int]],
    prefixes: Sequence[Prefix],
) -> Tensor:
    """Computes the attention of a layout, [N, Hq, D], with an N x N mask."""
    count = len(query)
    sees = torch.zeros(count, count, dtype=torch.bool, device=query.device)
    for start, end in segments:
        sees[start:end, start:end] = True
    sees &= torch.ones_like(sees).tril()
    for p in prefixes:
        sees[p.first : p.last, p.start : p.end] = True
    repeats = query.shape[1] // key.shape[1]
    k, v = (t.repeat_interleave(repeats, 1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, k) * scale
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def relative(value: Tensor, expected: Tensor) -> float:
    """Returns ‖value − expected‖ / ‖expected‖."""
    return float((value.double() - expected).norm() / expected.norm())
