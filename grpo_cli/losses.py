"""Policy losses and KL estimators: one pure function each, torch only.

Each takes [B, C] tensors over completion tokens and returns a [B, C] loss per token, without any
average. Which average is taken is a matter of `token_weights`, whose divisor counts the whole
optimizer batch over all processes: neither micro-batches nor ranks can change the gradient.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


def clipped(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    epsilon: float,
    epsilon_high: float | None = None,
) -> Tensor:
    """−min(ρA, clip(ρ, 1−ε, 1+ε_high)A) with ρ = exp(logprobs − old_logprobs).

    PPO's surrogate (arXiv 1707.06347, eq. 7) with GRPO's advantages (DeepSeekMath, arXiv
    2402.03300, eq. 3); ε_high > ε is DAPO's clip-higher (arXiv 2503.14476, eq. 8).

    Args:
        logprobs: [B, C], with gradient; old_logprobs: [B, C], without.
        advantages: [B], one for each rollout.

    Returns:
        [B, C] loss of each token. At ρ = 1 its gradient is −A·∇logprobs, that of REINFORCE.
    """
    ratio, advantages = _ratio_and_advantages(logprobs, old_logprobs, advantages)
    high = epsilon if epsilon_high is None else epsilon_high
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon, 1 + high) * advantages)


def clip_flags(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    epsilon: float,
    epsilon_high: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens that `clipped` gives no gradient: (below 1−ε, above 1+ε_high), each [B, C] bool."""
    ratio, advantages = _ratio_and_advantages(logprobs, old_logprobs, advantages)
    high = epsilon if epsilon_high is None else epsilon_high
    return (ratio < 1 - epsilon) & (advantages < 0), (ratio > 1 + high) & (advantages > 0)


def _ratio_and_advantages(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor
) -> tuple[Tensor, Tensor]:
    assert logprobs.shape == old_logprobs.shape, "one old log-probability for each token"
    assert advantages.shape == logprobs.shape[:1], "one advantage for each rollout"
    return (logprobs - old_logprobs).exp(), advantages[:, None]


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """π_ref/π − log(π_ref/π) − 1 for each token, [B, C] (DeepSeekMath, arXiv 2402.03300, eq. 4).

    An unbiased, non-negative estimate of KL(π ‖ π_ref) on tokens sampled from π
    (Schulman 2020, http://joschu.net/blog/kl-approx.html).
    """
    log_ratio = ref_logprobs - logprobs
    return log_ratio.exp() - log_ratio - 1


def token_weights(loss_mask: Tensor, normalize: str, counts: Mapping[str, float]) -> Tensor:
    """What each token's loss is multiplied by before everything is summed, [B, C].

    Args:
        loss_mask: [B, C], 1 on tokens that train.
        normalize: "tokens": each token counts 1/tokens (DAPO, arXiv 2503.14476, eq. 8);
            "completions": each counts 1/(its completion's length · completions) (DeepSeekMath,
            arXiv 2402.03300, eq. 3).
        counts: tokens and completions over the whole optimizer batch and all processes.
    """
    if normalize == "completions":
        loss_mask = loss_mask / loss_mask.sum(-1, keepdim=True).clamp(min=1)
    return loss_mask / max(counts[normalize], 1.0)


POLICY = {"clipped": clipped}
