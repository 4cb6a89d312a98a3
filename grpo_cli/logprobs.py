"""Logits to log-probabilities and entropies of tokens: pure, in float32 or better."""

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Log softmax(logits / temperature) at the targets.

    Args:
        logits: [B, C, V], logits[:, c] predicting targets[:, c]; targets: [B, C] token ids.

    Returns:
        [B, C] float32 (float64 of float64). Differentiable.
    """
    assert logits.shape[:-1] == targets.shape, f"{tuple(logits.shape)} {tuple(targets.shape)}"
    logits = upcast(logits) / temperature
    chosen = logits.gather(-1, targets[..., None]).squeeze(-1)  # [B, C]
    return chosen - logits.logsumexp(-1)


def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of softmax(logits / temperature), [B, C, V] -> [B, C]. Differentiable."""
    log_p = (upcast(logits) / temperature).log_softmax(-1)  # [B, C, V]
    # A logit of -inf has probability 0 and adds nothing; 0 · -inf would be NaN.
    return -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)


def upcast(logits: Tensor) -> Tensor:
    """At least float32: log-probabilities of half precision are too coarse for ratios."""
    return logits if logits.dtype == torch.float64 else logits.float()
