"""Turns logits into the sampling distribution and draws a token from it, without side effects.

Rows do not depend on each other: on the CPU, a row's result is bitwise the same alone and in a
batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from grpo_cli.generation.settings import Generation

# Logits per CPU thread that `choose` processes at a time, so that they stay in cache.
CACHED = 2**18
# Number of likeliest tokens that top-p sorts first; the factor if they do not suffice.
FIRST, MORE = 64, 16


@dataclass(frozen=True)
class Sampling:
    """Settings of the sampling distribution. A temperature of 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, number added to its logit)
    min_tokens: int = 0  # generators forbid eos before this length
    stop: tuple[str, ...] = ()  # strings that end a completion (stop_strings.py)
    never: tuple[int, ...] = ()  # ids of placeholder tokens

    @property
    def is_unfiltered(self) -> bool:
        """Whether tokens are drawn from softmax(logits / temperature), unmodified."""
        plain = Sampling(self.max_tokens, self.temperature, stop=self.stop)
        return self == plain and self.temperature > 0

    @classmethod
    def of(cls, config: Generation, **changes: Any) -> Sampling:
        """Returns the settings of `generation`, with some changed."""
        same = (
            "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
            "frequency_penalty",
        )  # fmt: skip
        settings: dict[str, Any] = {
            "max_tokens": config.max_completion_tokens,
            "min_tokens": config.min_completion_tokens,
            "logit_bias": tuple(sorted(config.logit_bias.items())),
            "stop": tuple(config.stop),
            **{name: getattr(config, name) for name in same},
        }
        return cls(**settings | changes)

    def bias(self, size: int, device: torch.device) -> Tensor | None:
        """Returns the bias added to the logits of every row, [V]; None if there is none."""
        if not (self.logit_bias or self.never):
            return None
        bias = torch.zeros(size, device=device)
        for token, added in self.logit_bias:
            bias[token] = added
        bias[[token for token in self.never if token < size]] = -torch.inf
        return bias


