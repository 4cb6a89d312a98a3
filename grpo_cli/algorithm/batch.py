"""Weighs the tokens of samples, and collates samples into the tensors that the loss reads.

Weights are divided by counts of the complete optimizer batch on all processes, taken before the
first backward. The loss is then one sum, independent of its division into micro-batches and
processes. Masks come from lengths and sampling, never from `ids != pad`, since a model may sample
its pad token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_cli.records import WeightedSample, on_device, sampled_mask


@dataclass(frozen=True)
class Batch:
    """The inputs of the loss for B samples, except the current policy's log-probabilities.

    C is the longest completion; shorter ones are padded on the right. Log-probabilities and
    selections are 0 on tokens that do not train.
    """

    loss_mask: Tensor  # [B, C] float, 1 on completion tokens that train
    weights: Tensor  # [B, C] factor of each token's loss, 0 on tokens that do not train
    advantages: Tensor  # [B, C]
    sampling_logprobs: Tensor  # [B, C] NaN where the generator reports none
    old_logprobs: Tensor | None  # [B, C] NaN in rows without any; None if no row has any
    ref_logprobs: Tensor | None  # [B, C]
    high_entropy: Tensor | None  # [B, C]
    cov_selected: Tensor | None  # [B, C]

    def zero_masked(self, values: Tensor) -> Tensor:
        """Returns [B, C] values with 0 on tokens that do not train.

        A model's outputs on padding are arbitrary: their exp can be inf, and inf · 0 is NaN. A mask
        must therefore be applied before an exp, not only after it.
        """
        return values.masked_fill(self.loss_mask == 0, 0.0)

    def old_logprobs_or(self, current: Tensor) -> Tensor:
        """Returns old_logprobs, with `current` in rows without any, which are on-policy."""
        if self.old_logprobs is None:
            return current
        return torch.where(self.old_logprobs.isnan(), current, self.old_logprobs)


def collate(samples: Sequence[WeightedSample], device: torch.device) -> Batch:
    """Pads B samples into a `Batch` on `device`."""
    width = max(len(s.completion.ids) for s in samples)
    trains = torch.tensor([[s.loss_tokens > 0] for s in samples])
    loss_mask = (sampled_mask(samples) & trains).float()  # [B, C]
    masked = loss_mask == 0

    def rows(values: Iterable[Any]) -> Tensor:
        return pad_right([torch.as_tensor(v, dtype=torch.float32) for v in values], width)

    def masked_rows(values: list[Tensor | None]) -> Tensor | None:
        if all(v is None for v in values):
            return None
        absent = torch.full((width,), math.nan)
        padded = rows(absent if v is None else v for v in values)
        return on_device(padded.masked_fill(masked, 0.0), device)

    sampling_logprobs = rows(s.completion.sampling_logprobs for s in samples)
    return Batch(
        loss_mask=on_device(loss_mask, device),
        weights=on_device(loss_mask * torch.tensor([[s.weight] for s in samples]), device),
        advantages=on_device(rows(s.advantages for s in samples), device),
        sampling_logprobs=on_device(sampling_logprobs.masked_fill(masked, 0.0), device),
        old_logprobs=masked_rows([s.old_logprobs for s in samples]),
        ref_logprobs=masked_rows([s.ref_logprobs for s in samples]),
        high_entropy=masked_rows([s.high_entropy for s in samples]),
        cov_selected=masked_rows([s.cov_selected for s in samples]),
    )


def pad_right(rows: Sequence[Tensor], width: int) -> Tensor:
    """Pads B one-dimensional tensors with zeros on the right to one [B, width]."""
    out = rows[0].new_zeros(len(rows), width)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def token_weight(
    normalize: str,
    tokens: int,
    group_tokens: int,
    counts: Mapping[str, float],
    max_completion_tokens: int,
) -> float:
    """Returns the factor of each token's loss in one completion.

    Args:
        normalize: a name in WEIGHTS.
        tokens: number of the completion's tokens that train, > 0.
        group_tokens: number of tokens that train in its group's completions in the batch.
        counts: "tokens" that train, "completions" and "prompts" of the optimizer batch. Completions
            without tokens that train also count, since they are among the paper's G.
        max_completion_tokens: the run's longest completion, for "constant".
    """
    return WEIGHTS[normalize](tokens, group_tokens, counts, max_completion_tokens)


Weight = Callable[[int, int, Mapping[str, float], int], float]

WEIGHTS: dict[str, Weight] = {
    # equal weight per token (DAPO, arXiv 2503.14476, eq. 8)
    "tokens": lambda tokens, group, counts, longest: 1 / counts["tokens"],
    # equal weight per completion: mean over its tokens (DeepSeekMath, arXiv 2402.03300, eq. 3)
    "completions": lambda tokens, group, counts, longest: 1 / (tokens * counts["completions"]),
    # equal weight per prompt: mean over its group's tokens (ScaleRL, arXiv 2510.13786)
    "prompts": lambda tokens, group, counts, longest: 1 / (group * counts["prompts"]),
    # constant divisor, independent of length (Dr. GRPO, arXiv 2503.20783, section 3.1)
    "constant": lambda tokens, group, counts, longest: 1 / (longest * counts["completions"]),
    # sum over a completion, proportional to its length (LUSPO, arXiv 2602.05261)
    "sums": lambda tokens, group, counts, longest: 1 / counts["completions"],
}
