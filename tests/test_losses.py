import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_cli import train
from grpo_cli.config import Generation, Loss, Recipe
from grpo_cli.losses import POLICY, clip_flags, clipped, k3, token_weights
from grpo_cli.rollouts import collate
from tests.conftest import CPU, make_rollout

GOLDENS = json.loads((Path(__file__).parent / "data" / "policy_loss.json").read_text("utf-8"))

# (ratio, advantage, epsilon_high, loss, d loss / d logprob, clipped below, clipped above)
# with epsilon 0.2; while the ratio is not clipped, the gradient equals the loss: d ρ / d log ρ = ρ.
CASES = [
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


@pytest.mark.parametrize(("ratio", "advantage", "high", "loss", "grad", "below", "above"), CASES)
def test_clipped_by_hand(
    ratio: float,
    advantage: float,
    high: float | None,
    loss: float,
    grad: float,
    below: bool,
    above: bool,
) -> None:
    old = torch.tensor([[-0.7]], dtype=torch.float64)
    logprobs = (old + math.log(ratio)).requires_grad_()
    given = torch.tensor([advantage], dtype=torch.float64)
    out = clipped(logprobs, old, given, epsilon=0.2, epsilon_high=high)
    out.sum().backward()
    assert logprobs.grad is not None
    assert out.item() == pytest.approx(loss)
    assert logprobs.grad.item() == pytest.approx(grad)
    flags = clip_flags(logprobs, old, given, epsilon=0.2, epsilon_high=high)
    assert [f.item() for f in flags] == [below, above]


def test_each_row_has_its_own_advantage() -> None:
    logprobs = torch.zeros(2, 3)
    loss = clipped(logprobs, logprobs, torch.tensor([1.0, -5.0]), epsilon=0.2)
    assert loss.tolist() == [[-1.0] * 3, [5.0] * 3]


def test_at_ratio_one_the_gradient_is_that_of_reinforce() -> None:
    random = torch.Generator().manual_seed(0)
    parameters = torch.randn(4, dtype=torch.float64, generator=random).requires_grad_()
    features = torch.randn(6, 5, 4, dtype=torch.float64, generator=random)
    advantages = torch.randn(6, dtype=torch.float64, generator=random)

    def gradient(loss_of: Any) -> Tensor:
        logprobs = torch.nn.functional.logsigmoid(features @ parameters)  # [6, 5]
        (grad,) = torch.autograd.grad(loss_of(logprobs).sum(), parameters)
        return grad

    ours = gradient(lambda lp: clipped(lp, lp.detach(), advantages, epsilon=0.2))
    torch.testing.assert_close(ours, gradient(lambda lp: -advantages[:, None] * lp))


def test_shapes_that_do_not_match_are_refused() -> None:
    logprobs = torch.zeros(2, 3)
    for old, advantages in [
        (torch.zeros(2, 1), torch.zeros(2)),
        (logprobs, torch.zeros(3)),
        (logprobs, torch.zeros(2, 3)),
    ]:
        with pytest.raises(AssertionError):
            clipped(logprobs, old, advantages, epsilon=0.2)


@pytest.mark.parametrize(
    ("log_ratio", "value"),  # log π_ref − log π
    [(0.0, 0.0), (1.0, 0.71828183), (-1.0, 0.36787944), (math.log(2), 0.30685282)],
)
def test_k3_by_hand(log_ratio: float, value: float) -> None:
    logprobs = torch.tensor([[-2.0]], dtype=torch.float64, requires_grad=True)
    out = k3(logprobs, logprobs.detach() + log_ratio)
    out.sum().backward()
    assert logprobs.grad is not None
    assert out.item() == pytest.approx(value)
    assert logprobs.grad.item() == pytest.approx(1 - math.exp(log_ratio))


def test_k3_is_the_kl_on_average_over_the_policy() -> None:
    policy, reference = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.25, 0.75]])
    # KL = 0.5 ln(0.5 / 0.25) + 0.5 ln(0.5 / 0.75)
    average = (policy * k3(policy.log(), reference.log())).sum()
    assert average.item() == pytest.approx(0.14384104)


def test_token_weights_by_hand() -> None:
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    # The whole optimizer batch holds twice as much as these rows.
    counts = {"tokens": 8, "completions": 4}
    by_token = token_weights(mask, "tokens", counts)
    assert by_token.tolist() == [[0.125] * 3 + [0.0], [0.125, 0.0, 0.0, 0.0], [0.0] * 4]
    by_completion = token_weights(mask, "completions", counts)
    expected = torch.tensor([[1 / 12] * 3 + [0.0], [0.25, 0.0, 0.0, 0.0], [0.0] * 4])
    torch.testing.assert_close(by_completion, expected)


@pytest.mark.parametrize("normalize", ["tokens", "completions"])
def test_a_batch_of_nothing_weighs_nothing(normalize: str) -> None:
    nothing = token_weights(torch.zeros(2, 3), normalize, {"tokens": 0, "completions": 0})
    assert nothing.eq(0).all()


def total(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    normalize: str,
    counts: dict[str, float],
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    beta: float = 0.0,
) -> Tensor:
    """The loss of some rows, as train.objective puts it together."""
    per_token = clipped(
        logprobs, old_logprobs, advantages, epsilon=epsilon, epsilon_high=epsilon_high
    )
    per_token = per_token + beta * k3(logprobs, ref_logprobs)
    return (per_token * token_weights(mask, normalize, counts)).sum()


