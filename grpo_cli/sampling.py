"""Logits to the distribution that is sampled from, and one draw from it: pure, row by row."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn. A temperature of 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


def log_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities of the distribution sampled from, [B, V] -> [B, V] float32.

    Temperature, then top-k, top-p and min-p, each renormalised. Tokens ruled out get -inf. For
    greedy decoding this is the model's own distribution, at temperature 1.
    """
    log_p = (logits.float() / (sampling.temperature or 1.0)).log_softmax(-1)  # [B, V]
    if sampling.temperature == 0:
        return log_p
    if 0 < sampling.top_k < log_p.shape[-1]:
        least = log_p.topk(sampling.top_k, dim=-1).values[:, -1:]  # [B, 1]
        log_p = log_p.masked_fill(log_p < least, -torch.inf).log_softmax(-1)
    if sampling.top_p < 1:
        ordered, index = log_p.sort(dim=-1, descending=True)
        p = ordered.exp()
        # A token stays if those before it do not yet fill the share; so the first always stays.
        outside = p.cumsum(-1) - p >= sampling.top_p  # [B, V]
        outside = torch.zeros_like(outside).scatter(-1, index, outside)
        log_p = log_p.masked_fill(outside, -torch.inf).log_softmax(-1)
    if sampling.min_p > 0:
        p = log_p.exp()
        low = p < sampling.min_p * p.amax(-1, keepdim=True)
        log_p = log_p.masked_fill(low, -torch.inf).log_softmax(-1)
    return log_p


def draw(log_p: Tensor, uniforms: Tensor) -> Tensor:
    """The token at which the distribution function passes each row's uniform number.

    With its own number for each row and position, a completion does not depend on its neighbours
    in the batch.

    Args:
        log_p: [B, V] normalised, -inf on tokens that must not be drawn.
        uniforms: [B] in [0, 1).

    Returns:
        [B] token ids.
    """
    p = log_p.exp()  # [B, V]
    # A GPU's prefix sums need not rise from one to the next. cummax makes them, and puts tokens of
    # probability 0 where the one before them stands. Nor need they end at 1, hence the scaling.
    cdf = p.cumsum(-1).masked_fill(p == 0, 0.0).cummax(-1).values
    # right=True skips tokens of probability 0: the first index with cdf > target has some.
    tokens = torch.searchsorted(cdf, uniforms[:, None] * cdf[:, -1:], right=True).squeeze(-1)
    # When rounding puts the target at the sum itself, the last token of some probability is meant.
    last = (cdf < cdf[:, -1:]).sum(-1)  # [B]
    return torch.minimum(tokens, last)
