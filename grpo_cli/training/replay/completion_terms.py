"""Explains what the loss makes of one completion: ratio, clipping, KL and pull of each token."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_cli.algorithm.batch import collate
from grpo_cli.algorithm.kl import ESTIMATORS
from grpo_cli.algorithm.loss import Coefficients, grpo_loss
from grpo_cli.config.schema import Loss
from grpo_cli.records import Rollout

# Why a token does not pull, or TRAINS.
TRAINS, MASKED, LEFT_OUT, CLIPPED = "trains", "masked", "left out", "clipped"


@dataclass(frozen=True)
class Terms:
    """The numbers of a completion's C tokens under the present policy, on the CPU."""

    logprobs: Tensor  # [C]
    old_logprobs: Tensor  # [C] the present ones where the rollout has none: it is on-policy
    ratio: Tensor  # [C] exp(logprobs − old_logprobs); 1 on tokens that do not train
    kl: Tensor | None  # [C] the estimate of each token; None without a reference
    pull: Tensor  # [C] −∂loss/∂logprob of policy term and KL; > 0: the token becomes likelier
    marks: list[str]  # of each token


def terms_of(
    config: Loss,
    rollout: Rollout,
    logprobs: Tensor,
    entropies: Tensor | None,
    coefficients: Coefficients,
) -> Terms:
    """Returns the numbers of a rollout's tokens.

    A token is masked if it was not sampled or its completion does not train; left out if
    `loss.top_entropy` leaves it out; clipped if the policy term has no gradient there although its
    advantage is not 0: beyond the clip range, chosen by its covariance, or of a completion that
    `loss.off_policy_mask` drops.

    Args:
        logprobs: [1, C] under the present policy.
        entropies: [1, C], if they are measured.
    """
    batch = collate([rollout], logprobs.device)
    own = None if entropies is None else entropies.detach()
    alone = dataclasses.replace(coefficients, entropy=0.0, router=0.0, load=None)

    def pull(of: Coefficients) -> Tensor:
        leaf = logprobs.detach().clone().requires_grad_()
        with torch.enable_grad():
            loss = grpo_loss(config, batch, leaf, own, of).loss
            if not loss.requires_grad:
                return torch.zeros_like(leaf)[0]
            (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        return -(torch.zeros_like(leaf) if gradient is None else gradient)[0].cpu()

    current = logprobs.detach()
    old = batch.old_logprobs_or(current)[0].cpu()
    mask = batch.loss_mask[0].cpu() > 0
    current = current[0].cpu()
    of_policy = pull(dataclasses.replace(alone, beta=0.0))
    trained = mask if rollout.high_entropy is None else mask & (rollout.high_entropy > 0)
    clipped = trained & (of_policy == 0) & (rollout.advantages != 0)
    kl = None
    if rollout.ref_logprobs is not None:
        kl = ESTIMATORS[config.kl_estimator](current, rollout.ref_logprobs.cpu())
    return Terms(
        current,
        torch.where(mask, old, current),
        torch.where(mask, (current - old).exp(), 1.0),
        kl,
        pull(alone),
        [
            MASKED if not mask[t] else LEFT_OUT if not trained[t] else CLIPPED if clipped[t]
            else TRAINS
            for t in range(len(mask))
        ],
    )  # fmt: skip
