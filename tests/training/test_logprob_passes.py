"""Tokens are selected among the sampled ones of an optimizer batch."""

import pytest
import torch
from transformers import PreTrainedModel

from grpo_cli.algorithm import token_selection
from grpo_cli.algorithm.settings import Loss
from grpo_cli.config.recipe import Recipe
from grpo_cli.distributed.workers import Workers
from grpo_cli.generation.embedded.generator import TransformersGenerator
from grpo_cli.models.micro_batches import MicroBatchBudget
from grpo_cli.models.policy_logprobs import PolicyLogprobs
from grpo_cli.records import WeightedSample
from grpo_cli.training import logprob_passes
from grpo_cli.training.run import Run
from tests.conftest import make_loss, make_rollout
from tests.partial_run import partial_run


def run_of(model: PreTrainedModel, loss: Loss) -> Run:
    optimizer = torch.optim.SGD(model.parameters())
    budget = MicroBatchBudget(1000, print)
    recipe = Recipe(loss=loss)
    return partial_run(Workers("cpu"), PolicyLogprobs(model), budget, optimizer, recipe=recipe)


def episodes() -> list[WeightedSample]:
    """Two samples of the same tokens: in the first one, most are a reply."""
    random = torch.Generator().manual_seed(0)
    samples = list[WeightedSample]()
    for sampled in ([True] * 3 + [False] * 12 + [True] * 2, [True] * 17):
        ids = torch.randint(3, 200, (17,), generator=random).tolist()
        advantages = torch.randn(17, generator=random)
        own = {"completion_ids": ids, "is_sampled": sampled, "token_advantages": advantages}
        samples.append(make_rollout(reward=1.0, place=(0, len(samples)), **own))
    return samples


def test_old_logprobs_are_never_those_of_a_rollout_function(model: PreTrainedModel) -> None:
    run = run_of(model, Loss())
    run.generator = TransformersGenerator(model, [2])
    for rollout, expected in ((None, True), ("my:function", False)):
        run.recipe = Recipe(rollout=rollout)
        assert logprob_passes.samples_as_trained(run) is expected


def test_entropy_selects_sampled_tokens(model: PreTrainedModel) -> None:
    run, rollouts = run_of(model, Loss(top_entropy=0.3)), episodes()
    stats = logprob_passes.token_stats(run.policy, run.policy.logprobs, rollouts, 1.0, entropy=True)
    masks = [r.completion.sampled_mask for r in rollouts]
    entropies = torch.cat([s.entropies[m] for s, m in zip(stats, masks, strict=True)])  # type: ignore[index]
    assert len(entropies) == 22
    threshold = token_selection.entropy_threshold(entropies, 0.3)
    selected, tokens = logprob_passes.select_tokens(run, rollouts, 0, 22.0)
    for r, mask, s in zip(selected, masks, stats, strict=True):
        assert r.high_entropy.bool().tolist() == ((s.entropies >= threshold) & mask).tolist()
    assert tokens == (entropies >= threshold).sum()


@pytest.mark.parametrize("policy", ["clip_cov", "kl_cov"])
def test_covariance_selects_sampled_tokens(model: PreTrainedModel, policy: str) -> None:
    # Log-probabilities of 0.0 and the reply's advantages would move both means.
    run = run_of(model, make_loss(policy=policy, cov_share=0.5, cov_low=0.0))
    rollouts, _ = logprob_passes.select_tokens(run, episodes(), 0, 22.0)
    masks = [r.completion.sampled_mask for r in rollouts]
    stats = logprob_passes.token_stats(run.policy, run.policy.logprobs, rollouts, 1.0)
    cov = token_selection.covariance(
        torch.cat([s.logprobs[m] for s, m in zip(stats, masks, strict=True)]).double(),
        torch.cat([r.advantages[m] for r, m in zip(rollouts, masks, strict=True)]).double(),
    )
    chosen = torch.cat([r.cov_selected for r in rollouts])  # type: ignore[misc]
    mask = torch.cat(masks)
    assert (chosen[~mask] == 0).all()
    if policy == "kl_cov":
        assert chosen[mask].bool().tolist() == (cov >= cov.sort().values[-11]).tolist()
    else:
        assert (cov[chosen[mask].bool()] > 0).all()
        assert chosen.sum() == min(11, int((cov > 0).sum()))
