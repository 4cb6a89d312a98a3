"""Prepacked weights give the results of `F.linear`, and rows do not affect one another."""

from __future__ import annotations

import platform
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config

from grpo_cli.generation.embedded import direct_forward
from grpo_cli.generation.embedded.direct_forward import DirectForward, Product, packed_dtype
from tests.generation.embedded.test_direct_forward import completions_of, model_of

pytestmark = pytest.mark.skipif(
    platform.machine() not in direct_forward.ARCHITECTURES, reason="nothing is prepacked here"
)
# A layer whose products all have as many numbers as are prepacked, except for the output's.
LARGE: dict[str, Any] = {
    "vocab_size": 600, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


def linears() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    return nn.Linear(256, 512), nn.Linear(256, 128, bias=False)


@torch.no_grad()
@pytest.mark.parametrize("number", [1, 2])
def test_products_match_linear_layers(number: int) -> None:
    of = linears()[:number]
    x, width = torch.randn(5, 256), sum(len(linear.weight) for linear in of)
    other = torch.randn(5, width)
    expected = torch.cat([linear(x) for linear in of], dim=-1)
    packed, plain = (Product.of(*of, prepacks=prepacks) for prepacks in (torch.float32, None))
    assert packed.packed is not None
    assert plain.packed is None
    for product, tolerance in ((packed, 2e-5), (plain, 0.0)):
        for found, wanted in (
            (product(x), expected),
            (product.silu(x), F.silu(expected)),
            (product.times(x, other), expected * other),
            (product.plus(x, other), expected + other),
        ):
            torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


@torch.no_grad()
def test_rows_are_independent() -> None:
    product = Product.of(*linears(), prepacks=torch.float32)
    x, other = torch.randn(64, 256), torch.randn(64, 640)

    def of(some: slice) -> Tensor:
        a, b = x[some], other[some]
        return torch.stack([product(a), product.silu(a), product.times(a, b), product.plus(a, b)])

    whole = of(slice(None))
    for rows in (1, 2, 7, 16):
        for start in range(0, 64, rows):
            some = slice(start, start + rows)
            assert torch.equal(of(some), whole[:, some])


IS_QUICK = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@torch.no_grad()
@pytest.mark.skipif(not IS_QUICK, reason="bfloat16 is not prepacked here")
def test_bfloat16_equals_linear_layers_under_autocast() -> None:
    of = linears()
    packed, plain = (Product.of(*of, prepacks=prepacks) for prepacks in (torch.bfloat16, None))
    assert packed.packed is not None
    x = torch.randn(33, 256)
    other = torch.randn(33, 640).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(packed(x), plain(x))
        assert torch.equal(packed.silu(x), plain.silu(x))
        assert torch.equal(packed.times(x, other), plain.times(x, other))
        assert torch.equal(packed.plus(x, other.float()), plain.plus(x, other.float()))


def test_small_weights_are_not_packed() -> None:
    assert Product.of(nn.Linear(256, 511), prepacks=torch.float32).packed is None
    assert Product.of(nn.Linear(256, 512), prepacks=torch.float32).packed is not None
    assert Product.of(nn.Linear(256, 512).half(), prepacks=torch.float32).packed is None


def test_what_is_prepacked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(LlamaConfig(**LARGE))
    size = sum(weight.nbytes for weight in model.parameters())
    half = torch.bfloat16 if IS_QUICK else None
    assert packed_dtype(model) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert packed_dtype(model) == half
    for memory, expected in ((8 * size, torch.float32), (8 * size - 8, None)):
        monkeypatch.setattr(direct_forward, "total_memory", lambda memory=memory: memory)
        assert packed_dtype(model) == expected
    monkeypatch.undo()
    assert packed_dtype(model.bfloat16()) == half
    assert packed_dtype(model.half()) is None


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**LARGE, attention_bias=True, mlp_bias=True),
        LlamaConfig(**LARGE, hidden_act="gelu"),
        Qwen3Config(**LARGE, head_dim=64),
    ],
    ids=["llama with biases", "gelu", "qwen3"],
)
def test_the_engine_samples_the_same(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(config)
    direct = DirectForward.of(model)
    assert direct is not None
    layer = direct.layers[0]
    used = (layer.query_key_value, layer.gate, layer.up, layer.down, direct.head)
    assert all(product.packed is not None for product in used)
    packed = completions_of(model)
    monkeypatch.setattr(DirectForward, "of", lambda model: None)
    plain = completions_of(model)
    assert [c.ids for c in packed] == [c.ids for c in plain]
    logprobs = ([lp for c in found for lp in c.sampling_logprobs] for found in (packed, plain))
    assert next(logprobs) == pytest.approx(next(logprobs), abs=1e-4)
