"""Layouts of rows, their attention as one softmax, and a comparison with it."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from grpo_cli.models.attention import Layout, Prefix, usual_kernel
from grpo_cli.models.kernels.flex import Flex
from grpo_cli.models.kernels.plain import ByParts
from tests.conftest import CPU

Group = tuple[int, Sequence[int]]  # tokens of a prompt, and of each of its completions

# A bucket holds segments of at most 1.25 times its shortest.
GROUPS: dict[str, list[Group]] = {
    "one group": [(7, [4, 5, 4])],  # 4, 4 and 5 in one bucket, with padding
    "even": [(6, [3, 3, 3]), (6, [3, 3])],  # no padding
    "uneven": [(9, [1, 8, 12, 13, 10]), (2, [5, 1])],
    "one token each": [(1, [1, 1]), (1, [1])],
    "lone segments": [(5, []), (1, []), (6, [])],
    "both": [(4, []), (5, [2, 9]), (1, []), (3, [4])],
}

DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 0.15)],
    ids=str,
)


def make_layout(groups: Sequence[Group], device: torch.device = CPU) -> Layout:
    segments, prefixes, n = [], [], 0
    for prompt, completions in groups:
        start, first = n, n + prompt
        segments.append((start, first))
        n = first
        for length in completions:
            segments.append((n, n + length))
            n += length
        if completions:
            prefixes.append(Prefix(start, first, first, n))
    return Layout(segments, prefixes, device)


def seen(groups: Sequence[Group]) -> Tensor:
    """Whether token i sees token j, [N, N]: from what each token is, not from the layout."""
    tokens = [
        (number, completion, place)
        for number, (prompt, completions) in enumerate(groups)
        for completion, length in enumerate([prompt, *completions])
        for place in range(length)
    ]
    return torch.tensor(
        [
            [
                number == other and (theirs == 0 < mine or (mine == theirs and place >= before))
                for other, theirs, before in tokens
            ]
            for number, mine, place in tokens
        ]
    )


def plain(groups: Sequence[Group], q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    repeats = q.shape[1] // k.shape[1]
    # Head h reads key head h // repeats.
    k, v = (t[:, [h // repeats for h in range(q.shape[1])]] for t in (k, v))
    scores = torch.einsum("mhd,nhd->hmn", q, k) * scale
    scores = scores.masked_fill(~seen(groups).to(q.device), -torch.inf)
    return torch.einsum("hmn,nhd->mhd", scores.softmax(-1), v)


def make_heads(
    groups: Sequence[Group], heads: int, key_heads: int, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    """([queries, keys, values], gradient of the outputs)."""
    random = torch.Generator().manual_seed(0)
    n = sum(prompt + sum(completions) for prompt, completions in groups)
    shapes = [(n, heads, 8), (n, key_heads, 8), (n, key_heads, 8), (n, heads, 8)]
    q, k, v, grad = (torch.randn(s, generator=random, dtype=torch.float64) for s in shapes)
    return [t.to(dtype) for t in (2 * q, k, v)], grad.to(dtype)


def assert_same(
    groups: Sequence[Group],
    heads: int,
    key_heads: int,
    dtype: torch.dtype,
    tolerance: float,
    kernel: ByParts | Flex | None = None,
) -> None:
    inputs, grad = make_heads(groups, heads, key_heads, dtype)
    found_at = [t.clone().requires_grad_() for t in inputs]
    plain_at = [t.double().requires_grad_() for t in inputs]
    found = (kernel or usual_kernel(inputs[0])).attend(make_layout(groups), *found_at, 0.3)
    expected = plain(groups, *plain_at, 0.3)
    found.backward(grad)
    expected.backward(grad.double())
    assert found.dtype == dtype
    assert (found - expected).abs().max() < tolerance
    for mine, theirs in zip(found_at, plain_at, strict=True):
        assert (mine.grad - theirs.grad).abs().max() < tolerance
