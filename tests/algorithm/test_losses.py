"""Each policy loss on numbers worked by hand; reference_losses.py has them at random.

Rows that share a subject are one table: what goes in, then loss and gradient by the logprob.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_cli.algorithm.batch import WEIGHTS
from grpo_cli.algorithm.loss import ESTIMATORS
from grpo_cli.algorithm.losses import (
    POLICY,
    cispo,
    clip_cov,
    clip_flags,
    clipped,
    gmpo,
    importance_ratio,
    kl_cov,
    sapo,
    vespo,
    vespo_weight,
)
from grpo_cli.algorithm.settings import Loss
from grpo_cli.algorithm.variants import own_arguments, parameters
from grpo_cli.config.knob import flags_of

FIELDS = {f.name: f for f in dataclasses.fields(Loss)}


KNOBS: dict[Any, dict[str, Any]] = {
    clipped: {"epsilon": 0.2, "epsilon_high": None, "delta": 4.0},
    cispo: {"ratio_cap": 5.0},
    sapo: {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 2.0},
}


def row(values: Iterable[float], *, grad: bool = False) -> Tensor:
    """[1, C] in float64."""
    return torch.tensor([list(values)], dtype=torch.float64, requires_grad=grad)


def ones(number: int) -> Tensor:
    return row([1.0] * number)


def gradient(loss: Tensor, by: Tensor) -> list[float]:
    """Of the sum of a [1, C] loss, by [1, C]."""
    (found,) = torch.autograd.grad(loss.sum(), by, allow_unused=True, materialize_grads=True)
    return [float(x) for x in found[0]]


def values(tensor: Tensor) -> list[float]:
    """Of a [1, C] tensor."""
    assert len(tensor) == 1
    return [float(x) for x in tensor.detach()[0]]


def test_ratio_of_tokens() -> None:
    log_ratio = row([math.log(2), 0.0, math.log(0.5)], grad=True)
    ratio = importance_ratio(log_ratio, ones(3), "token")
    assert values(ratio) == pytest.approx([2, 1, 0.5])
    assert gradient(ratio, log_ratio) == pytest.approx([2, 1, 0.5])


def test_ratio_of_the_sequence_is_the_geometric_mean() -> None:
    log_ratio = row([math.log(8), 0.0, 0.0, 0.0], grad=True)  # the last one does not train
    mask = row([1, 1, 1, 0])
    ratio = importance_ratio(log_ratio, mask, "sequence")
    assert ratio.shape == (1, 1)
    assert ratio.item() == pytest.approx(2)
    assert gradient(ratio, log_ratio) == pytest.approx([2 / 3, 2 / 3, 2 / 3, 0])


def test_ratio_of_the_sequence_with_each_tokens_own_gradient() -> None:
    log_ratio = row([math.log(8), 0.0, 0.0], grad=True)
    ratio = importance_ratio(log_ratio, ones(3), "sequence_token")
    assert values(ratio) == pytest.approx([2, 2, 2])
    factors = row([1, 10, 100])
    assert gradient(ratio * factors, log_ratio) == pytest.approx([2, 20, 200])


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
def test_ratio_past_float32_is_held_without_gradient(level: str) -> None:
    for log in (200.0, -200.0):
        log_ratio = torch.tensor([[log]], requires_grad=True)
        ratio = importance_ratio(log_ratio, torch.ones(1, 1), level)
        assert ratio.item() == pytest.approx(math.exp(math.copysign(80, log)), rel=1e-4)
        assert gradient(ratio, log_ratio) == [0]


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
def test_ratio_of_what_does_not_train_is_one(level: str) -> None:
    ratio = importance_ratio(torch.zeros(1, 2), torch.zeros(1, 2), level)
    assert ratio.eq(1).all()


# (ratio, advantage, epsilon_high, loss, d loss / d logprob, clipped below, clipped above)
# with epsilon 0.2; while the ratio is not clipped, the gradient equals the loss: d ρ / d log ρ = ρ.
CLIPPED = [
    (1.0, 2.0, None, -2.0, -2.0, False, False),
    (1.0, -2.0, None, 2.0, 2.0, False, False),
    (1.1, 2.0, None, -2.2, -2.2, False, False),
    (1.5, 2.0, None, -2.4, 0.0, False, True),
    (0.5, 2.0, None, -1.0, -1.0, False, False),
    (1.5, -2.0, None, 3.0, 3.0, False, False),
    (0.9, -2.0, None, 1.8, 1.8, False, False),
    (0.5, -2.0, None, 1.6, 0.0, True, False),
    (1.25, 2.0, None, -2.4, 0.0, False, True),
    (1.25, 2.0, 0.28, -2.5, -2.5, False, False),
    (1.5, 2.0, 0.28, -2.56, 0.0, False, True),
    (0.75, -2.0, 0.28, 1.6, 0.0, True, False),
    (1.1, 2.0, 0.0, -2.0, 0.0, False, True),
    (1.5, 0.0, None, 0.0, 0.0, False, False),
    (0.5, 0.0, None, 0.0, 0.0, False, False),
]


@pytest.mark.parametrize(("ratio", "advantage", "high", "loss", "grad", "below", "above"), CLIPPED)
def test_clipped_by_hand(
    ratio: float,
    advantage: float,
    high: float | None,
    loss: float,
    grad: float,
    below: bool,
    above: bool,
) -> None:
    log_ratio, given = row([math.log(ratio)], grad=True), row([advantage])
    out = clipped(log_ratio.exp(), given, epsilon=0.2, epsilon_high=high, delta=None)
    assert values(out) == pytest.approx([loss])
    assert gradient(out, log_ratio) == pytest.approx([grad])
    flags = clip_flags(log_ratio.exp(), given, 0.2, high)
    assert [flag.item() for flag in flags] == [below, above]


@pytest.mark.parametrize(
    ("policy", "ratio", "advantage", "loss", "grad"),
    [
        # epsilon 0.2, and a delta of 4, which bounds what the minimum leaves open
        (clipped, 3.0, -2.0, 6.0, 6.0),
        (clipped, 5.0, -2.0, 8.0, 0.0),
        (clipped, 0.5, -2.0, 1.6, 0.0),
        (clipped, 5.0, 2.0, -2.4, 0.0),
        (clipped, 0.5, 2.0, -1.0, -1.0),
        # cap 5, logprob −0.5; the gradient is −min(ρ, 5)·A
        (cispo, 1.0, 2.0, 1.0, -2.0),
        (cispo, 3.0, 2.0, 3.0, -6.0),
        (cispo, 7.0, 2.0, 5.0, -10.0),
        (cispo, 7.0, -2.0, -5.0, 10.0),
        (cispo, 0.1, -2.0, -0.1, 0.2),
        # τ = 1 for A > 0, else 2
        (sapo, 1.0, 3.0, -3 * 2, -3),
        (sapo, 1.0, -3.0, 3 * 1, 3),
        (sapo, 2.0, 3.0, -3 * 4 * 0.7310585786, -3 * 2 * 4 * 0.1966119332),  # σ(1), ρ·σ'(1)
        (sapo, 2.0, -3.0, 3 * 2 * 0.8807970780, 3 * 2 * 4 * 0.1049935854),  # σ(2), ρ·σ'(2)
        (sapo, 0.5, 3.0, -3 * 4 * 0.3775406688, -3 * 0.5 * 4 * 0.2350037122),  # σ(−1/2)
        (sapo, 2.0, 0.0, 0.0, 0.0),
    ],
)
def test_losses_of_the_ratio_by_hand(
    policy: Any, ratio: float, advantage: float, loss: float, grad: float
) -> None:
    logprobs = row([-0.5], grad=True)
    given = {"ratio": (logprobs + 0.5 + math.log(ratio)).exp(), "advantages": row([advantage])}
    out = policy(**given, **({"logprobs": logprobs} if policy is cispo else {}), **KNOBS[policy])
    assert values(out) == pytest.approx([loss])
    assert gradient(out, logprobs) == pytest.approx([grad])


VESPO = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}


@pytest.mark.parametrize(
    ("w", "positive", "negative"),  # w²e^(3(1−w)), w³e^(2(1−w))
    [
        (1.0, 1.0, 1.0),
        (2.0, 4 * 0.0497870684, 8 * 0.1353352832),
        (0.5, 0.25 * 4.4816890703, 0.125 * 2.7182818285),
        (1e-9, 1e-16 * 20.0855369, 1e-24 * 7.389056),  # w is no less than 1e-8
        (1e30, 0.0, 0.0),
    ],
)
@pytest.mark.parametrize("through", ["ratio", "correction"])
def test_vespo_by_hand(w: float, positive: float, negative: float, through: str) -> None:
    """w is the product of the completion's ratios and of the sampler's correction."""
    of_ratio, of_sampler = (math.log(w), 0.0) if through == "ratio" else (0.0, math.log(w))
    logprobs = row([-0.5, -2.0, -1.0], grad=True)
    mask = row([1, 1, 0])  # the last one does not train
    half = of_ratio / 2  # of each token, since a token's own is held to e^±20
    log_ratio = (logprobs - logprobs.detach()) + row([half + 0.1, half - 0.1, 5.0])
    for advantage, phi in ((3.0, positive), (-3.0, negative)):
        out = vespo(log_ratio, row([advantage] * 3), logprobs, mask, row([of_sampler]), **VESPO)
        loss, grad = -phi * advantage * row([-0.5, -2.0]), -phi * advantage * mask
        assert values(out[:, :2]) == pytest.approx(values(loss), rel=1e-5, abs=1e-30)
        # φ is under a stop-gradient
        assert gradient(out * mask, logprobs) == pytest.approx(values(grad), rel=1e-5, abs=1e-30)


def test_vespo_bounds_each_ratio_and_each_correction_by_itself() -> None:
    def weight(log_ratio: Sequence[float], log_correction: Sequence[float]) -> float:
        mask = ones(len(log_ratio))
        k, lam = (1.0, 1.0), (1.0, 1.0)
        return values(vespo_weight(row(log_ratio), mask, mask, row(log_correction), k, lam))[0]

    assert weight([300.0, -20.0], [0.0]) == pytest.approx(1)  # e^20 · e^−20
    assert weight([-300.0, 20.0], [0.0]) == pytest.approx(1)
    assert weight([-10.0, -10.0], [300.0, 0.0]) == pytest.approx(1)
    assert weight([20.0, 0.0], [-300.0, -20.0 - math.log(1e-8)]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("log_ratios", "advantage", "loss", "grad"),  # epsilon 0.4, epsilon_high 0.3
    [
        ([0.1, 0.2], 2.0, -2 * math.exp(0.15), [-math.exp(0.15), -math.exp(0.15)]),
        ([0.5, 0.1], 2.0, -2 * math.exp(0.2), [0, -math.exp(0.2)]),
        ([-0.9, 0.1], 2.0, -2 * math.exp(-0.4), [-math.exp(-0.4), -math.exp(-0.4)]),
        ([-0.9, 0.1], -2.0, 2 * math.exp(-0.15), [0, math.exp(-0.15)]),
        ([0.9, 0.1], -2.0, 2 * math.exp(0.5), [math.exp(0.5), math.exp(0.5)]),
        ([0.1, 0.2], 0.0, 0.0, [0, 0]),
    ],
)
def test_gmpo_by_hand(
    log_ratios: list[float], advantage: float, loss: float, grad: list[float]
) -> None:
    log_ratio, mask = row(log_ratios, grad=True), ones(len(log_ratios))
    out = gmpo(log_ratio, row([advantage] * 2), mask, mask, epsilon=0.4, epsilon_high=0.3)
    assert values(out) == pytest.approx([loss] * 2)  # each token carries the completion's value
    assert gradient(out / 2, log_ratio) == pytest.approx(grad)
    if not advantage:
        return
    one_bound = gmpo(log_ratio, row([advantage] * 2), mask, mask, epsilon=0.4, epsilon_high=None)
    bounded = max(log_ratios) > 0.3 and advantage > 0
    assert (values(one_bound) != pytest.approx([loss] * 2)) == bounded  # null: epsilon


def test_gmpo_of_fewer_tokens_weighs_as_much() -> None:
    """Of four tokens three train, and two of them are of high entropy."""
    log_ratio = row([0.1, -0.3, 0.3, 9.0])
    mask, trained = row([1, 1, 1, 0]), row([1, 0, 1, 0])
    out = gmpo(log_ratio, row([2.0] * 4), mask, trained, epsilon=0.4, epsilon_high=None)
    assert values(out * trained / 3)[0] == pytest.approx(-2 * math.exp(0.2) / 2)
    assert (out * trained / 3).sum().item() == pytest.approx(-2 * math.exp(0.2))
    nothing = gmpo(log_ratio, row([2.0] * 4), mask, mask * 0, epsilon=0.4, epsilon_high=None)
    assert nothing.isfinite().all()


def test_clip_cov_by_hand() -> None:
    log_ratio = row([math.log(r) for r in (1.1, 1.5, 0.5, 1.1)], grad=True)
    advantages, chosen = row([2.0, 2.0, -2.0, 2.0]), row([0, 0, 0, 1])
    out = clip_cov(log_ratio.exp(), advantages, chosen, epsilon=0.2, epsilon_high=0.3)
    assert values(out) == pytest.approx([-2.2, -2.6, 1.6, 0])
    assert gradient(out, log_ratio) == pytest.approx([-2.2, 0, 0, 0])


def test_kl_cov_by_hand() -> None:
    log_ratio = row([math.log(2), math.log(2), -math.log(2), 0.0], grad=True)
    advantages, chosen = row([3.0, 3.0, 3.0, 3.0]), row([0, 1, 1, 1])
    out = kl_cov(log_ratio.exp(), log_ratio, advantages, chosen, cov_kl=0.5)
    half = 0.5 * math.log(2)
    assert values(out) == pytest.approx([-6, -6 + half, -1.5 + half, -3])
    assert gradient(out, log_ratio) == pytest.approx([-6, -6 + 0.5, -1.5 - 0.5, -3])


def test_kl_cov_does_not_follow_the_sign_of_rounding_noise() -> None:
    log_ratio = row([1e-6, -1e-6], grad=True)
    out = kl_cov(log_ratio.exp(), log_ratio, row([3.0, 3.0]), row([1, 1]), cov_kl=0.5)
    assert gradient(out, log_ratio) == pytest.approx([-3, -3], abs=1e-4)


# What a recipe can choose


@pytest.mark.parametrize(
    ("knob", "table"),
    [
        ("normalize", set(WEIGHTS)),
        ("kl_estimator", set(ESTIMATORS)),
    ],
)
def test_every_choice_exists_and_all_there_is_can_be_chosen(knob: str, table: set[str]) -> None:
    assert set(FIELDS[knob].metadata["choices"]) == table


@pytest.mark.parametrize("level", FIELDS["ratio_level"].metadata["choices"])
def test_every_ratio_level_exists(level: str) -> None:
    importance_ratio(torch.zeros(1, 1), torch.ones(1, 1), level)


@pytest.mark.parametrize("policy", POLICY)
def test_what_a_loss_reads_are_knobs(policy: str) -> None:
    known = {*FIELDS, *own_arguments(POLICY[policy], Loss())}
    assert set(parameters(POLICY[policy])[1]) <= known


def test_a_ratio_level_is_chosen_only_for_losses_of_the_ratio() -> None:
    for policy in flags_of(FIELDS["ratio_level"]).read_if[1:]:
        assert "ratio" in parameters(POLICY[policy])[0]