def counts_of(mask: Tensor) -> dict[str, float]:
    return {"tokens": mask.sum().item(), "completions": (mask.sum(-1) > 0).sum().item()}


@pytest.mark.parametrize("normalize", ["tokens", "completions"])
@pytest.mark.parametrize("parts", [[6], [3, 3], [1, 2, 3], [1] * 6])
def test_micro_batches_and_padding_leave_loss_and_gradient_alone(
    normalize: str, parts: list[int]
) -> None:
    random = torch.Generator().manual_seed(0)
    rows = [-2 * torch.rand(6, 7, dtype=torch.float64, generator=random) for _ in range(3)]
    advantages = torch.randn(6, dtype=torch.float64, generator=random)
    lengths = torch.tensor([[7], [1], [3], [5], [0], [2]])
    mask = (torch.arange(7) < lengths).double()
    counts = counts_of(mask)
    logprobs = rows[0].requires_grad_()
    whole = total(logprobs, rows[1], rows[2], advantages, mask, normalize, counts, beta=0.1)
    (gradient,) = torch.autograd.grad(whole, logprobs)

    split = torch.zeros((), dtype=torch.float64)
    for index in torch.arange(6).flip(0).split(parts):
        old, ref, m, lp = (
            torch.nn.functional.pad(t[index], (0, 4), value=v)
            for t, v in ((rows[1], -1.0), (rows[2], -3.0), (mask, 0.0), (logprobs, -2.0))
        )
        split = split + total(lp, old, ref, advantages[index], m, normalize, counts, beta=0.1)
    (split_gradient,) = torch.autograd.grad(split, logprobs)
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-6)
    torch.testing.assert_close(split_gradient, gradient, rtol=0, atol=1e-6)
    assert gradient.abs().sum() > 0.1


@pytest.mark.parametrize("case", GOLDENS, ids=lambda c: f"{c['id']}-{c['settings']['loss_type']}")
def test_golden_values_of_trl(case: dict[str, Any]) -> None:
    """TRL 1.16.0's `_compute_loss` in float64: `dapo` and `bnpo` average tokens, `grpo` rows."""
    settings, expected = case["settings"], case["expected"]
    given = {k: torch.tensor(v, dtype=torch.float64) for k, v in case["inputs"].items()}
    logprobs, mask = given["logprobs"].requires_grad_(), given["mask"]
    old = logprobs.detach() if settings.get("on_policy") else given["old_logprobs"]
    ref = given.get("ref_logprobs", logprobs.detach())
    normalize = "completions" if settings["loss_type"] == "grpo" else "tokens"
    clip = {k: settings[k] for k in ("epsilon", "epsilon_high") if k in settings}
    beta = settings.get("beta", 0.0)
    loss = total(
        logprobs, old, ref, given["advantages"], mask, normalize, counts_of(mask), beta=beta, **clip
    )
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-6)
    gradient = torch.tensor(expected["grad"], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, gradient, rtol=0, atol=1e-6)

    low, high = clip_flags(logprobs, old, given["advantages"], **{"epsilon": 0.2, **clip})
    measured = {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low | high,
    }
    if beta:
        measured["kl"] = k3(logprobs, ref)
    for name, value in measured.items():
        average = ((value * mask).sum() / mask.sum()).item()
        assert average == pytest.approx(expected["metrics"][name], abs=1e-6), name


class SureOfItself:
    """A causal LM that gives the padding's id, 0, a log-probability of −200 everywhere."""

    def __init__(self) -> None:
        self.weight = torch.zeros(10, requires_grad=True)

    def __call__(self, input_ids: Tensor, logits_to_keep: int, **_: Any) -> SimpleNamespace:
        logits = self.weight + torch.tensor([-200.0] + [0.0] * 9)
        return SimpleNamespace(logits=logits.expand(len(input_ids), logits_to_keep, 10))


def test_what_the_policy_says_of_padding_cannot_overflow_the_loss() -> None:
    rollouts = [
        make_rollout(completion_ids=[3, 4, 5], advantage=1.0),
        make_rollout(completion_ids=[3], advantage=-1.0),
    ]
    for r in rollouts:
        r.old_logprobs = r.ref_logprobs = torch.full((len(r.completion.ids),), -math.log(9))
    recipe = Recipe(loss=Loss(beta=0.1), generation=Generation(temperature=1.0))
    policy = SureOfItself()
    run: Any = SimpleNamespace(recipe=recipe)
    counts = {"tokens": 4.0, "completions": 2.0}
    loss, sums, _ = train.objective(run, policy, collate(rollouts, CPU), counts)
    loss.backward()
    # every ratio is 1 and π = π_ref on the tokens that count: −(3 · 1 − 1 · 1) / 4
    assert loss.item() == pytest.approx(-0.5)
    assert sums["kl"] == pytest.approx(0.0, abs=1e-6)
    assert policy.weight.grad is not None
    assert policy.weight.grad.isfinite().all()


def test_every_policy_loss_can_be_chosen_and_every_choice_exists() -> None:
    (field,) = (f for f in dataclasses.fields(Loss) if f.name == "policy")
    assert set(field.metadata["choices"]) == set(POLICY)
