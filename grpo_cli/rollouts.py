"""The records that travel through a step, in order: Prompt, Completion, Rollout, Group, Batch.

A step with P = 2 prompts and G = 3 completions each:

    prompts  [Prompt("2+3="), Prompt("9+9=")]                          from data.PromptStream
    groups   [Group(prompt, [Rollout, Rollout, Rollout]), Group(...)]  from the generator
    batches  Batch of B rows (P·G = 6 in all), C completion tokens     for the model

Rows are lists of token ids until the model's door: `packing.py` makes of them what the model reads,
`collate` what the loss reads. A mask is made from lengths and never from `ids != pad`, because a
model may well sample its own pad token.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Prompt:
    """One row of the data set, ready to be completed."""

    row: int  # line of the data set, counted from 0, before anything was dropped
    ids: list[int]  # prompt tokens, template and chat markup included
    text: str | Messages  # what reward functions receive as `prompts`
    columns: dict[str, Any]  # every other column of the row


@dataclass(frozen=True)
class Completion:
    """What a generator returns: tokens and how they were sampled, nothing guessed."""

    ids: list[int]  # sampled tokens, the eos included if it was emitted; and those of tools
    logprobs: list[float]  # log-probability of each under the distribution sampled from
    finish_reason: Literal["stop", "length"]  # an eos was sampled, or the limit was reached
    sampled_at: int | None = None  # oldest step whose weights it comes from; None: the newest
    sampled: list[bool] | None = None  # of each token; None: all. A tool's has a logprob of 0.0
    tool_calls: int = 0  # programs that were run (`tools.py`)
    tool_errors: int = 0  # of them, those that raised or were stopped
    tool_timeouts: int = 0  # of the errors, those over their time: endless programs


@dataclass
class Rollout:
    """One completion of a prompt with all that is learnt about it during the step."""

    prompt: Prompt
    completion: Completion
    text: str  # the completion decoded, without special tokens
    reward_parts: dict[str, float | None] = field(default_factory=dict)  # by function, unweighted
    step_rewards: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    # ^ of functions that reward steps: (token at which a step ends, weighted value)
    reward: float = math.nan  # weighted sum, steps included; NaN when no function applied
    outcome: float = math.nan  # the same without steps: what the advantage rule is given
    extras: dict[str, Any] = field(default_factory=dict)  # columns that functions logged
    masked: bool = False  # does not train, though it has a reward (`loss.mask_truncated`)
    advantage: float = 0.0
    token_advantages: Tensor | None = None  # [C] where steps were rewarded; `advantage` included
    old_logprobs: Tensor | None = None  # [C] the policy that it was sampled with
    ref_logprobs: Tensor | None = None  # [C] the reference policy
    # Known once its optimizer batch is:
    weight: float = 0.0  # what each token's loss is multiplied by (`normalization.py`)
    high_entropy: Tensor | None = None  # [C] 1 on tokens that `loss.top_entropy` keeps
    cov_selected: Tensor | None = None  # [C] 1 on tokens chosen by their covariance

    @property
    def loss_tokens(self) -> int:
        """Completion tokens that train: sampled ones, none when no reward function applied."""
        if self.masked or math.isnan(self.reward):
            return 0
        sampled = self.completion.sampled
        return len(self.completion.ids) if sampled is None else sum(sampled)

    @property
    def advantages(self) -> Tensor:
        """Of each token, [C]."""
        if self.token_advantages is not None:
            return self.token_advantages
        return torch.full((len(self.completion.ids),), self.advantage)


@dataclass
class Group:
    """All rollouts of one prompt; `position` numbers prompts over the whole run."""

    position: int
    prompt: Prompt
    rollouts: list[Rollout]


@dataclass
class Batch:
    """What the loss needs of B rollouts, besides what the model says of them.

    C is the longest completion; shorter ones are padded on the right.
    """

    loss_mask: Tensor  # [B, C] float, 1 on completion tokens that train
    weights: Tensor  # [B, C] what a token's loss is multiplied by, 0 where nothing trains
    advantages: Tensor  # [B, C]
    sampling_logprobs: Tensor  # [B, C]
    old_logprobs: Tensor | None  # [B, C]; None, or NaN: the current policy's own, on-policy
    ref_logprobs: Tensor | None  # [B, C]
    high_entropy: Tensor | None  # [B, C]
    cov_selected: Tensor | None  # [B, C]

    def masked(self, values: Tensor) -> Tensor:
        """[B, C] values, 0 where nothing trains.

        What a model says of padding can be anything, its exp inf, and inf · 0 is NaN: a mask has to
        be applied before an exp and not only after it.
        """
        return values.masked_fill(self.loss_mask == 0, 0.0)


def collate(rollouts: Sequence[Rollout], device: torch.device) -> Batch:
    """Pads B rollouts into a `Batch` on `device`."""
    width = max(len(r.completion.ids) for r in rollouts)
    lengths = torch.tensor([[len(r.completion.ids) if r.loss_tokens else 0] for r in rollouts])
    loss_mask = (torch.arange(width) < lengths).float()  # [B, C]
    for row, r in zip(loss_mask, rollouts, strict=True):
        if r.completion.sampled is not None:
            row[: len(r.completion.ids)] *= torch.tensor(r.completion.sampled)

    def rows(values: Iterable[Any]) -> Tensor:
        padded = pad_right([torch.as_tensor(v, dtype=torch.float32) for v in values], width)
        return padded.to(device)

    def optional_rows(values: list[Tensor | None]) -> Tensor | None:
        if all(v is None for v in values):
            return None
        absent = torch.full((width,), math.nan)
        return rows(absent if v is None else v for v in values)

    return Batch(
        loss_mask=loss_mask.to(device),
        weights=(loss_mask * torch.tensor([[r.weight] for r in rollouts])).to(device),
        advantages=rows(r.advantages for r in rollouts),
        sampling_logprobs=rows(r.completion.logprobs for r in rollouts),
        old_logprobs=optional_rows([r.old_logprobs for r in rollouts]),
        ref_logprobs=optional_rows([r.ref_logprobs for r in rollouts]),
        high_entropy=optional_rows([r.high_entropy for r in rollouts]),
        cov_selected=optional_rows([r.cov_selected for r in rollouts]),
    )


def positions(attention_mask: Tensor) -> Tensor:
    """Position of each token in its row, [B, T]; 0 on the padding to its left."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def pad_right(rows: Sequence[Tensor], width: int) -> Tensor:
    """B one-dimensional tensors as one [B, width], zeros behind each."""
    out = rows[0].new_zeros(len(rows), width)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def pad_left(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """B lists of ids as (ids [B, T], attention mask [B, T]), zeros before each."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def derive_seed(*parts: int) -> int:
    """A seed in [0, 2**63) from a path of integers, such as (seed, position, sample).

    Streams derived from different paths are independent, so what is drawn for one completion does
    not depend on what else is in the batch, on the number of processes or on where a run resumed.
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def placeholder(*, reference: bool) -> Rollout:
    """A rollout that trains on nothing, for no reward applies to it.

    Args:
        reference: whether it has log-probabilities under a reference, as the others have.
    """
    return Rollout(
        Prompt(0, [0], "", {}),
        Completion([0], [0.0], "stop"),
        text="",
        ref_logprobs=torch.zeros(1) if reference else None,
    )
