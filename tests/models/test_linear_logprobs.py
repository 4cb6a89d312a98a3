import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_cli.models.token_logprobs import (
    CHUNK_BYTES,
    Head,
    linear_logprobs,
    token_entropy,
    token_logprobs,
)
from tests.tables import table

N, V, H = 7, 13, 5
ONE_TOKEN, THREE_TOKENS = 1, 3 * V * 8
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 2.5},
    "all": {"bias": True, "scale": 0.6, "softcap": 2.5},
}
LOG_P = torch.tensor([[0.5], [0.25], [0.25]]).log()  # [3, 1]: a layer of three tokens


def logits_of(hidden: Tensor, head: Head) -> Tensor:
    logits = nn.functional.linear(hidden, head.weight, head.bias) * head.scale
    return logits if head.softcap is None else head.softcap * (logits / head.softcap).tanh()


def made(
    dtype: torch.dtype = torch.float64, bias: bool = False, **options: Any
) -> tuple[Tensor, Head, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        drawn = 1.5 * torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).requires_grad_()

    hidden, weight, offset = randn(N, H), randn(V, H), randn(V)
    targets = torch.randint(V, (N,), generator=generator)
    return hidden, Head(weight, offset if bias else None, **options), targets


def plain(
    hidden: Tensor, head: Head, targets: Tensor, temperature: float, entropy: bool = True
) -> tuple[Tensor, Tensor | None]:
    logits = logits_of(hidden, head)
    return (
        token_logprobs(logits, targets, temperature),
        token_entropy(logits, temperature) if entropy else None,
    )


def gradients(
    hidden: Tensor, head: Head, logprobs: Tensor, entropies: Tensor | None
) -> list[Tensor]:
    """Of a loss in which every token weighs something else."""
    weights = torch.arange(1, len(logprobs) + 1, dtype=logprobs.dtype)
    loss = (weights * logprobs).sum()
    if entropies is not None:
        loss = loss + (weights.flip(0) * entropies).sum()
    inputs = [hidden, head.weight, *([] if head.bias is None else [head.bias])]
    return list(torch.autograd.grad(loss, inputs))


