"""Collates samples into the tensors that the loss reads for a micro-batch.

Masks come from lengths and sampling, never from `ids != pad`, since a model may sample its pad
token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
