"""Selects the tokens of an optimizer batch that a loss treats differently. Pure functions.

Every function takes flat tensors, [N], of the tokens that train on all processes, in any order. It
selects by thresholds, so that each process can identify its own tokens.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

from grpo_cli.config.knob import Arg

CovShare = Annotated[float, Arg("Share of the batch's tokens that are selected.", gt=0, le=1)]


def entropy_threshold(entropies: Tensor, share: float) -> float:
    """Returns the (1 − share) quantile: tokens with at least this entropy are the top `share`.

    "Beyond the 80/20 Rule", arXiv 2506.01939, eq. 6, over the whole optimizer batch rather than a
    micro-batch. Interpolates between neighbours like torch.quantile, which refuses more than 2^24
    values.

    Args:
        entropies: [N]. share: ρ, in (0, 1).
    """
    if len(entropies) == 0:
        return math.inf
    ordered = entropies.sort().values
    # The index is computed in float32, like in torch.quantile, so that both keep the same tokens.
    place = torch.tensor(1 - share, dtype=entropies.dtype) * (len(ordered) - 1)
    below = int(place.floor())
    above = min(below + 1, len(ordered) - 1)
    return float(torch.lerp(ordered[below], ordered[above], place - below))


def covariance(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Returns (log π_t − mean log π)(A_t − mean A) per token, [N] (arXiv 2505.22617, eq. 9)."""
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def clip_cov(
    cov: Tensor,
    noise: Tensor,
    *,
    cov_share: CovShare = 2e-4,
    cov_low: Annotated[float, Arg("Lower bound of a selected token's covariance.")] = 1.0,
    cov_high: Annotated[float, Arg("Upper bound of a selected token's covariance.")] = 5.0,
) -> Tensor:
    """Selects a random share of all tokens, among those with covariance in (low, high), [N] bool.

    Clip-Cov (arXiv 2505.22617, eq. 10).

    Args:
        noise: [N], a number in [0, 1) per token, so that the selection does not depend on the
            tokens' order. cov_share: r, the share of all N tokens.
    """
    candidates = (cov > cov_low) & (cov < cov_high)
    number = min(_number(cov_share, len(cov)), int(candidates.sum()))
    if number == 0:
        return torch.zeros_like(candidates)
    bound = noise[candidates].kthvalue(number).values
    return candidates & (noise <= bound)


def top_share(cov: Tensor, noise: Tensor, *, cov_share: CovShare = 2e-4) -> Tensor:
    """Selects the share of all tokens with the highest covariance, [N] bool (KL-Cov, eq. 11).

    Args:
        noise: [N], as for `clip_cov`; breaks ties in favour of the lowest values.
    """
    if len(cov) == 0:
        return torch.zeros_like(cov, dtype=torch.bool)
    number = _number(cov_share, len(cov))
    bound = cov.kthvalue(len(cov) - number + 1).values
    above, ties = cov > bound, cov == bound
    last = noise[ties].kthvalue(number - int(above.sum())).values
    return above | (ties & (noise <= last))


def _number(share: float, total: int) -> int:
    return max(1, int(share * total))
