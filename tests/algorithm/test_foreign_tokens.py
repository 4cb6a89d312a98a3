"""Tokens of tools and environments are read by the model and never trained.

Under every loss, with every normalisation, correction of the sampler and place of the KL: the
gradient with respect to the logits that predict a foreign token is exactly 0, and no number that a
sampler, an old or a reference policy may have there changes anything, to the last bit.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_cli.algorithm.batch import WEIGHTS, collate
from grpo_cli.algorithm.loss import Coefficients, LossOutput, grpo_loss
from grpo_cli.algorithm.settings import CORRECTIONS, Advantage, Loss
from grpo_cli.config.recipe import Recipe
from grpo_cli.distributed.workers import Workers
from grpo_cli.models.token_logprobs import token_entropy, token_logprobs
from grpo_cli.records import Group, Rollout, TrainingSample, regrouped, rollout_stats
from grpo_cli.scoring.settings import Reward
from grpo_cli.training.rollouts import credit
from tests.algorithm.test_loss import config_of, every_loss
from tests.conftest import CPU, make_group, make_rollout
from tests.optimizer_batch import Found, all_gradients, make_groups

# 1 where the model has sampled; a completion of one turn, and one that ends in a reply.
MASKS = ([1, 1, 0, 0, 1, 0, 1], [1, 0, 1, 1], [1, 1, 1], [1, 1, 0, 0, 0])
VOCABULARY = 5
RECIPE = Recipe(reward={"r": Reward("r")})


def make_batch(foreign: float | None = None) -> list[Group]:
    """Returns two groups of two episodes.

    Args:
        foreign: value of all log-probabilities of foreign tokens; None: random ones, as a pass over
            complete completions would give.
    """
    random = torch.Generator().manual_seed(0)
    rollouts = []
    for i, mask in enumerate(MASKS):
        ids = torch.randint(VOCABULARY, (len(mask),), generator=random).tolist()
        here = torch.tensor(mask, dtype=torch.bool)
        own = token_logprobs(make_logits()[i, : len(ids)], torch.tensor(ids)).detach().float()
        noise = [torch.randn(len(mask), generator=random) for _ in range(3)]
        # Of each group one is about on-policy, inside the narrowest clip.
        values = [
            own + s * n for s, n in zip((0.3 if i % 2 else 1e-4, 0.3, 0.1), noise, strict=True)
        ]
        if foreign is not None:
            values = [v.masked_fill(~here, foreign) for v in values]
        old, ref, sampling = values
        rollouts.append(
            make_rollout(
                [1 + i // 2],
                ids,
                reward=float(i % 2),
                parts={"r": float(i % 2)},
                logprobs=sampling.tolist(),
                is_sampled=here.tolist(),
                old_logprobs=old,
                ref_logprobs=ref,
            )
        )
    return [make_group(0, rollouts[:2]), make_group(1, rollouts[2:])]


def make_logits() -> Tensor:
    """Returns logits [B, C, V] with gradient, in float64."""
    width = max(map(len, MASKS))
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(len(MASKS), width, VOCABULARY, generator=random, dtype=torch.float64)
    return logits.requires_grad_()


def compute(loss: Loss, groups: list[Group], logits: Tensor) -> LossOutput:
    """Computes the loss of one optimizer batch, from rewards on."""
    recipe = replace(RECIPE, loss=loss, advantage=Advantage(rule="opo"))
    samples = [r.as_kind(TrainingSample) for g in groups for r in g.rollouts]
    if loss.beta and loss.kl_in == "reward":
        samples = [credit.subtract_kl(s, loss.kl_estimator, loss.beta) for s in samples]
    elif not loss.beta:
        samples = [replace(s, ref_logprobs=None) for s in samples]
    groups = regrouped(groups, samples)
    groups, _ = credit.with_advantages(recipe, groups, dict(rollout_stats(groups)), 0)
    rollouts, tokens = credit.weigh_samples(recipe, groups, Workers("cpu"))
    batch = collate(rollouts, CPU)
    targets = torch.zeros(logits.shape[:2], dtype=torch.long)
    for row, r in zip(targets, rollouts, strict=True):
        row[: len(r.completion.ids)] = torch.tensor(r.completion.ids)
    return grpo_loss(
        loss,
        batch,
        token_logprobs(logits, targets),
        token_entropy(logits),
        Coefficients(loss.beta, loss.entropy_coef, tokens),
    )


KL: list[dict[str, Any]] = [
    {},
    {"beta": 0.1},
    {"beta": 0.1, "kl_estimator": "k1", "kl_bias_correction": True},
    {"beta": 0.1, "kl_in": "reward"},
]
BONUS: list[dict[str, Any]] = [{"entropy_coef": 0.1}, {"off_policy_mask": 0.01}]


def configs(file: Path) -> Iterator[Loss]:
    """Yields a loss with every normalisation, correction and place of the KL, and its bonus."""
    for normalize, correction, kl in product(WEIGHTS, ("none", *CORRECTIONS), KL):
        of_correction = {"sampling_correction": correction}
        if correction != "none":
            of_correction["sampling_cap"] = 1.3  # type: ignore[assignment]
        yield config_of(file, normalize=normalize, **of_correction, **kl)
    for further in BONUS:
        yield config_of(file, **further)


@every_loss
def test_foreign_tokens_have_no_gradient(file: Path) -> None:
    for config in configs(file):
        logits = make_logits()
        compute(config, make_batch(), logits).loss.backward()
        for row, mask in zip(logits.grad, MASKS, strict=True):
            here = torch.zeros(len(row), dtype=torch.bool)
            here[: len(mask)] = torch.tensor(mask, dtype=torch.bool)
            assert (row[~here] == 0).all(), config
        assert logits.grad.abs().sum() > 0, config


@every_loss
@pytest.mark.parametrize("value", [0.0, -40.0, math.nan])
def test_log_probabilities_of_foreign_tokens_change_nothing(file: Path, value: float) -> None:
    for config in list(configs(file))[:: 3 if value == 0 else 11]:
        found = []
        for groups in (make_batch(), make_batch(value)):
            logits = make_logits()
            output = compute(config, groups, logits)
            output.loss.backward()
            metrics = output.metrics.reduced(Workers("cpu")).figures
            found.append((output.loss, logits.grad, metrics))
        (loss, gradient, metrics), (own_loss, own_gradient, own_metrics) = found
        assert torch.equal(loss, own_loss), config
        assert torch.equal(gradient, own_gradient), config
        assert metrics == own_metrics, config


# With a model, token selection and the optimizer step


def with_replies(value: float) -> list[Group]:
    """Returns the groups of test_invariance.py; every other token from the third on is foreign."""
    groups, found = make_groups(), list[Rollout]()
    for r in (r for g in groups for r in g.rollouts):
        sampled = [t < 2 or t % 2 == 1 for t in range(len(r.completion.ids))]
        foreign = [t for t, s in enumerate(sampled) if not s]
        found.append(replace(r, completion=replace(r.completion, is_sampled=sampled)))
        for t in foreign:
            r.old_logprobs[t] = r.ref_logprobs[t] = r.completion.sampling_logprobs[t] = value
    return regrouped(groups, found)


SELECTING = ("top_entropy", "clip_cov", "kl_cov", "entropy", "gspo", "k3", "router")


def gradients(value: float, **how: Any) -> Found:
    return all_gradients(
        Workers("cpu"), make_groups(), 40, names=SELECTING, make=lambda: with_replies(value), **how
    )


def test_an_optimizer_step_depends_on_no_number_of_a_foreign_token() -> None:
    expected, found = gradients(-5.6), gradients(0.0)
    for name in SELECTING:
        assert torch.equal(found[name][0], expected[name][0]), name
        assert found[name][1] == expected[name][1], name


def test_an_optimizer_step_with_foreign_tokens_is_the_same_in_other_modes() -> None:
    expected, found = gradients(0.0), gradients(0.0, packed=False, chunked=False)
    for name in SELECTING:
        gradient = expected[name][0]
        difference = (found[name][0] - gradient).abs().max() / gradient.abs().max()
        assert difference < (1e-5 if name == "router" else 1e-9), name


def test_lengths_are_those_of_sampled_tokens() -> None:
    groups = make_batch()
    stats = dict(rollout_stats(groups))
    assert credit.reward_tensors(stats, {"r": 1.0})["lengths"].tolist() == [[4, 3], [3, 2]]
    assert [o.tokens for group in stats.values() for o in group] == [7, 4, 3, 5]


def test_the_batch_is_not_a_trivial_one() -> None:
    # Without this, the tests above could hold because nothing trains.
    assert [r.loss_tokens for g in make_batch() for r in g.rollouts] == [4, 3, 3, 2]
    foreign = [
        sum(not s for s in r.completion.is_sampled or ())
        for g in with_replies(0.0)
        for r in g.rollouts
    ]
    assert sum(foreign) > 20
