"""The self-checks find wrong computations and accept rounding, in float32 and in bfloat16."""

import copy
import functools
import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_cli.models import attention, self_check, token_logprobs
from grpo_cli.models.policy_logprobs import PolicyLogprobs
from grpo_cli.models.self_check import Outcome, difference, excess
from tests.models.families import BY_NAME, Family
from tests.models.test_architectures import make
from tests.models.test_policy_logprobs import make_rollouts


def outcome(*apart: float, gradient: float = 1.0) -> Outcome:
    """Log-probabilities of -2 plus each offset in nats, and a gradient of one element."""
    right = torch.full((len(apart),), -2.0).double()
    return Outcome(right + torch.tensor(apart).double(), torch.tensor([gradient]))


@pytest.mark.parametrize(
    ("dtype", "largest", "mean"), [(torch.float64, 1e-6, 1e-7), (torch.float32, 2e-3, 2e-4)]
)
def test_tolerance_depends_on_dtype(dtype: torch.dtype, largest: float, mean: float) -> None:
    right = outcome(*[0.0] * 5)
    assert difference(outcome(*[-0.99 * mean] * 5), right, dtype) is None
    assert difference(outcome(*[1.01 * mean] * 5), right, dtype)
    # One token off by x changes the mean of five by x / 5.
    assert difference(outcome(0, 0, 0, 0, 4.9 * mean), right, dtype) is None
    assert difference(outcome(0, 0, -5.1 * mean, 0, 0), right, dtype) == (
        f"log-probabilities differ by {1.02 * mean:.1e} nats on average, {5.1 * mean:.1e} at most, "
        f"in {str(dtype).removeprefix('torch.')}{self_check.ADVICE}"
    )
    assert difference(outcome(math.nan, 0, 0, 0, 0), right, dtype)
    many = outcome(*[0.0] * 200)
    assert difference(outcome(1.01 * largest, *[0.0] * 199), many, dtype)
    assert difference(outcome(*[0.0] * 5, gradient=1.02), right, dtype)
    assert difference(outcome(*[0.0] * 5, gradient=1 + 1e-6), right, dtype) is None


def test_16_bit_error_is_compared_with_the_simplest_mode() -> None:
    right, simplest = outcome(0, 0, 0, 0), outcome(0.02, -0.04, 0.03, -0.03, gradient=0.9)
    # 3 · 0.03, and of the gradient 3 · 0.1, with a little more.
    near = outcome(-0.09, 0.09, -0.09, 0.09)
    assert excess(near, simplest, right) is None
    assert excess(outcome(0.1, 0.1, 0.1, 0.1), simplest, right) == (
        "log-probabilities are off by 1.0e-01 nats on average, of which rounding explains 3.0e-02"
        + self_check.ADVICE
    )
    assert excess(outcome(0, 0, 0, 0, gradient=1.3), simplest, right) is None
    assert excess(outcome(0, 0, 0, 0, gradient=1.32), simplest, right)
    assert excess(outcome(math.nan, 0, 0, 0), simplest, right)
    assert excess(outcome(0, 0, 0, 0, gradient=math.nan), simplest, right)
    # Where the simplest mode happens to be exact, a thousandth of a nat is still rounding.
    assert excess(outcome(9e-4, 9e-4, 9e-4, 9e-4), right, right) is None


def logits(model: PreTrainedModel) -> Tensor:
    rollouts = make_rollouts([(5, [4])])
    ids = torch.tensor([[*rollouts[0].prompt.ids, *rollouts[0].completion.ids]])
    return model(input_ids=ids).logits


def gradient_of_first_norm(model: PreTrainedModel) -> Tensor:
    norm = next(p for p in model.parameters() if p.ndim == 1)
    mixed = logits(model).float().square().sum()
    return torch.autograd.grad(mixed, norm)[0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma3n_text"])
def test_weights_of_16_bit_compute_in_float32(name: str, tied: bool) -> None:
    family = BY_NAME[name]
    settings = family.settings | {"tie_word_embeddings": tied}
    half = make(replace(family, settings=settings)).bfloat16()
    wide = copy.deepcopy(half).float()  # the same numbers
    kept = dict(half.named_parameters())
    assert self_check.is_16_bit(half)
    assert not self_check.is_16_bit(wide)
    assert not torch.allclose(logits(half).float(), logits(wide), atol=1e-4)
    with self_check.in_float32(half):
        assert torch.equal(logits(half), logits(wide))
        close = gradient_of_first_norm(wide).bfloat16()  # which the weight's gradient is cast to
        assert torch.allclose(gradient_of_first_norm(half), close, rtol=1e-2)
    assert all(p is kept[name] for name, p in half.named_parameters())
    assert logits(half).dtype == torch.bfloat16
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in half.modules())


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_switched_off(half: torch.dtype) -> None:
    model = make(Family("llama"))
    right = logits(model)
    with torch.autocast("cpu", dtype=half):
        assert self_check.is_16_bit(model)
        assert logits(model).dtype == half
        with self_check.in_float32(model):
            assert torch.equal(logits(model), right)


def test_float32_backward_keeps_no_copy_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    half = make(Family("llama")).bfloat16()
    shapes = {frozenset(p.shape) for p in half.parameters() if p.ndim == 2}
    saved: list[Any] = []
    pack = self_check._Cast.pack

    def record(self: self_check._Cast, tensor: Tensor) -> Any:
        saved.append(pack(self, tensor))
        return saved[-1]

    monkeypatch.setattr(self_check._Cast, "pack", record)
    with self_check.in_float32(half):
        logits(half).sum().backward()  # type: ignore[no-untyped-call]
    weights = [s for s in saved if not isinstance(s, Tensor)]
    assert len(weights) >= sum(isinstance(m, nn.Linear) for m in half.modules())
    assert all(source.dtype == torch.bfloat16 for source, *_ in weights)
    wide = [s for s in saved if isinstance(s, Tensor) and s.dtype == torch.float32]
    assert not any(frozenset(s.shape) in shapes and s.ndim == 2 for s in wide)


@pytest.mark.parametrize("precision", ["float32", "autocast", "weights"])
@pytest.mark.parametrize("part", ["window", "softcap"])
def test_ignored_part_is_found(part: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if part == "window":
        model = make(Family("mistral", {"sliding_window": 8}))
        forward = attention._attend

        def windowless(*given: Any) -> Tensor:
            *others, options = given
            return forward(*others, options | {"sliding_window": None})

        monkeypatch.setattr(attention, "window_of", lambda module: None)
        monkeypatch.setattr(attention, "_attend", windowless)
    else:
        model = make(Family("gemma2", {"final_logit_softcapping": 5.0}))
        monkeypatch.setattr(token_logprobs, "logit_softcap", lambda config: None)
    if precision == "weights":
        model.bfloat16()
    half = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    said: list[str] = []
    policy = PolicyLogprobs(
        model, say=said.append, autocast=half if precision == "autocast" else nullcontext
    )
    policy.check(make_rollouts([(20, [30, 20]), (9, [30, 20])]), 1.0)
    assert "log-probabilities differ" in " ".join(said)
    assert not (policy.mode.packed if part == "window" else policy.mode.chunked)