def choose(
    logits: Tensor,
    sampling: Sampling,
    uniforms: Tensor | None,
    *,
    bias: Tensor | None = None,
    seen: Tensor | None = None,
    counts: Tensor | None = None,
    forbidden: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draws the next token of each row; returns it with its log-probability.

    The distribution: bias, repetition penalty, presence and frequency penalty, forbidden tokens,
    temperature, then top-k, top-p and min-p, each renormalised; tokens ruled out have probability
    0. Greedy decoding takes the likeliest token, and reports its log-probability at temperature 1
    without top-k, top-p, min-p.
    On the CPU a few rows are computed at a time, so that no intermediate has the logits' size.

    Args:
        logits: [B, V]. uniforms: [B] in [0, 1); greedy decoding reads none.
        bias: [V], added to every row's logits.
        seen: [B, V] bool, the tokens of the row's prompt and completion so far; only a repetition
            penalty other than 1 reads it.
        counts: [B, V] how often each token is in the row's completion so far; only presence and
            frequency penalties read it.
        forbidden: [B, K] ids of tokens that must not come next; -1 where a row has fewer than K.

    Returns:
        [B] token ids and [B] float32.
    """
    rows, size = logits.shape
    on_cpu = logits.device.type == "cpu"
    step = max(1, CACHED * torch.get_num_threads() // size) if on_cpu else max(1, rows)
    tokens, logprobs = [], []
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        scores = adjusted(
            logits[part],
            sampling,
            bias,
            *(None if given is None else given[part] for given in (seen, counts, forbidden)),
        )
        token, logprob = pick(scores, sampling, None if uniforms is None else uniforms[part])
        tokens.append(token)
        logprobs.append(logprob)
    if not rows:
        return logits.new_zeros(0, dtype=torch.long), logits.new_zeros(0, dtype=torch.float32)
    return torch.cat(tokens), torch.cat(logprobs)


def pick(
    scores: Tensor, sampling: Sampling, uniforms: Tensor | None, *, at_once: bool = False
) -> tuple[Tensor, Tensor]:
    """Draws a token for each row of adjusted scores; see `choose`.

    Args:
        scores: [B, V]. uniforms: [B].
        at_once: avoid data-dependent branches, which would synchronize with the device.
    """
    log_p = filtered(scores, sampling, at_once=at_once)
    if sampling.temperature == 0:
        token = scores.argmax(-1)  # not of log_p, where rounding makes some tokens equal
    else:
        assert uniforms is not None, "a draw takes a uniform number for each row"
        token = draw(log_p, uniforms)
    return token, log_p.gather(-1, token[:, None]).squeeze(-1)


def adjusted(
    logits: Tensor,
    sampling: Sampling,
    bias: Tensor | None,
    seen: Tensor | None,
    counts: Tensor | None,
    forbidden: Tensor | None,
) -> Tensor:
    """Returns logits after bias, penalties and forbidden tokens, [B, V] float32.

    The order is vLLM's. Greedy decoding takes the largest.
    """
    scores = logits.float()  # [B, V]
    if bias is not None:
        scores = scores + bias
    if sampling.repetition_penalty != 1:
        assert seen is not None, "a repetition penalty needs the tokens seen so far"
        penalty = sampling.repetition_penalty  # CTRL, arXiv 1909.05858, section 4.1
        penalised = torch.where(scores > 0, scores / penalty, scores * penalty)
        scores = torch.where(seen, penalised, scores)
    if sampling.frequency_penalty or sampling.presence_penalty:  # OpenAI's definition
        assert counts is not None, "the penalties need the tokens sampled so far"
        scores = scores - sampling.frequency_penalty * counts
        scores = scores - sampling.presence_penalty * (counts > 0)
    if forbidden is not None:
        none = forbidden < 0
        bound = torch.where(none, torch.inf, -torch.inf).to(scores)  # [B, K]
        scores = scores.scatter_reduce(-1, forbidden.masked_fill(none, 0), bound, "amin")
    return scores


def filtered(scores: Tensor, sampling: Sampling, *, at_once: bool = False) -> Tensor:
    """Applies temperature, top-k, top-p and min-p: [B, V] -> normalised log-probs [B, V].

    Ties with the last token that top-k or top-p keeps are kept too, so that the result does not
    depend on the order of equal tokens.
    """
    if sampling.temperature == 0:
        return scores.log_softmax(-1)
    if sampling.temperature != 1:
        scores = scores / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        scores = without(scores, scores.topk(sampling.top_k, dim=-1).values[:, -1:])
    if sampling.top_p < 1:
        scores = scores.log_softmax(-1)
        scores = without(scores, least_of_share(scores, sampling.top_p, at_once=at_once))
    if sampling.min_p > 0:
        scores = without(scores, scores.amax(-1, keepdim=True) + math.log(sampling.min_p))
    return scores.log_softmax(-1)


def without(scores: Tensor, least: Tensor) -> Tensor:
    """Sets the scores below each row's bound, [B, 1], to -inf."""
    return scores.masked_fill(scores < least, -torch.inf)


def least_of_share(log_p: Tensor, share: float, *, at_once: bool = False) -> Tensor:
    """Returns the lowest log-probability in the top-p nucleus of each row, [B, 1].

    A token is in the nucleus if the tokens before it do not yet fill `share`, so the first always
    is. Sorting a large vocabulary is slow and a few tokens mostly suffice. Hence the 64 likeliest
    are sorted first, and more only for the rows that need it; `at_once` sorts all.
    """
    size = log_p.shape[-1]
    least = torch.empty_like(log_p[:, :1])
    rows = torch.arange(len(log_p), device=log_p.device)  # rows whose share is not filled yet
    width = FIRST if size > FIRST * MORE and not at_once else size
    while len(rows):
        some = log_p if len(rows) == len(log_p) else log_p[rows]
        if width < size:
            ordered = some.topk(width, dim=-1).values  # [b, width]
        else:
            ordered = some.sort(dim=-1, descending=True).values  # [b, V]
        before = (ordered.exp().cumsum(-1) < share).sum(-1, keepdim=True)  # [b, 1]
        least[rows] = ordered.gather(-1, before.clamp(max=ordered.shape[-1] - 1))
        if width >= size:
            break
        rows = rows[(before == width).squeeze(-1)]
        width = min(width * MORE, size)
    return least


def draw(log_p: Tensor, uniforms: Tensor) -> Tensor:
    """Returns the token at which each row's cumulative distribution passes its uniform number.

    Each row and position has its own number, so a completion does not depend on its neighbours in
    the batch. A token of probability 0 is never drawn.

    Args:
        log_p: [B, V] normalised, -inf on tokens that must not be drawn.
        uniforms: [B] in [0, 1).

    Returns:
        [B] token ids.
    """
    p = log_p.exp()  # [B, V]
    if sums_in_order(p.device):
        cdf = p.cumsum_(-1)
    else:
        # cummax makes the sums monotonic, and gives tokens of probability 0 the sum of the token
        # before them.
        cdf = p.cumsum(-1).masked_fill(p == 0, 0.0).cummax(-1).values
    # Sums need not end at 1, hence the scaling. If rounding puts the target at the total, the last
    # token with nonzero probability is drawn.
    total = cdf[:, -1:]
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, total.new_zeros(())))
    # right=True skips tokens of probability 0: the first index with cdf > target is not one.
    return torch.searchsorted(cdf, target, right=True).squeeze(-1)


def sums_in_order(device: torch.device) -> bool:
    """Returns whether cumsum of numbers >= 0 is monotonic, and constant where a 0 is added.

    The CPU adds sequentially in float64 and rounds each sum. A GPU sums in parallel.
    """
    return device.type == "cpu"