class Sizes(TorchDispatchMode):
    """The shape of everything an operation makes, views aside, and how often each one ran."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.ran.append(func.overloadpacket.__name__)
        if not func.is_view and isinstance(made, Tensor):
            self.shapes.append(tuple(made.shape))
        return made


@table(
    "temperature, chances, entropy",
    [
        # 0.5 · ln 2 + 2 · 0.25 · ln 4 = 1.5 ln 2
        (1.0, [0.25, 0.5], 1.5 * math.log(2)),
        # probabilities go as their squares: 1/16 of 1/4 + 1/16 + 1/16
        (0.5, [1 / 6, 2 / 3], 2 / 3 * math.log(3 / 2) + 1 / 3 * math.log(6)),
    ],
)
def test_linear_logprobs_by_hand(temperature: float, chances: list[float], entropy: float) -> None:
    hidden, head, targets = torch.ones(2, 1), Head(LOG_P, None), torch.tensor([1, 0])
    logprobs, entropies = linear_logprobs(hidden, head, targets, temperature, entropy=True)
    assert logprobs.tolist() == pytest.approx([math.log(p) for p in chances])
    assert entropies.tolist() == pytest.approx([entropy] * 2)
    assert linear_logprobs(hidden, head, targets, temperature)[1] is None


def test_scale_bias_and_softcap_by_hand() -> None:
    hidden, targets = torch.ones(1, 1), torch.tensor([1])
    # a scale of 2 is a temperature of 1/2
    logprobs, _ = linear_logprobs(hidden, Head(LOG_P, None, scale=2.0), targets)
    assert logprobs.item() == pytest.approx(math.log(1 / 6))
    # a bias that evens the weights out
    logprobs, _ = linear_logprobs(hidden, Head(LOG_P, -LOG_P[:, 0]), targets)
    assert logprobs.item() == pytest.approx(math.log(1 / 3))
    # logits 0 and 2 tanh(4 · 3 / 2), and then the temperature
    head = Head(torch.tensor([[0.0], [3.0]]), None, scale=4.0, softcap=2.0)
    logprobs, _ = linear_logprobs(hidden, head, targets, 0.5)
    assert logprobs.item() == pytest.approx(-math.log1p(math.exp(-4 * math.tanh(6))), abs=1e-6)


def test_gradient_by_hand() -> None:
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = LOG_P.clone().requires_grad_()
    bias = torch.zeros(3, requires_grad=True)
    logprobs, _ = linear_logprobs(hidden, Head(weight, bias), torch.tensor([1]))
    logprobs.sum().backward()
    # one-hot less the probabilities
    assert bias.grad.tolist() == pytest.approx([-0.5, 0.75, -0.25])
    assert weight.grad[:, 0].tolist() == pytest.approx([-0.5, 0.75, -0.25])
    # −0.5 ln 0.5 + (0.75 − 0.25) ln 0.25 = −0.5 ln 2
    assert hidden.grad.item() == pytest.approx(-0.5 * math.log(2))


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str
)
@table("chunk_bytes", [ONE_TOKEN, THREE_TOKENS, CHUNK_BYTES])
@table("temperature", [1.0, 0.7])
@table("mode", ["no entropy", "entropy", "entropy with gradient"])
def test_matches_complete_logits(
    dtype: torch.dtype, tolerance: float, name: str, mode: str, temperature: float, chunk_bytes: int
) -> None:
    hidden, head, targets = made(dtype, **HEADS[name])
    logprobs, entropies = linear_logprobs(
        hidden,
        head,
        targets,
        temperature,
        entropy=mode != "no entropy",
        entropy_gradient=mode == "entropy with gradient",
        chunk_bytes=chunk_bytes,
    )
    expected, uncertain = plain(hidden, head, targets, temperature, mode != "no entropy")
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(logprobs, expected, **close)
    torch.testing.assert_close(entropies, uncertain, **close)
    if entropies is not None and mode == "entropy":
        assert not entropies.requires_grad
        uncertain, entropies = uncertain.detach(), None
    given = gradients(hidden, head, logprobs, entropies)
    right = gradients(hidden, head, expected, uncertain)
    for ours, theirs in zip(given, right, strict=True):
        # relative to the largest: float32 sums of ±30 round at more than 1e-5 of a small one
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * theirs.abs().max().item())


def test_no_tokens() -> None:
    hidden, head, targets = made()
    logprobs, entropies = linear_logprobs(hidden[:0], head, targets[:0], entropy=True)
    assert logprobs.shape == (0,)
    assert entropies.shape == (0,)
    logprobs.sum().backward()
    assert head.weight.grad.eq(0).all()


@pytest.mark.parametrize(("softcap", "entropy_gradient"), [(None, False), (2.5, True)])
def test_infinite_logit_gives_no_nan(softcap: float | None, entropy_gradient: bool) -> None:
    hidden, head, targets = made(bias=True, softcap=softcap)
    ruled_out = next(token for token in range(V) if token not in targets)
    with torch.no_grad():
        head.bias[ruled_out] = -torch.inf
    logprobs, entropies = linear_logprobs(
        hidden, head, targets, entropy=True, entropy_gradient=entropy_gradient
    )
    expected, uncertain = plain(hidden, head, targets, 1.0)
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropies, uncertain)
    for gradient in gradients(hidden, head, logprobs, entropies if entropy_gradient else None):
        assert gradient.isfinite().all()
    if softcap is None:
        never = linear_logprobs(hidden, head, torch.full_like(targets, ruled_out))[0]
        assert never.eq(-torch.inf).all()


def half_case(
    dtype: torch.dtype = torch.bfloat16, tokens: int = 256
) -> tuple[Tensor, Head, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(300, 16, generator=generator).to(dtype).requires_grad_()
    return hidden, Head(weight, None), torch.randint(300, (tokens,), generator=generator)


def test_bfloat16_logits_are_reduced_in_float32() -> None:
    hidden, head, targets = half_case()
    logits = logits_of(hidden, head)
    for given, exact in [
        (token_logprobs(logits, targets, 0.7), token_logprobs(logits.double(), targets, 0.7)),
        (token_entropy(logits, 0.7), token_entropy(logits.double(), 0.7)),
    ]:
        assert given.dtype == torch.float32
        torch.testing.assert_close(given, exact.float())


def test_bfloat16_weights_are_reduced_in_float32() -> None:
    hidden, head, targets = half_case()
    logits = logits_of(hidden, head)
    logprobs, entropies = linear_logprobs(hidden, head, targets, 0.7, entropy=True)
    assert logprobs.dtype == torch.float32
    right, uncertain = (
        token_logprobs(logits.double(), targets, 0.7),
        token_entropy(logits.double(), 0.7),
    )
    torch.testing.assert_close(logprobs.double(), right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies.double(), uncertain, rtol=1e-5, atol=1e-5)
    in_half = (logits / 0.7).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    assert (in_half.double() - right).abs().max() > 1e-2


@pytest.mark.parametrize("chunk_bytes", [2 * 300 * 4, CHUNK_BYTES])
def test_bfloat16_weights_gather_their_gradient_in_float32(chunk_bytes: int) -> None:
    hidden, head, targets = half_case(tokens=1024)
    logprobs, _ = linear_logprobs(hidden, head, targets, 0.7, chunk_bytes=chunk_bytes)
    given = torch.autograd.grad(logprobs.sum(), (hidden, head.weight))
    assert [gradient.dtype for gradient in given] == [torch.bfloat16] * 2
    logits = logits_of(hidden, head).detach().double().requires_grad_()
    token_logprobs(logits, targets, 0.7).sum().backward()
    right = logits.grad @ head.weight.double(), logits.grad.t() @ hidden.double()
    for ours, theirs in zip(given, right, strict=True):
        # Half of the last of 8 bits is 0.002 to 0.004; 512 sums kept in bfloat16 are 0.01 off.
        assert (ours.double() - theirs).norm() < 0.004 * theirs.norm()


def test_autocast() -> None:
    hidden, half, targets = half_case(torch.float32)
    head = Head(half.weight, torch.linspace(-1, 1, 300).requires_grad_(), scale=0.5)
    with torch.autocast("cpu", torch.bfloat16):
        given = linear_logprobs(hidden, head, targets, 0.7, entropy=True, entropy_gradient=True)
        logits = nn.functional.linear(hidden, head.weight, head.bias)
        logits = logits.float() * 0.5
    right = token_logprobs(logits, targets, 0.7), token_entropy(logits, 0.7)
    torch.testing.assert_close(given, right, rtol=1e-5, atol=1e-5)
    whole = linear_logprobs(hidden, head, targets, 0.7)[0]
    assert (whole - given[0]).abs().max() > 1e-3
    for ours, theirs in zip(
        gradients(hidden, head, *given), gradients(hidden, head, *right), strict=True
    ):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 0.01 * theirs.norm()


BIG_N, BIG_V, BIG_H = 50, 1000, 4
LIMIT = 8  # tokens in a chunk


def measured(
    dtype: torch.dtype, softcap: float | None, frozen: bool = False, **options: Any
) -> tuple[list[int], list[str], list[str]]:
    """Elements made by each operation, and the operations of the forward and the backward."""
    hidden = torch.randn(BIG_N, BIG_H).to(dtype).requires_grad_()
    weight = torch.randn(BIG_V, BIG_H).to(dtype).requires_grad_(not frozen)
    targets = torch.randint(BIG_V, (BIG_N,))
    limit = LIMIT * BIG_V * (8 if dtype == torch.float64 else 4)
    with Sizes() as forward:
        logprobs, entropies = linear_logprobs(
            hidden, Head(weight, None, softcap=softcap), targets, chunk_bytes=limit, **options
        )
    loss = logprobs.sum()
    if entropies is not None and entropies.requires_grad:
        loss = loss + entropies.sum()
    with Sizes() as backward:
        loss.backward()
    shapes = forward.shapes + backward.shapes
    assert len(shapes) > 10
    return [math.prod(shape) for shape in shapes], forward.ran, backward.ran


@pytest.mark.parametrize(
    ("dtype", "softcap", "entropy"),
    [(torch.float32, None, True), (torch.float64, 5.0, False), (torch.bfloat16, 5.0, True)],
)
def test_memory_is_one_chunk(dtype: torch.dtype, softcap: float | None, entropy: bool) -> None:
    elements, *_ = measured(dtype, softcap, entropy=entropy, entropy_gradient=entropy)
    assert LIMIT * BIG_V >= max(elements) > (LIMIT - 1) * BIG_V  # 50 tokens by eights: seven times


def test_frozen_layer_has_no_gradient() -> None:
    _, _, backward = measured(torch.float32, None, frozen=True)
    assert backward.count("mm") == 7
    assert "addmm_" not in backward
    assert "zeros_like" not in backward


@pytest.mark.parametrize(
    ("name", "options"),
    [("falcon_h1", {"lm_head_multiplier": 0.25}), ("xlstm", {"output_logit_soft_cap": 4.0})],
)
def test_the_output_layer_by_its_configuration(name: str, options: dict[str, float]) -> None:
    config = transformers.AutoConfig.for_model(name, **options)
    model: Any = SimpleNamespace(config=config, get_output_embeddings=lambda: nn.Linear(2, 3))
    head = Head.of(model)
    assert (head.scale, head.softcap) == (
        options.get("lm_head_multiplier", 1.0),
        options.get("output_logit_soft_cap"),
    )


def test_model_without_an_output_layer_is_refused() -> None:
    model: Any = SimpleNamespace(get_output_embeddings=lambda: None)
    with pytest.raises(TypeError, match="output layer is a NoneType"):
        Head.of(model)
