"""Lists the kernels for the attention of packed rows, and chooses one.

The first kernel that fits the device, the precision and the heads is compared with a masked softmax
in float64 on one small row. If it fails or is wrong, the next one is tried. The last one runs
everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_cli.models.attention import Layout, Prefix, UnsupportedModelError, mismatch
from grpo_cli.models.kernels.base import Kernel
from grpo_cli.models.kernels.flex import Flex
from grpo_cli.models.kernels.plain import Plain
from grpo_cli.models.kernels.varlen import HALVES, RepeatedVarlen, Varlen

WIDEST = 256  # maximum head dimension of flash attention
# Tolerance for the relative error ‖value − expected‖ / ‖expected‖, by dtype.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-2}
# Segments of unequal length, one of a single token, and two prompts that others attend to.
SEGMENTS = [(0, 70), (70, 75), (75, 203), (203, 220), (220, 221), (221, 300)]
PREFIXES = [Prefix(0, 70, 70, 203), Prefix(203, 220, 220, 300)]


@dataclass(frozen=True)
class Needs:
    """Describes the attention that a kernel must compute."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int  # 0: not known yet
    heads: int
    key_heads: int

    @classmethod
    def of(cls, model: PreTrainedModel, device: torch.device) -> Needs:
        """Reads a model's config, and autocast's dtype if it is enabled."""
        config = model.config.get_text_config(decoder=True)
        layers = getattr(config, "per_layer_config", None) or [config]  # for unequal layers
        heads = int(layers[0].num_attention_heads)
        dims = [getattr(c, "head_dim", None) or c.hidden_size // heads for c in layers]
        key_heads = getattr(layers[0], "num_key_value_heads", None) or heads
        dtype = model.dtype
        if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device.type)
        return cls(device, dtype, int(max(dims)), heads, int(key_heads))


@dataclass(frozen=True)
class Row:
    """Describes a kernel: its name and its requirements."""

    name: str
    make: Callable[[], Kernel]
    # Depends only on device type, precision and heads, which all processes share.
    fits: Callable[[Needs], bool]


def _half(needs: Needs) -> bool:
    return needs.device.type == "cuda" and needs.dtype in HALVES


def _flash(needs: Needs) -> bool:
    return _half(needs) and needs.head_dim % 8 == 0 and needs.head_dim <= WIDEST


TABLE: Sequence[Row] = (
    Row("varlen", Varlen, _flash),
    Row("varlen", RepeatedVarlen, lambda n: _flash(n) and n.heads != n.key_heads),
    # Not in float32, where compilation would take longer than a short run.
    Row("flex", Flex, _half),
    Row("plain", Plain, lambda n: True),
)


def choose(
    needs: Needs,
    *,
    say: Callable[[str], None],
    agree_on: Callable[[str | None], str | None] = lambda reason: reason,
    table: Sequence[Row] = TABLE,
) -> Kernel:
    """Returns the first kernel of the table that fits and passes the check.

    Args:
        say: receives a line for each kernel that fails.
        agree_on: reduces a reason over all processes to one, so that all use the same kernel.
    """
    *checked, last = [row for row in table if row.fits(needs)]
    for row in checked:
        made: list[Kernel] = []

        def attempt(row: Row = row, made: list[Kernel] = made) -> None:
            made.append(row.make())
            compare(made[0], needs)

        failure = agree_on(mismatch(attempt))
        if failure is None:
            return made[0]
        say(f"note: attention kernel {row.name} is not used ({failure})")
    return last.make()  # plain, which needs no check


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
